"""Find a final answer that a model wrote as text: ``FINAL(...)`` or ``FINAL_VAR(name)`` at the start of a line.

Pure, and shared by the loop (replies) and the environment (output of model-driven cells). The rules:

- Only a call that *starts* a line counts; up to three leading spaces are allowed, as Markdown allows before its own
  markers. Four spaces or a tab are an indented quotation, and ``FINAL(`` further inside a line is prose.
- The argument ends at the balancing parenthesis, which may stand on a later line. Text after it is ignored.
- Parentheses inside quoted strings do not count, where the quotes are plainly a string: opened after a non-word
  character, closed on the same line before a non-word character (so the apostrophe of "don't" is none), or a
  triple-quoted argument as a whole. If that reading does not balance, quotes are taken as ordinary characters.
- If the parentheses do not balance at all (``FINAL(sad :( indeed)``), a parenthesis that ends the call's own line ends
  the argument. Without one there is no call: a truncated ``FINAL(`` must not end a run.
- The argument of ``FINAL`` is text: it is stripped of surrounding whitespace and otherwise left as it stands, quotes
  included. The argument of ``FINAL_VAR`` is a name: it also loses one pair of quotes or backticks.

Every function takes time linear in the length of the text, whatever the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

FinalKind = Literal["FINAL", "FINAL_VAR"]

_AT_LINE_START = re.compile(r"^ {0,3}(FINAL_VAR|FINAL)\(", re.MULTILINE)
_ANYWHERE = re.compile(r"(?<![\w.])(FINAL_VAR|FINAL)\(")
_CALL_LENGTH = len("   FINAL_VAR(")
_PAREN = re.compile(r"[()]")
_PAREN_OR_QUOTE = re.compile(r"[()'\"]")
_TRIPLE_OPEN = re.compile(r"\(\s*+(\"\"\"|''')")
_CLOSE = re.compile(r"\s*+\)")
_FENCE = re.compile(r"([ \t]*+)(`{3,}+|~{3,}+)([^\n]*+)")
# A string on one line; a quote before a word character is an apostrophe or an inch mark inside it, not its end.
_STRING = {
    "'": re.compile(r"'(?:[^'\\\n]|\\[^\n]|'(?=\w))*+'(?!\w)"),
    '"': re.compile(r"\"(?:[^\"\\\n]|\\[^\n]|\"(?=\w))*+\"(?!\w)"),
}


@dataclass(frozen=True, slots=True)
class FinalCall:
    """A final answer as it was written.

    Attributes:
        kind: which of the two calls.
        argument: the answer's text for ``FINAL``, the variable's name for ``FINAL_VAR``.
    """

    kind: FinalKind
    argument: str


@dataclass(frozen=True, slots=True)
class Fence:
    """A line that opens or closes a fenced block.

    Attributes:
        indent: the whitespace before it.
        char: a backtick or a tilde.
        length: how many of them.
        info: what follows, stripped.
    """

    indent: str
    char: str
    length: int
    info: str

    def closes(self, opener: Fence) -> bool:
        """Tell whether this line closes the block that ``opener`` opened (as Markdown has it)."""
        return (
            not self.info
            and self.char == opener.char
            and self.length >= opener.length
            and len(self.indent) <= len(opener.indent) + 3
        )


def match_fence(line: str) -> Fence | None:
    """Read one line as a fence.

    Args:
        line: the line, with or without its line end.

    Returns:
        The fence, or None if the line is none. A backtick fence cannot have backticks in its info: that is inline code.
    """
    match = _FENCE.match(line)
    if match is None:
        return None
    indent, run, info = match.groups()
    if run[0] == "`" and "`" in info:
        return None
    return Fence(indent, run[0], len(run), info.strip())


def find_final(text: str) -> FinalCall | None:
    """Find the first final call at the start of a line.

    Args:
        text: for example the output of a cell.

    Returns:
        The call, or None.
    """
    return _first_call(text, _AT_LINE_START.finditer(text))


class FinalOutput:
    """Output as it comes in pieces, of which only what can hold a final call is kept: however much comes, little memory is used.

    Args:
        limit: characters that are kept from the first line on that starts like a final call.
    """

    def __init__(self, limit: int = 1_000_000) -> None:
        self._limit = limit
        self._kept: list[str] = []
        self._kept_length = 0
        self._line = ""  # how the current line starts, as far as that decides whether it starts like a call

    def add(self, piece: str) -> None:
        """Take in the next piece. Pieces may be cut anywhere."""
        if not self._kept:
            text = self._line + piece
            call = _AT_LINE_START.search(text)
            if call is None:
                self._line = text[text.rfind("\n") + 1 :][:_CALL_LENGTH]
                return
            piece = text[call.start() :]
        piece = piece[: self._limit - self._kept_length]
        if piece:
            self._kept.append(piece)
            self._kept_length += len(piece)

    @property
    def text(self) -> str:
        """What `find_final` is to look at: for all of the output it finds the same."""
        return "".join(self._kept)


def find_final_in_reply(text: str, *, anywhere: bool = False) -> FinalCall | None:
    """Find the first final call in a model's reply, outside fenced blocks and lines quoted with ``>``.

    A call that starts outside may have a fenced block or a quotation inside its argument.

    Args:
        text: the reply.
        anywhere: accept a call in the middle of a line too. Only for a reply that nothing can follow, where the choice
            is between the call's argument and the whole reply.

    Returns:
        The call, or None.
    """
    candidates = list((_ANYWHERE if anywhere else _AT_LINE_START).finditer(text))
    if not candidates:
        return None
    return _first_call(text, _outside(candidates, _shielded_spans(text)))


def _outside(candidates: list[re.Match[str]], spans: Iterator[tuple[int, int]]) -> Iterator[re.Match[str]]:
    start, end = next(spans, (-1, -1))
    for candidate in candidates:
        while start != -1 and end <= candidate.start():
            start, end = next(spans, (-1, -1))
        if start == -1 or candidate.start() < start:
            yield candidate


def _shielded_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) offsets of fenced blocks and quoted lines, in order; an unclosed fence runs to the end."""
    opener: Fence | None = None
    opened_at = offset = 0
    for line in text.split("\n"):
        fence = match_fence(line)
        following = offset + len(line) + 1
        if opener is not None:
            if fence is not None and fence.closes(opener):
                yield opened_at, following
                opener = None
        elif fence is not None:
            opener, opened_at = fence, offset
        elif line.lstrip(" ").startswith(">"):
            yield offset, following
        offset = following
    if opener is not None:
        yield opened_at, offset


def _first_call(text: str, candidates: Iterable[re.Match[str]]) -> FinalCall | None:
    calls = list(candidates)
    if not calls:
        return None
    opens = [call.end() - 1 for call in calls]
    aware = _closing_parens(text, opens, skip_strings=True)
    plain: dict[int, int] | None = None
    for call, open_at in zip(calls, opens, strict=True):
        close = _close_of_triple_quoted(text, open_at) or aware.get(open_at)
        if close is None:
            if plain is None:
                plain = _closing_parens(text, opens, skip_strings=False)
            close = plain.get(open_at) or _close_at_line_end(text, open_at)
        if close is not None:
            return _make(call.group(1), text[open_at + 1 : close])
    return None


def _make(kind: str, argument: str) -> FinalCall:
    argument = argument.strip()
    if kind == "FINAL":
        return FinalCall("FINAL", argument)
    if len(argument) >= 2 and argument[0] == argument[-1] and argument[0] in "\"'`":
        argument = argument[1:-1].strip()
    return FinalCall("FINAL_VAR", argument)


def _closing_parens(text: str, opens: list[int], *, skip_strings: bool) -> dict[int, int]:
    """Find the balancing parenthesis of each position in ``opens`` (ascending) in one pass.

    One pass serves all: which ``)`` closes a ``(`` depends only on what lies between them, and the reading of quotes
    starts afresh on each line. It ends early when the first position has its match, since that one is asked for first.
    """
    wanted = set(opens)
    found: dict[int, int] = {}
    stack: list[int] = []
    unclosable = {"'": 0, '"': 0}  # until this offset, a string opened by that quote is known to have no end
    token = _PAREN_OR_QUOTE if skip_strings else _PAREN
    position = opens[0]
    while (match := token.search(text, position)) is not None:
        at, char = match.start(), match.group()
        position = at + 1
        if char == "(":
            stack.append(at)
        elif char == ")":
            if stack and (open_at := stack.pop()) in wanted:
                found[open_at] = at
                if open_at == opens[0]:
                    break
        elif at >= unclosable[char] and not _is_word(text[at - 1]):
            string = _STRING[char].match(text, at)
            if string is not None:
                position = string.end()
            else:
                line_end = text.find("\n", at)
                unclosable[char] = len(text) if line_end == -1 else line_end
    return found


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _close_of_triple_quoted(text: str, open_at: int) -> int | None:
    opening = _TRIPLE_OPEN.match(text, open_at)
    if opening is None:
        return None
    end = text.find(opening.group(1), opening.end())
    closing = _CLOSE.match(text, end + 3) if end != -1 else None
    return None if closing is None else closing.end() - 1


def _close_at_line_end(text: str, open_at: int) -> int | None:
    line_end = text.find("\n", open_at)
    line = text[open_at : len(text) if line_end == -1 else line_end].rstrip()
    return open_at + len(line) - 1 if line.endswith(")") else None
