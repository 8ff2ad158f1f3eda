"""Read the few kinds of tasks that the `demo` model understands. Pure: text in, values out.

Theory of operation. Quoted stretches of a task are blanked out first, so that no template can match inside them; then
the templates of `_TEMPLATES` are tried in order. A template captures what is to be found, quoted or bare. A task that
matches but asks for more than is done here (two words at once, "in chapter 3", "before …") is refused with the reason:
a wrong number is worse than none.

The parent's code hands pieces of a text to children with prompts of one fixed form, which `piece_prompt_code` writes
and `read_task` reads back; what is to be found stands in it as a Python string literal, so that any text survives.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby


class Kind(StrEnum):
    """What is asked for."""

    COUNT = "count"
    LINE_COUNT = "line-count"
    LINES = "lines"
    CODES = "codes"

    @property
    def gives_number(self) -> bool:
        return self in (Kind.COUNT, Kind.LINE_COUNT)


@dataclass(frozen=True, slots=True)
class Piece:
    """Which part of a longer text a child was given.

    Attributes:
        number, total: this is part `number` of `total`, from 1.
        first: number of the first line (of the first item, for a list) of this part in the whole, from 1.
        unit: ``"line"`` or ``"item"``.
    """

    number: int
    total: int
    first: int
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTask:
    """One task that the demo model can do.

    Attributes:
        needle: the text to find; for `Kind.CODES` an example of the shape.
        said_word: the task says "the word …", although every place where the letters stand is counted.
        question: the task up to the end of its question; a text may follow in the same prompt.
        piece: set in a child that works on a part of a longer text.
    """

    kind: Kind
    needle: str
    ignore_case: bool = False
    whole_words: bool = False
    said_word: bool = False
    question: str = ""
    piece: Piece | None = None

    def __post_init__(self) -> None:
        if not self.needle:
            raise ValueError("needle='': must be a non-empty text")

    @property
    def plain(self) -> bool:
        """Whether `str.count` counts it."""
        return self.kind is not Kind.CODES and not self.ignore_case and not self.whole_words

    @property
    def spans_lines(self) -> bool:
        return "\n" in self.needle or "\r" in self.needle

    @property
    def pattern(self) -> str:
        """The regular expression for it, without groups."""
        if self.kind is Kind.CODES:
            return shape_pattern(self.needle)
        literal = re.escape(self.needle)
        return rf"(?<!\w){literal}(?!\w)" if self.whole_words else literal

    @property
    def scope(self) -> str:
        """How it is counted, to follow the answer: ``" (ignoring case)"``, or nothing."""
        notes = ["ignoring case"] if self.ignore_case else []
        if self.whole_words:
            notes.append("whole words only")
        elif self.said_word and self.kind is Kind.COUNT:
            notes.append("inside longer words too")
        return f" ({', '.join(notes)})" if notes else ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the demo model does not do a task: a sentence with balanced parentheses."""

    reason: str


def shape_pattern(example: str) -> str:
    """Derive the regular expression for texts that look like an example.

    Letters stand for letters of the same case, digits for digits, everything else for itself. A part of a longer run
    (``ABC-12345``, ``ABC-1234-9`` for ``ABC-1234``) does not match.
    """
    parts = []
    for atom, run in groupby(example, key=_shape_atom):
        count = len(list(run))
        parts.append(atom if count == 1 else f"{atom}{{{count}}}")
    body = "".join(parts)
    joints = "".join(sorted({re.escape(char) for char in example[1:-1] if not char.isalnum() and not char.isspace()}))
    if example[0].isalnum():
        body = r"(?<!\w)" + (rf"(?<!\w[{joints}])" if joints else "") + body
    if example[-1].isalnum():
        body += r"(?!\w)" + (rf"(?![{joints}]\w)" if joints else "")
    return body


def _shape_atom(char: str) -> str:
    if char.isdecimal():
        return r"\d"
    if char.isalpha():
        if not char.isascii():
            return r"[^\W\d_]"
        return "[A-Z]" if char.isupper() else "[a-z]"
    return re.escape(char)


# --- prompts for children -------------------------------------------------------------------------------------------

_PIECE_ASKS = {
    Kind.COUNT: "Count the occurrences of",
    Kind.LINE_COUNT: "Count the lines that contain",
    Kind.LINES: "Find the lines that contain",
    Kind.CODES: "Find every code that looks like",
}
_LITERAL = r"'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\""
_PIECE = re.compile(
    rf"(?P<ask>{'|'.join(_PIECE_ASKS.values())}) (?P<literal>{_LITERAL}) in this piece of a longer text "
    r"\(part (?P<number>\d+) of (?P<total>\d+), from (?P<unit>line|item) (?P<first>\d+)\)"
    r"(?P<ignore_case>, ignoring case)?(?P<whole_words>, whole words only)?; answer with "
)


def piece_prompt_code(task: SearchTask, unit: str) -> str:
    """Write the f-string (Python code) of a child's prompt; it uses the names `needle`, `number`, `pieces`, `first`."""
    flags = (", ignoring case" if task.ignore_case else "") + (", whole words only" if task.whole_words else "")
    wanted = "the number only." if task.kind.gives_number else "JSON only: the total, and the first 50 hits."
    where = f"in this piece of a longer text (part {{number}} of {{len(pieces)}}, from {unit} {{first}})"
    return f'f"{_PIECE_ASKS[task.kind]} {{needle!r}} {where}{flags}; answer with {wanted}"'


def _read_piece(text: str) -> SearchTask | None:
    match = _PIECE.match(text)
    if match is None:
        return None
    try:
        needle = ast.literal_eval(match["literal"])
    except (ValueError, SyntaxError):  # somebody else's literal, with an escape that Python does not know
        return None
    if not needle:
        return None
    kind = next(kind for kind, ask in _PIECE_ASKS.items() if ask == match["ask"])
    return SearchTask(
        kind=kind,
        needle=needle,
        ignore_case=match["ignore_case"] is not None,
        whole_words=match["whole_words"] is not None,
        piece=Piece(int(match["number"]), int(match["total"]), int(match["first"]), match["unit"]),
    )


# --- tasks in a person's words --------------------------------------------------------------------------------------

_READ_CHARS = 6000  # a question stands at the beginning of its prompt; a text may follow
_QUOTES = {"'": "'", '"': '"', "`": "`", "“": "”", "‘": "’", "«": "»", "„": "“"}
_EDGE, _FILL = "\x01", "\x02"  # what blanked-out quotations consist of


def _blank_quotations(text: str) -> str:
    """Replace every quotation by a filler of the same length. An apostrophe inside a word opens and closes nothing."""
    out = list(text.replace(_EDGE, " ").replace(_FILL, " "))
    at = 0
    while at < len(text):
        close = _QUOTES.get(text[at])
        if close and (at == 0 or not _is_word(text[at - 1])):
            end = text.find(close, at + 1)
            while end != -1 and end + 1 < len(text) and _is_word(text[end + 1]):
                end = text.find(close, end + 1)
            if end != -1:
                out[at : end + 1] = [_EDGE, *[_FILL] * (end - at - 1), _EDGE]
                at = end
        at += 1
    return "".join(out)


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


_NOUN = (
    r"(?:(?:the|a|an|any)\s+)?(?:(?:exact|literal|whole|full|single)\s+)?"
    r"(?:(?P<noun>words?|names?|terms?|phrases?|strings?|substrings?|texts?|characters?|letters?|expressions?"
    r"|sequences?|numbers?|sentences?)\s+)?"
)
_QUOTED = rf"(?P<quoted>{_EDGE}{_FILL}*{_EDGE})"
_BARE = rf"(?P<bare>[^\s{_EDGE}{_FILL}?!,;:()][^{_EDGE}{_FILL}?!;:()\n]{{0,79}}?)"
_BARE_TOKEN = rf"(?P<bare>[^\s{_EDGE}{_FILL}?!,;:()]+?)"
_END = (
    r"(?=\s*(?:[?!,;:()\n]|\.?\s*$)|\.\s|\s+(?:in|within|inside|throughout|across|from|are|is|there|ignoring|ignore"
    r"|regardless|case|as|please|anywhere|only|altogether|at)\b)"
)
_AUX = r"(?:does|do|did|is|are|was|were|has|have|can)"
_VERB = (
    r"(?:(?:is|are|was|were|be|been|gets?)\s+)*(?:occurs?|occurred|appears?|appeared|exists?|present"
    r"|(?:come|show|turn|pop)s?\s+up|mentioned|found|used|named|written|said|repeated|seen|contained|listed)\b"
)
_X_VERB = rf"{_NOUN}(?:{_QUOTED}|{_BARE})\s+{_VERB}"
_X_END = rf"{_NOUN}(?:{_QUOTED}|{_BARE}{_END})"
_LINES = r"lines?(?:\s+(?:of|in)\s+(?:the\s+|this\s+|that\s+)?\w+)?(?:\s+(?:that|which|do|are\s+there|there\s+are))*"
_HAVE = r"(?:contain(?:s|ing)?|mention(?:s|ing)?|includ(?:e|es|ing)|have|has|having|with)"
_FIND = r"\b(?:find|show|list|print|get|extract|give|collect|locate|look\s+for|search\s+for)\s+"
_ALL = r"(?:(?:me|us|all|every|each|of|the|any|up)\s+)*"
_HOW_MANY = r"(?:how\s+many|count|number\s+of)"
_OCCURRENCES = r"(?:occurrences?|mentions?|appearances?|instances?|uses)\s+of\s+"
_HOW_OFTEN = r"(?:how\s+(?:often|many\s+times|frequently)|(?:the\s+)?number\s+of\s+times(?:\s+that)?)\s+"
_LIKE = (
    r"(?:look(?:s|ing)?|formatted|shaped|written|something|anything|codes?|is|are)\s+like"
    r"|(?:of|in|with|has|have|having)\s+the\s+(?:form|format|shape|pattern)"
)
_LOOK_FOR = r"\b(?:find|show|list|get|extract|give|locate|look|search|tell|what|what's|which|where|how\s+many|count)\b"

_TEMPLATES: tuple[tuple[Kind, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(template, re.IGNORECASE))
    for kind, template in (
        (Kind.CODES, rf"{_LOOK_FOR}[^\n]{{0,200}}?\b(?:{_LIKE})(?:\s+of)?:?\s+(?:{_QUOTED}|(?P<bare>[^\s{_EDGE}]+))"),
        (Kind.LINE_COUNT, rf"\b{_HOW_MANY}\s+{_ALL}(?:number\s+of\s+)?{_LINES}\s+{_HAVE}\s+{_X_END}"),
        (Kind.LINE_COUNT, rf"\b(?:in|on)\s+how\s+many\s+{_LINES}\s+{_AUX}\s+{_X_VERB}"),
        (Kind.LINES, rf"\b(?:which|what)\s+{_LINES}\s+{_HAVE}\s+{_X_END}"),
        (Kind.LINES, rf"\b(?:in|on)\s+(?:which|what)\s+{_LINES}\s+{_AUX}\s+{_X_VERB}"),
        (Kind.LINES, rf"{_FIND}{_ALL}{_LINES}\s+{_HAVE}\s+{_X_END}"),
        (Kind.LINES, rf"\bwhere\s+{_AUX}\s+{_X_VERB}"),
        (Kind.COUNT, rf"\b{_HOW_OFTEN}(?:{_AUX}\s+)?{_X_VERB}"),
        (Kind.COUNT, rf"\b{_HOW_OFTEN}(?:is|are|was|were)\s+{_NOUN}{_QUOTED}"),
        (Kind.LINES, rf"{_FIND}{_ALL}{_OCCURRENCES}{_X_END}"),
        (Kind.COUNT, rf"\b{_OCCURRENCES}{_X_END}"),
        (Kind.COUNT, rf"\bhow\s+many\s+{_NOUN}{_QUOTED}"),
        (Kind.COUNT, rf"\bcount\s+{_ALL}{_NOUN}(?:{_QUOTED}|{_BARE_TOKEN}{_END})"),
        (Kind.LINES, rf"{_FIND}{_ALL}{_NOUN}{_QUOTED}"),
    )
)

# fmt: off
_NOT_A_TEXT = frozenset((
    "words", "lines", "characters", "letters", "sentences", "paragraphs", "chapters", "pages", "items", "tokens",
    "vowels", "digits", "numbers", "occurrences", "everything", "all", "it", "them", "they", "he", "she", "this",
    "that", "these", "those", "something", "anything", "things", "number", "word", "line", "how",
))
# fmt: on
_IGNORE_CASE = re.compile(
    r"(?<!not )(?<!n't )(?<!without )\bignor(?:e|ing)\s+(?:the\s+|letter\s+|upper\s+and\s+lower\s+)*case\b"
    r"|\bcase[-\s]?insensitiv|\b(?:regardless|irrespective)\s+of\s+(?:the\s+|letter\s+|upper\s+(?:and|or)\s+lower\s+)*case\b"
    r"|\bnot\s+case[-\s]sensitive|\b(?:in\s+any|whatever\s+the)\s+case\b",
    re.IGNORECASE,
)
_WHOLE_WORDS = re.compile(
    r"\b(?:whole|complete|entire|separate|full)[-\s]words?\b|\bword\s+boundaries\b", re.IGNORECASE
)
_PART_ONLY = re.compile(
    r"\b(?:in|within|of|from|on)\s+(?:the\s+)?(?:first|last|second|third|final|chapters?|sections?|paragraphs?|parts?"
    r"|pages?|lines?\s+\d)\b",
    re.IGNORECASE,
)
_CONDITION = re.compile(
    r"\b(?:per|each|every|before|after|between|until|since|except|excluding|followed|preceded|without|unless|but|not)\b",
    re.IGNORECASE,
)
_SECOND_TEXT = re.compile(rf"\s*(?:,|and|or|nor|&|/|\+)[\s,]*(?:and\s+|or\s+)?{_NOUN}{_EDGE}", re.IGNORECASE)
_QUESTION_END = re.compile(r"[?:\n]|[.!](?=\s|$)")
_FURTHER_SENTENCE = re.compile(r"[^\S\n]*(?P<sentence>[^.!?\n]{1,120}[.!?](?=\s|$))")


def read_task(text: str) -> SearchTask | Refusal:
    """Read a task.

    Args:
        text: the task in a person's words, or a prompt that `piece_prompt_code` wrote; a text may follow the question.

    Returns:
        What to do, or why the demo model does not do it.
    """
    text = text.strip()
    piece_task = _read_piece(text)
    if piece_task is not None:
        return piece_task
    text = text[:_READ_CHARS]
    blanked = _blank_quotations(text)
    for kind, template in _TEMPLATES:
        for match in template.finditer(blanked):
            needle, end = _needle(kind, match, text)
            if needle is not None:
                return _checked(kind, needle, match, end, text, blanked)
    return Refusal("I did not recognize a question of a kind that I know")


def _needle(kind: Kind, match: re.Match[str], text: str) -> tuple[str | None, int]:
    """Take what is to be found out of a match, and where it ends; None if it cannot be meant."""
    groups = match.groupdict()
    if groups.get("quoted") is not None:
        start, end = match.span("quoted")
        needle = text[start + 1 : end - 1]
        if kind is Kind.CODES and (sum(map(str.isalnum, needle)) < 2 or len(needle.splitlines()) != 1):
            return None, end
        return needle, end
    bare = match["bare"].strip()
    if kind is Kind.CODES:
        bare = bare.rstrip(".,;:?!)").lstrip("(")
        return (bare if any(map(str.isdecimal, bare)) else None), match.start("bare") + len(bare)
    words = bare.lower().split()
    if bare.lower() in _NOT_A_TEXT or words[0] in ("not", "never") or words[-1] in ("not", "never"):
        return None, match.end("bare")
    return bare.rstrip(".") or bare, match.end("bare")


def _checked(kind: Kind, needle: str, match: re.Match[str], end: int, text: str, blanked: str) -> SearchTask | Refusal:
    question_end = _question_end(blanked, max(end, match.end()))
    head, tail = blanked[: match.start()], blanked[end:question_end]
    if not needle:
        return Refusal("the text to find is empty")
    quoted = match.groupdict().get("quoted") is not None
    if _SECOND_TEXT.match(blanked, end) or (not quoted and re.search(r",|\s(?:and|or)\s", needle)):
        return Refusal("I can look for one text at a time; a phrase must be in quotes")
    if _PART_ONLY.search(head[-200:]) or _PART_ONLY.search(tail):
        return Refusal("I can search the whole context only, not a part of it")
    flags = head[-300:] + match.group() + blanked[end : end + 300]
    ignore_case, whole_words = _IGNORE_CASE.search(flags), _WHOLE_WORDS.search(flags)
    without_flags = _WHOLE_WORDS.sub("", _IGNORE_CASE.sub("", tail))
    if _CONDITION.search(_question_tail(without_flags)):
        return Refusal("I can count and find, but not under a further condition")
    return SearchTask(
        kind=kind,
        needle=needle,
        ignore_case=ignore_case is not None,
        whole_words=whole_words is not None and kind is not Kind.CODES,
        said_word=(match.groupdict().get("noun") or "").lower().startswith("word"),
        question=text[:question_end],
    )


def _question_end(blanked: str, at: int) -> int:
    """Where the question ends: a text may follow it in the same prompt, and sentences on how to count belong to it."""
    end = _QUESTION_END.search(blanked, at)
    if end is None:
        return len(blanked)
    at = end.end()
    while (further := _FURTHER_SENTENCE.match(blanked, at)) and (
        _IGNORE_CASE.search(further["sentence"]) or _WHOLE_WORDS.search(further["sentence"])
    ):
        at = further.end()
    return at


def _question_tail(tail: str) -> str:
    """The rest of the question's own sentence."""
    end = _QUESTION_END.search(tail)
    return tail[: end.start()] if end else tail
