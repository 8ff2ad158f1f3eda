"""What a sub-command of ``%rlm`` is: a function with the argument parser that IPython's decorators give it.

The same parser reads the line, explains it (``--help``, ``%rlm?``), and tells the completion which options there are. A line
that cannot be read is a `UsageError` of one line that says what would be right.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import shlex
import textwrap
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument as magic_argument
from IPython.core.magic_arguments import magic_arguments

from rlm_kernel.session.handles import check_timeout

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from rlm_kernel.session.session import RLMSession

HELP_WORDS = ("-h", "--help")

_WIDTH = 100
"""Characters after which a line of the overview is wrapped."""

_parsing = threading.Lock()  # argparse changes a parser while it reads options between positionals


@dataclass(frozen=True, slots=True)
class Here:
    """Where a command runs."""

    session: RLMSession
    shell: InteractiveShell


@dataclass(frozen=True, slots=True)
class Command:
    """A sub-command.

    Attributes:
        name: what is typed after ``%rlm``.
        run: carries it out; what it returns is shown as the cell's result.
        parser: reads its line.
        tail: the argument that takes what is left of the line as it is, with its quotes and spaces.
    """

    name: str
    run: Callable[[Here, argparse.Namespace], Any]
    parser: argparse.ArgumentParser
    tail: str | None = None

    def parse(self, line: str) -> argparse.Namespace | None:
        """Read what stands behind the command. None: it asks for help.

        Raises:
            UsageError: it cannot be read.
        """
        line = line.strip()
        if line in HELP_WORDS:
            return None
        try:
            if self.tail is not None:
                return self._parse_with_tail(line)
            words = shlex.split(line)
            if any(word in HELP_WORDS for word in words):
                return None
            return self._parse_words(words)
        except ValueError as error:
            raise UsageError(
                f"%rlm {self.name}: {str(error).lower()}; close the quotes, or put a \\ before the quote"
            ) from None
        except UsageError as error:
            raise UsageError(f"%rlm {self.name}: {error}. Usage: {self.usage}") from None

    def _parse_words(self, words: list[str]) -> argparse.Namespace:
        with _parsing:
            # Only the second knows "--", only the first takes options between two ids.
            parse = self.parser.parse_known_args if "--" in words else self.parser.parse_known_intermixed_args
            args, unknown = parse(words)
        if unknown:
            options = [name for action in self.parser._actions for name in action.option_strings]
            wrong = unknown[0].partition("=")[0]
            kind = "option" if wrong.startswith("-") else "argument"
            raise UsageError(f"there is no {kind} {unknown[0]!r} here{did_you_mean(wrong, options)}")
        return args

    def _parse_with_tail(self, line: str) -> argparse.Namespace:
        words, rest = [], line
        for action in self.parser._actions:
            if action.dest == self.tail:
                break
            word, rest = _first_word(rest)
            words += word
        # The parser is shown that there is a tail, but not which: it would take "--" in it for its own.
        args = self.parser.parse_args(["--", *words, *(["tail"] if rest else [])])
        if rest and self.tail is not None:
            setattr(args, self.tail, rest)
        return args

    @property
    def usage(self) -> str:
        """How it is typed, on one line."""
        return usage_line(self.parser, "%rlm")

    def help(self) -> str:
        """Explain it."""
        # IPython writes help as reStructuredText, which starts with "::" and indents what follows.
        return self.parser.format_help().strip().removeprefix("::").strip()


def command(name: str, *arguments: magic_argument, tail: str | None = None) -> Callable[[Callable[..., Any]], Command]:
    """Make a function a sub-command. Its docstring is the help text.

    Args:
        name: of the command.
        arguments: in the order in which they are shown.
        tail: see `Command`.
    """

    def make(function: Callable[[Here, argparse.Namespace], Any]) -> Command:
        decorated: Any = function
        for each in reversed(arguments):
            decorated = each(decorated)
        decorated = magic_arguments(f"rlm {name}")(decorated)
        # An option that does away with something must be typed in full.
        decorated.parser.allow_abbrev = False
        return Command(name, decorated, decorated.parser, tail)

    return make


def _first_word(line: str) -> tuple[list[str], str]:
    """Split off the first word, which may be in quotes; the rest stays as it is."""
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    word = lexer.get_token()
    rest = "".join(iter(lambda: lexer.instream.read(1), ""))
    return ([] if word is None else [word]), rest.strip()


def seconds(text: str) -> float:
    """Read a number of seconds."""
    try:
        value = float(text)
        check_timeout(value)
    except Exception:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds (0 or more)") from None
    return value


def count(text: str) -> int:
    """Read a number of things, at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def did_you_mean(word: str, known: Iterable[str], form: str = "{}") -> str:
    """Return a remark in parentheses that names what is most like a word, empty if nothing is."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {form.format(close[0])}?)" if close else ""


def one_line(error: Exception) -> str:
    """Return an error's message without line ends."""
    return "; ".join(filter(None, (line.strip() for line in str(error).splitlines())))


def usage_line(parser: argparse.ArgumentParser, magic: str) -> str:
    """Return how a parser's magic is typed, on one line."""
    text = " ".join(parser.format_usage().split()).lstrip(": ")
    return re.sub(r"^(usage: )?%*rlm\b", magic, text)


def explain(parser: argparse.ArgumentParser, magic: str) -> str:
    """Return a paragraph about a magic or sub-command: how it is typed, what it does, its arguments."""
    usage = textwrap.fill(usage_line(parser, magic), _WIDTH, subsequent_indent="        ", break_on_hyphens=False)
    lines = [usage, textwrap.indent(inspect.cleandoc(parser.description or ""), "    ")]
    formatter = parser._get_formatter()
    for action in parser._actions:
        if not action.help or action.help == argparse.SUPPRESS or HELP_WORDS[1] in action.option_strings:
            continue
        name = formatter._format_action_invocation(action)
        lines.append(
            textwrap.fill(
                formatter._expand_help(action), _WIDTH, initial_indent=f"      {name}: ", subsequent_indent=" " * 10
            )
        )
    return "\n".join(line for line in lines if line.strip())
