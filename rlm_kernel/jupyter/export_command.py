"""``rlm-kernel export`` and ``%rlm export``: write a run to a notebook or a trajectory file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rlm_kernel.credentials import secret_values

if TYPE_CHECKING:
    from rlm_kernel.session.session import RLMSession


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments, which are the same for the command and for the magic."""
    parser.add_argument(
        "id", metavar="ID", help="a run (c3; root for the notebook's latest), an episode, or EPISODE/RUN"
    )
    parser.add_argument("out", metavar="OUT", help="a file that ends in .ipynb or .jsonl, or a directory")
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    parser.add_argument("--tree", action="store_true", help="also show the run's descendants (.ipynb only)")


def run(args: argparse.Namespace) -> int:
    """Carry out the command. Returns the exit code."""
    from rlm_kernel.session.config import Settings
    from rlm_kernel.session.rundir import runs_root

    print(_export(args, runs_root(Settings()["run_dir"]), None))
    return 0


def export_here(args: argparse.Namespace, session: RLMSession) -> str:
    """Carry out the magic.

    Args:
        args: the arguments.
        session: whose runs come first.

    Returns:
        a line that says what was written.

    Raises:
        UsageMistake: there is no such run, or the file cannot be written.
    """
    session.supervisor.observers.flush()  # ends of children that have just ended are written there
    session.write_run_file()
    return _export(args, session.runs_root, session.run_folder)


def _export(args: argparse.Namespace, root: Path, current: Path | None) -> str:
    from rlm_kernel.export import export_run
    from rlm_kernel.stored_runs import find_run

    found = find_run(root, args.id, current=current)
    path = export_run(found, args.out, force=args.force, tree=args.tree, secrets=secret_values(os.environ))
    return f"{found.run_id} of episode {found.episode_id} ({found.state}): {path}"
