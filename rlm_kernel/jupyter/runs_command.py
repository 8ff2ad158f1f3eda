"""``rlm-kernel runs list|show|prune``: what is kept on disk of earlier episodes."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from rlm_kernel.errors import ConfigurationError
from rlm_kernel.session.config import Settings
from rlm_kernel.session.rundir import episode_folders, prune, runs_root
from rlm_kernel.stored_runs import read_run_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="the episodes, newest first")
    listing.set_defaults(command=list_runs)
    show = actions.add_parser("show", help="one episode: its children, verbs and files")
    show.add_argument("id", metavar="ID", help="the beginning of an episode's id, or of its folder's name")
    show.set_defaults(command=show_run)
    pruning = actions.add_parser("prune", help="remove the oldest; those of living kernels are spared")
    pruning.add_argument("--keep", type=int, metavar="N", help="how many to keep (default: the setting keep_runs)")
    pruning.set_defaults(command=prune_runs)


def list_runs(_args: argparse.Namespace) -> int:
    """Print one line per episode."""
    folders = _folders()
    if not folders:
        print(f"no runs in {_root()}")
    for folder in folders:
        content = read_run_file(folder)
        children = content.get("children", [])
        print(
            f"{content.get('episode_id', folder.name):14} {_when(content)}  {len(children):3} children  "
            f"{content.get('model') or '-':24} {_one_line(content.get('final_answer'))}"
        )
    return 0


def show_run(args: argparse.Namespace) -> int:
    """Print all that is known of one episode.

    Raises:
        ConfigurationError: no episode, or more than one, has an id that begins like this.
    """
    fitting = [f for f in _folders() if f.name.startswith(args.id) or f.name.rpartition("-")[2].startswith(args.id)]
    if len(fitting) != 1:
        what = "no episode is" if not fitting else f"{len(fitting)} episodes are"
        raise ConfigurationError("ID", args.id, f"{what} called like this; see `rlm-kernel runs list`")
    [folder] = fitting
    content = read_run_file(folder)
    print(f"episode {content.get('episode_id', '?')} in {folder}")
    print(
        f"started {_when(content)}, model {content.get('model') or '-'}, {'ended' if content.get('ended') else 'not ended'}"
    )
    usage = content.get("usage", {})
    print(
        f"calls {usage.get('calls', 0)}, tokens {usage.get('prompt_tokens', 0)} + {usage.get('completion_tokens', 0)}"
    )
    print(f"final answer: {_one_line(content.get('final_answer'), 400)}")
    for verb in content.get("verbs", []):
        print(f"verb  {verb['summary']}")
    for child in content.get("children", []):
        about = child.get("error") or child.get("prompt", "")
        print(f"child {child['id']:6} {child['state']:10} {child['elapsed_s']:7.1f} s  {_one_line(about)}")
    for file in sorted(folder.iterdir()):
        print(f"file  {file.name}  {file.stat().st_size:,} bytes")
    return 0


def prune_runs(args: argparse.Namespace) -> int:
    """Remove the oldest episodes."""
    keep = Settings()["keep_runs"] if args.keep is None else args.keep
    if keep < 0:
        raise ConfigurationError("--keep", keep, "must be a whole number of at least 0")
    removed = prune(_root(), keep)
    for folder in removed:
        print(f"removed {folder.name}")
    print(f"{len(removed)} removed, {len(_folders())} kept in {_root()}")
    return 0


def _root() -> Path:
    return runs_root(Settings()["run_dir"])


def _folders() -> list[Path]:
    return sorted(episode_folders(_root()), key=lambda path: path.name, reverse=True)


def _when(content: dict[str, Any]) -> str:
    started = content.get("started_at")
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(started)) if isinstance(started, int | float) else "?" * 16


def _one_line(text: object, limit: int = 60) -> str:
    flat = " ".join(str(text).split()) if text is not None else "-"
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
