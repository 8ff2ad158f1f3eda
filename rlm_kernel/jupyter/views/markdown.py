"""Markdown of a model's words, for front ends that render it: what Markdown can do to text stays, what it can do to a page does not.

Pure; linear in the length of the text. Front ends read Markdown differently (Jupyter's, nbconvert's, an editor's), so nothing here relies
on how one of them would take something: outside of fences of our own every character that begins HTML, mathematics, a picture or a
link is written so that no reader takes it for that. Fences are written anew, longer than any run of backticks in them, at the start
of a line; what stands in them is shown as it is. Links to ``http`` and ``https`` stay; pictures do not, since showing one is already a
request to whoever wrote its address.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlm_kernel.final_text import Fence, match_fence

_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_RUN = re.compile(r"`+|~+")
# Bounded, so that a line of nothing but openers takes no more than linear time.
_CODE_SPAN = r"(?<!`)(`{1,8})(?!`)((?:[^`\n]|(?!\1(?!`))`){1,500}?)(?<!`)\1(?!`)"
_LINK = r"\[([^\[\]`<>\\$\n]{0,300})\]\((https?://[^\s()<>\"'`\\$\[\]]{1,500})\)"
_INLINE = re.compile(f"{_CODE_SPAN}|{_LINK}")
_PUNCTUATION = {ord(c): f"&#{ord(c)};" for c in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"}
# A dollar sign or a backslash of its own element: mathematics is looked for in the finished page, and never across elements.
_PROSE = {
    ord("&"): "&amp;",
    ord("<"): "&lt;",
    ord("!"): "&#33;",
    ord("["): "&#91;",
    ord("]"): "&#93;",
    ord("`"): "&#96;",
    ord("$"): "<span>&#36;</span>",
    ord("\\"): "<span>&#92;</span>",
}
_HEADING = re.compile(r"^ {0,3}#{1,6}(?=[ \t])")
_LIST_ITEM = re.compile(r"^\s*(?:[-*+]|\d{1,9}[.)])\s")
_UNDERLINE = re.compile(r"^ {0,3}(?:=+|-+)\s*$")
_LANGUAGE = re.compile(r"^[A-Za-z][A-Za-z0-9_+#-]{0,19}$")
_DRAWN = frozenset({"mermaid", "html", "svg", "math", "latex", "katex"})
"""Languages that some front end draws instead of showing."""


def clean(text: str) -> str:
    """Return text that any front end and any terminal can show: no colour codes, no characters that are not seen.

    Lone surrogates become their escapes, control characters their pictures, changes of direction their names.
    """
    text = _ANSI.sub("", text).replace("\r\n", "\n")
    return _UNSEEN.sub(_picture, text).encode("utf-8", "backslashreplace").decode()


def _picture(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\u{code:04x}"


def fenced(text: str, language: str = "") -> str:
    """Return a fenced block that holds a text, whatever the text."""
    text = clean(text)
    longest = max((len(run) for run in _RUN.findall(text)), default=0)
    fence = "`" * max(3, longest + 1)
    tag = language if _LANGUAGE.match(language) and language.lower() not in _DRAWN else ""
    return f"{fence}{tag}\n{text}\n{fence}"


def safe_markdown(text: str) -> str:
    """Return a model's Markdown in a form that is harmless in any front end.

    Args:
        text: the words; may hold anything.
    """
    parts: list[str] = []
    for kind, language, lines in _sections(clean(text).split("\n")):
        if kind == "code":
            parts.append(fenced("\n".join(lines), language))
        else:
            parts.append("\n".join(_prose(lines)))
    return "\n\n".join(part for part in parts if part.strip())


def inline_code(text: str) -> str:
    """Return a text as code within a line of Markdown."""
    return f"<code>{clean(text).replace(chr(10), ' ').translate(_PUNCTUATION)}</code>"


def plain(text: str) -> str:
    """Return a text as plain words within a line of Markdown: nothing in it means anything."""
    own = {ord(c): _PROSE[ord(c)] for c in "$\\"}
    return clean(text).replace("\n", " ").translate({**_PUNCTUATION, **own})


def _sections(lines: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Cut the lines into prose and code. What is taken for code is fenced anew, so a reader cannot take it for anything else."""
    prose: list[str] = []
    code: list[str] = []
    opener: Fence | None = None
    in_list = False
    for line in lines:
        fence = match_fence(line)
        if opener is not None:
            if fence is not None and fence.closes(opener):
                yield "code", opener.info.split()[0] if opener.info else "", code
                opener, code = None, []
            else:
                code.append(line.removeprefix(opener.indent))
        elif fence is not None:
            yield "prose", "", prose
            opener, prose = fence, []
        else:
            if line.strip():
                in_list = bool(_LIST_ITEM.match(line)) or (in_list and line[0] in " \t")
            if line.strip() and line.startswith(("    ", "\t")) and not in_list:
                line = line.lstrip(" \t")  # it would be a block of code, in which our escapes would show
            prose.append(line)
    if opener is not None:
        yield "code", opener.info.split()[0] if opener.info else "", code
    else:
        yield "prose", "", prose


def _prose(lines: list[str]) -> Iterator[str]:
    before = ""
    for line in lines:
        line = line.replace("\t", "    ")
        if before.strip() and _UNDERLINE.match(line):
            yield ""  # a rule, or text; not an underline that makes a heading of the line before
            line = "---" if "-" in line else line.replace("=", "&#61;")
        yield _HEADING.sub("####", _escaped(line))
        before = line


def _escaped(line: str) -> str:
    parts = []
    position = 0
    for match in _INLINE.finditer(line):
        parts.append(_escaped_words(line[position : match.start()]))
        if match.group(1) is not None:
            parts.append(inline_code(match.group(2).strip() or match.group(2)))
        else:
            parts.append(f"[{_escaped_words(match.group(3))}]({match.group(4).replace('&', '&amp;')})")
        position = match.end()
    parts.append(_escaped_words(line[position:]))
    return "".join(parts)


def _escaped_words(text: str) -> str:
    return text.translate(_PROSE)
