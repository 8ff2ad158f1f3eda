"""Read the code blocks out of a model's reply. Pure; linear in the length of the reply, whatever the reply.

Blocks are read as Markdown reads them, with three additions for code that a model writes:

- a fence inside a string literal of the code does not end the block, if a later fence gives code that parses;
- a line like ```` ```repl ```` where no string is open cannot be Python: it starts the next block, and the one before
  was left unclosed;
- a fence may be indented by any amount; the code then loses that indentation.

Only blocks tagged as Python run. What does not run is explained to the model (`explain_unrun`), never passed over.
"""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass, field

from rlm_kernel.final_text import Fence, match_fence

RUNNABLE_LANGUAGES = frozenset({"repl", "python", "py", "python3"})
"""Tags of the blocks that run, lower-case."""

_COMPILE_BUDGET = 400_000
"""Characters that are test-compiled for one reply: a second or two in the worst case. No model writes longer code."""

_TAG = re.compile(r"[{.]*([^\s{},;:=]*)")
_ONE_LINE = re.compile(r"^[ \t]*```[ \t]*(?:repl|python3?|py)\b[^`\n]+```[ \t]*\r?$", re.MULTILINE | re.IGNORECASE)
_THINK = re.compile(r"\s*+<(think|thinking|reasoning)>", re.IGNORECASE)
# Not Python, but legal in a cell: magics, shell lines, help. Replaced before code is test-compiled.
_MAGIC_LINE = re.compile(r"^([ \t]*+)(?:[%!?][^\n]*|[\w., \t]++=[ \t]*+[!%][^\n]*|[\w.]++\?\??[ \t]*+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """One fenced block of a reply.

    Attributes:
        language: its tag, lower-case; empty if it has none.
        code: its text without the fences and without a final line end.
        closed: whether a fence closed it.
        line: 1-based number of the line that opened it.
        end: number of the last line that belongs to it, its closing fence included.
    """

    language: str
    code: str
    closed: bool
    line: int
    end: int = field(default=0, compare=False)

    @property
    def runnable(self) -> bool:
        """Whether the tag says that it is to be run and there is something to run."""
        return self.language in RUNNABLE_LANGUAGES and bool(self.code.strip())


def extract_code_blocks(text: str, language: str = "python") -> list[str]:
    """Return the code of the non-empty blocks of one language, in the order in which they stand in the text.

    Args:
        text: a model's reply.
        language: a tag. All tags that run (``repl``, ``python`` …) are one language.

    Returns:
        The code of each block, exactly as it stands between the fences.
    """
    wanted = language.lower()
    tags = RUNNABLE_LANGUAGES if wanted in RUNNABLE_LANGUAGES else {wanted}
    return [block.code for block in parse_blocks(text) if block.language in tags and block.code.strip()]


def runnable_blocks(text: str) -> list[CodeBlock]:
    """Return the blocks that run, in order. Empty ones are left out."""
    return [block for block in parse_blocks(text) if block.runnable]


def parse_blocks(text: str) -> list[CodeBlock]:
    """Read every fenced block of a text, whatever its tag.

    Args:
        text: a model's reply; never raises, whatever it holds.

    Returns:
        The blocks in order.
    """
    reader = _Reader(text)
    blocks = []
    position = 0
    while position < len(reader.lines):
        opener = match_fence(reader.lines[position])
        if opener is None:
            position += 1
            continue
        language = _language(opener)
        find_end = reader.end_of_code if language in RUNNABLE_LANGUAGES else reader.end_of_text
        end = find_end(position + 1, opener)
        blocks.append(
            CodeBlock(language, reader.body(position, end.line, opener), end.closed, position + 1, end.resume)
        )
        position = end.resume
    return blocks


def explain_unrun(text: str) -> str | None:
    """Explain to the model why something that looks like code in its reply did not run.

    Args:
        text: the reply.

    Returns:
        One or two sentences, or None if there is nothing to explain.
    """
    blocks = parse_blocks(text)
    swallowed = [block for block in blocks if block.language not in RUNNABLE_LANGUAGES and _holds_runnable_fence(block)]
    if swallowed:
        return (
            f"A ```repl line stands inside the block that line {swallowed[0].line} of your reply opened, so it is part "
            "of that block's text and did not run. Close each block with ``` on a line of its own."
        )
    if any(block.runnable for block in blocks):
        return None
    if any(block.language in RUNNABLE_LANGUAGES for block in blocks):
        return "Your code block is empty, so nothing ran."
    if blocks:
        tags = list(dict.fromkeys(block.language for block in blocks))
        named = [f"tagged `{tag}`" if tag else "not tagged" for tag in tags]
        subject = "Your block is" if len(blocks) == 1 else "Your blocks are"
        return f"{subject} {' and '.join(named)}; only blocks tagged ```repl run."
    if _ONE_LINE.search(text):
        return "Your code stands on the same line as its fence; put ```repl, the code and ``` on lines of their own."
    return None


def strip_reasoning(text: str) -> str:
    """Remove a leading ``<think>…</think>`` part: what a model drafts there is neither code to run nor an answer.

    Args:
        text: the raw reply.

    Returns:
        The rest; empty if the reasoning never ends.
    """
    opening = _THINK.match(text)
    if opening is None:
        return text
    _, closing, rest = text.partition(f"</{opening.group(1)}>")
    return rest.lstrip("\r\n") if closing else ""


def _language(fence: Fence) -> str:
    match = _TAG.match(fence.info)
    return match.group(1).lower() if match else ""


def _holds_runnable_fence(block: CodeBlock) -> bool:
    fences = (match_fence(line) for line in block.code.split("\n"))
    return any(fence is not None and _language(fence) in RUNNABLE_LANGUAGES for fence in fences)


@dataclass(frozen=True, slots=True)
class _End:
    """Where a block ends: its first line that is not code, the line to read on from, whether a fence closed it."""

    line: int
    resume: int
    closed: bool


class _Reader:
    """The lines of one reply, and the budget for looking ahead in them (which keeps the whole linear)."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self._lookahead = 4 * len(text) + 1000
        self._compile = _COMPILE_BUDGET

    def end_of_text(self, start: int, opener: Fence) -> _End:
        """Find the end of a block that is not code: the first fence that closes it."""
        for number in range(start, len(self.lines)):
            fence = match_fence(self.lines[number])
            if fence is not None and fence.closes(opener):
                return _End(number, number + 1, closed=True)
        return self._unclosed()

    def end_of_code(self, start: int, opener: Fence) -> _End:
        """Find the end of a block of Python: the first fence that closes it and lies in no string of the code."""
        strings = _StringScanner()
        doubtful: _End | None = None
        for number in range(start, len(self.lines)):
            line = self.lines[number]
            fence = match_fence(line)
            if fence is not None and fence.closes(opener):
                end = _End(number, number + 1, closed=True)
                if strings.inside:
                    if doubtful is None:
                        doubtful = end
                        if self._compiles(start, end, opener):
                            return end  # the scanner was wrong about the string
                elif doubtful is None or self._compiles(start, end, opener):
                    return end
            elif doubtful is None and not strings.inside and fence is not None and _starts_next(fence, opener):
                return _End(number, number, closed=False)
            if doubtful is not None:
                self._lookahead -= len(line) + 1
                if self._lookahead < 0:
                    return doubtful
            strings.feed(line)
        end = self._unclosed()
        if doubtful is not None and (strings.inside or not self._compiles(start, end, opener)):
            return doubtful
        return end

    def body(self, opened_at: int, end: int, opener: Fence) -> str:
        """Return the lines between the fences, without the fence's indentation and, in a CRLF text, without the CRs."""
        lines = self.lines[opened_at + 1 : end]
        if self.lines[opened_at].endswith("\r"):
            lines = [line.removesuffix("\r") for line in lines]
        width = len(opener.indent)
        first = next((line for line in lines if line.strip()), "")
        # Code that is not indented like its fence keeps its shape: taking spaces away would change its nesting.
        if width and first.startswith(opener.indent):
            lines = [line[min(width, len(line) - len(line.lstrip(" \t"))) :] for line in lines]
        return "\n".join(lines)

    def _unclosed(self) -> _End:
        count = len(self.lines)
        last = count - 1 if self.lines[-1] == "" else count  # the text's final line end is not an empty line of code
        return _End(last, count, closed=False)

    def _compiles(self, start: int, end: _End, opener: Fence) -> bool:
        if self._compile < 0:
            return False
        code = self.body(start - 1, end.line, opener)
        self._compile -= len(code)
        return self._compile >= 0 and _is_python(code)


def _starts_next(fence: Fence, opener: Fence) -> bool:
    return fence.char == opener.char and fence.length >= opener.length and _language(fence) in RUNNABLE_LANGUAGES


def _is_python(code: str) -> bool:
    code = _MAGIC_LINE.sub(r"\1pass", code)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(code, "<block>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
            return False
    return True


class _StringScanner:
    """Follow, line by line, whether Python code is inside a string literal that goes on over the line end."""

    _OPEN = re.compile(r"#|'''|\"\"\"|'|\"")
    _CLOSE = {quote: re.compile(rf"(?:[^\\{quote}]|\\.)*+{quote}") for quote in "'\""} | {
        quote * 3: re.compile(rf"(?:[^\\{quote}]|\\.|{quote}(?!{quote}{quote}))*+{quote * 3}") for quote in "'\""
    }

    def __init__(self) -> None:
        self._quote = ""

    @property
    def inside(self) -> bool:
        return bool(self._quote)

    def feed(self, line: str) -> None:
        line = line.removesuffix("\r")
        position = 0
        while True:
            if not self._quote:
                opening = self._OPEN.search(line, position)
                if opening is None or opening.group() == "#":
                    return
                self._quote, position = opening.group(), opening.end()
            closing = self._CLOSE[self._quote].match(line, position)
            if closing is None:
                if len(self._quote) == 1 and not _continued(line):
                    self._quote = ""  # an unterminated one-line string is an error of that line alone
                return
            self._quote, position = "", closing.end()


def _continued(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1
