"""The magic itself: it finds the command, lets it read the line, and turns a user's mistake into an error of one line."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument

from rlm_kernel.errors import UsageMistake
from rlm_kernel.jupyter.magics import configuring, looking, verbs
from rlm_kernel.jupyter.magics.commands import (
    HELP_WORDS,
    Command,
    Here,
    command,
    did_you_mean,
    explain,
    one_line,
)
from rlm_kernel.session.session import RLMSession

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


@command("help", argument("topic", nargs="?", metavar="COMMAND", help="a command; without one, all of them"))
def help_(here: Here, args: Namespace) -> None:
    """Explain a command, or all of them."""
    print(overview(cell_parser()) if args.topic is None else find_command(args.topic.lstrip("%")).help())


COMMANDS: dict[str, Command] = {
    each.name: each
    for each in (
        configuring.model,
        configuring.config,
        looking.status,
        looking.tree,
        looking.timeline,
        looking.cost,
        looking.logs,
        verbs.cancel,
        verbs.send,
        verbs.close,
        verbs.reset,
        verbs.cleanup,
        looking.export,
        help_,
    )
}
"""Every sub-command by its name, in the order in which they are explained."""


def find_command(name: str) -> Command:
    """Return the command of that name.

    Raises:
        UsageError: there is none; the message names what was meant, or all.
    """
    found = COMMANDS.get(name)
    if found is None:
        meant = did_you_mean(name, COMMANDS, "`%rlm {}`")
        there_are = f". There are: {', '.join(COMMANDS)}. A task for the model goes into a cell that begins with %%rlm"
        raise UsageError(f"%rlm has no {name!r}{meant or there_are}")
    return found


def cell_parser() -> ArgumentParser:
    """Return the parser of the arguments of ``%%rlm``."""
    from rlm_kernel.jupyter.cell_magic import parser

    return parser


def overview(of_cell: ArgumentParser | None = None) -> str:
    """Explain ``%rlm`` with all its commands, and ``%%rlm``."""
    parts = [
        "Look at the RLM session, configure it, and steer and stop its children. Each command takes --help.",
        "%rlm\n    Show a summary of the session.",
        *(explain(each.parser, "%rlm") for each in COMMANDS.values()),
    ]
    if of_cell is not None:
        parts.append(explain(of_cell, "%%rlm"))
    return "\n\n".join(parts)


@magics_class
class RLMMagics(Magics):
    """The magics of one session."""

    def __init__(self, shell: InteractiveShell, session: RLMSession) -> None:
        super().__init__(shell)
        self._here = Here(session, shell)

    @line_magic
    def rlm(self, line: str) -> Any:
        try:
            return self._run_line(line.strip())
        except UsageMistake as error:
            raise UsageError(one_line(error)) from None

    def rlm_cell(self, line: str, cell: str) -> Any:
        from rlm_kernel.jupyter.cell_magic import run_cell

        return run_cell(self._here.session, self._here.shell, line, cell)

    def _run_line(self, line: str) -> Any:
        name, *rest = line.split(maxsplit=1)[:2] or [""]
        if not name:
            return looking.summary(self._here.session)
        found = find_command("help" if name in HELP_WORDS else name)
        args = found.parse(rest[0] if rest else "")
        if args is None:
            print(found.help())
            return None
        return found.run(self._here, args)

    rlm.__doc__ = rlm_cell.__doc__ = overview()
    # What `%rlm?` shows: with the cell magic's options, whose module is not loaded before it is needed.
    rlm.__dict__["getdoc"] = rlm_cell.__dict__["getdoc"] = lambda: inspect.cleandoc(overview(cell_parser()))
    # The line is taken as it stands: an expression has braces of its own.
    no_var_expand(cell_magic("rlm")(rlm_cell))  # type: ignore[arg-type]
