"""The line of ``%%rlm``: read it, and check all that can be checked before anything runs. Every mistake is one line."""

from __future__ import annotations

import copy
import keyword
import unicodedata
from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser

from rlm_kernel.jupyter.views.base import shorten
from rlm_kernel.session.helpers import HIDDEN_NAMES

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from rlm_kernel.session.session import RLMSession

_OPENING, _CLOSING = "([{", ")]}"


class CellParser(MagicArgumentParser):
    """Reads the line after ``%%rlm``. Words end at spaces, but for those in quotes and brackets."""

    def parse_argstring(self, argstring: str, *, partial: bool = False) -> Any:
        words = _split(argstring, strict=not partial)
        return self.parse_known_args(words) if partial else self.parse_args(words)

    def error(self, message: str) -> Any:
        if message.startswith("unrecognized arguments"):
            message += ". The task goes into the lines below; an expression with spaces goes into quotes"
        raise UsageError(f"%%rlm: {message} (`%rlm?` explains all)")


def _split(line: str, *, strict: bool = True) -> list[str]:
    words: list[str] = []
    word = quote = ""
    open_brackets: list[str] = []
    escaped = False
    for char in line:
        if char.isspace() and not quote and not open_brackets:
            words += [word] if word else []
            word = ""
            continue
        word += char
        if quote:
            if char == quote and not escaped:
                quote = ""
            escaped = char == "\\" and not escaped
        elif char in "'\"":
            quote, escaped = char, False
        elif char in _OPENING:
            open_brackets.append(_CLOSING[_OPENING.index(char)])
        elif open_brackets and char == open_brackets[-1]:
            open_brackets.pop()
    if strict and (quote or open_brackets):
        raise UsageError(f"%%rlm: {quote or open_brackets[-1]} is missing in: {shorten(line, 200)}")
    return [*words, word] if word else words


def _unquoted(word: str) -> str:
    """Take the quotes off that hold a whole word together."""
    if len(word) >= 2 and word[0] in "'\"" and word.find(word[0], 1) == len(word) - 1:
        return word[1:-1]
    return word


def _count(word: str) -> int:
    return int(_unquoted(word))


_count.__name__ = "whole number"  # how argparse names it in its message


def _make_parser() -> CellParser:
    made: CellParser = CellParser(  # type: ignore[no-untyped-call]
        prog="%rlm", description="Run the loop on the task that the lines below this one give."
    )
    made.allow_abbrev = False
    add = made.add_argument
    add(
        "--context",
        metavar="EXPR",
        type=_unquoted,
        help="what the model's code finds in `context`: an expression of this notebook; quote it if it has spaces "
        "(default: the variable `context`)",
    )
    add("--model", metavar="M", type=_unquoted, help="another model of the configured client, for the run's own calls")
    add("--max-iterations", metavar="N", type=_count, help="turns that the run may take (default: the setting)")
    add(
        "--background",
        action="store_true",
        help="run it as a child: the cell ends at once, and the value is its handle. It sees `context`, not the notebook's "
        "variables",
    )
    add("--into", metavar="NAME", type=_unquoted, help="bind the answer (or the handle) to this name; it is in `_` too")
    add("-h", "--help", action="store_true", help="show this")
    return made


parser = _make_parser()
"""Reads the line of ``%%rlm``. Its errors are `UsageError`."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a cell asks for, checked."""

    task: str
    context: Any
    model: str | None
    max_iterations: int | None
    background: bool
    into: str | None


def read_request(session: RLMSession, shell: InteractiveShell, args: Namespace, body: str) -> Request:
    """Check everything that can be checked before anything runs.

    Raises:
        UsageError, UsageMistake: what is wrong, in one line.
    """
    if not body.strip():
        raise UsageError("%%rlm: there is no task; write it into the lines below")
    if args.background and args.max_iterations is not None:
        raise UsageError(
            "%%rlm: --max-iterations does not apply to --background: a child's turns are a setting "
            f"(%rlm config max_iterations={args.max_iterations})"
        )
    if args.max_iterations is not None:
        copy.copy(session.settings).set("max_iterations", args.max_iterations)  # raises if it is too few, or too many
    if args.model is not None and not args.model.strip():
        raise UsageError("%%rlm: --model is empty; give the name of a model, or leave it out")
    into = None if args.into is None else _checked_name(args.into, shell)
    return Request(
        task=body.strip("\n"),
        context=_context(args.context, shell),
        model=args.model,
        max_iterations=args.max_iterations,
        background=args.background,
        into=into,
    )


def _checked_name(name: str, shell: InteractiveShell) -> str:
    name = unicodedata.normalize("NFKC", name)  # as Python reads it
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"%%rlm: --into {shorten(name, 60)}: is no name of a variable")
    if name in HIDDEN_NAMES or name in shell.user_ns_hidden or set(name) == {"_"}:
        raise UsageError(f"%%rlm: --into {name}: that name has a meaning of its own here; choose another one")
    return name


def _context(expression: str | None, shell: InteractiveShell) -> Any:
    if expression is None:
        return shell.user_ns.get("context", "")
    if not expression.strip():
        raise UsageError("%%rlm: --context is empty; give an expression, such as the name of a variable")
    try:
        return eval(compile(expression.strip(), "<--context>", "eval"), shell.user_global_ns, shell.user_ns)
    except Exception as error:
        hint = ""
        if isinstance(error, NameError) and expression.isidentifier():
            hint = f". For a text write --context \"'{expression}'\""
        text = error.msg if isinstance(error, SyntaxError) else error
        raise UsageError(
            f"%%rlm: --context {shorten(expression, 200)}: {type(error).__name__}: {shorten(str(text), 300)}{hint}"
        ) from None
