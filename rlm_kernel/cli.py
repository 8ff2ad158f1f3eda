"""The command ``rlm-kernel``, which is also ``jupyter rlm``.

This is the frame only: what a sub-command does is imported when it is asked for, so that ``--help`` stays quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from rlm_kernel._version import __version__
from rlm_kernel.errors import RLMError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Command = Callable[[argparse.Namespace], int]
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

INTERRUPTED = 130
"""Exit code after SIGINT, as shells have it: 128 + 2."""

OUTPUT_CLOSED = 141
"""Exit code when whoever reads our output has closed it, as shells have it after SIGPIPE: 128 + 13."""


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command.

    Args:
        argv: the arguments after the program's name; by default this process's.

    Returns:
        the exit code: 0 for success, 1 for a failure, which is explained on stderr. A command line that cannot be
        understood exits with 2 through `SystemExit`, as argparse does it.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    command: Command | None = getattr(args, "command", None)
    if command is None:
        parser.print_help()
        return 0
    try:
        return command(args)
    except RLMError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever reads our output has seen enough: `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the exit
        return OUTPUT_CLOSED


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line. Each sub-command leaves its function in ``args.command``."""
    parser = argparse.ArgumentParser(
        prog="rlm-kernel",
        description="A Jupyter kernel in which the notebook is the REPL of a Recursive Language Model.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_install(commands)
    _add_run(commands)
    _add_demo(commands)
    _add_doctor(commands)
    _add_runs(commands)
    _add_export(commands)
    return parser


def _add_install(commands: Commands) -> None:
    from rlm_kernel.jupyter import install

    parser = commands.add_parser("install", help="install the kernelspec, like `ipykernel install`")
    install.add_arguments(parser)
    parser.set_defaults(command=install.run)


def _add_run(commands: Commands) -> None:
    parser = commands.add_parser("run", help="answer one task over a context, without a notebook")
    parser.add_argument("--task", metavar="TEXT", required=True, help="the task, in words")
    parser.add_argument("--context", metavar="FILE", help="a text file that becomes `context`; - reads standard input")
    _add_model(parser, default=None)
    parser.add_argument("--max-iterations", type=int, metavar="N", help="model calls of the root at most")
    parser.add_argument("--max-depth", type=int, metavar="N", help="depth of the recursion at most")
    parser.add_argument("--timeout-s", type=float, metavar="SECONDS", help="wall-clock limit of the whole run")
    parser.add_argument("--json", action="store_true", help="print the result with its usage as JSON, not as text")
    parser.set_defaults(command=_run)


def _add_demo(commands: Commands) -> None:
    parser = commands.add_parser("demo", help="show background children at work; needs no model and no network")
    _add_model(parser, default="demo")
    parser.set_defaults(command=_demo)


def _add_doctor(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor", help="check the installation, and look for processes that outlived their kernel"
    )
    parser.add_argument("--sweep", action="store_true", help="only kill such processes, and confirm that they are gone")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(command=_doctor)


def _add_runs(commands: Commands) -> None:
    # Its parser needs no more than argparse; what its actions do is imported with it, which is little.
    from rlm_kernel.jupyter import runs_command

    runs_command.add_arguments(commands.add_parser("runs", help="what is kept of earlier episodes"))


def _add_export(commands: Commands) -> None:
    from rlm_kernel.jupyter import export_command

    parser = commands.add_parser("export", help="write a run to a notebook (.ipynb) or a trajectory (.jsonl)")
    export_command.add_arguments(parser)
    parser.set_defaults(command=export_command.run)


def _add_model(parser: argparse.ArgumentParser, *, default: str | None) -> None:
    shown = default or "the configured one"
    parser.add_argument("--model", default=default, metavar="SPEC", help=f"provider/model, or demo (default: {shown})")


def _run(args: argparse.Namespace) -> int:
    from rlm_kernel.jupyter import run_command

    return run_command.run(args)


def _demo(args: argparse.Namespace) -> int:
    from rlm_kernel.jupyter import run_command

    return run_command.demo(args)


def _doctor(args: argparse.Namespace) -> int:
    from rlm_kernel.jupyter import doctor

    return doctor.run(args)


if __name__ == "__main__":
    raise SystemExit(main())
