"""A model's Markdown stays Markdown, and nothing in it can act on a page, whoever renders it."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Callable
from html.parser import HTMLParser

import mistune
import pytest
from markdown_it import MarkdownIt
from nbconvert.filters.markdown_mistune import markdown2html_mistune

from rlm_kernel.jupyter.views.markdown import clean, fenced, inline_code, plain, safe_markdown

RENDERERS: dict[str, Callable[[str], str]] = {
    "nbconvert": markdown2html_mistune,
    "mistune": lambda text: str(mistune.create_markdown(escape=False, plugins=["table", "url", "strikethrough"])(text)),
    "commonmark": MarkdownIt("commonmark", {"html": True}).render,
    "gfm": MarkdownIt("gfm-like", {"html": True, "linkify": False}).render,
}
_TEXT = ("p", "br", "em", "strong", "del", "s", "code", "pre", "blockquote", "hr", "a", "span", "div")
_LISTS = ("ul", "ol", "li", "dl", "dt", "dd", "input", "table", "thead", "tbody", "tr", "th", "td")
HARMLESS = {*_TEXT, *_LISTS, *(f"h{level}" for level in range(1, 7))}
HARMLESS_ATTRIBUTES = {"class", "href", "id", "start", "align", "style", "rel", "target", "type", "disabled", "checked"}


class Page(HTMLParser):
    """Collects what a browser would make of a page: tags, attributes, and the text that is not code."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.runs: list[str] = []
        self.text = ""
        self._code = 0
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._code += tag in ("pre", "code")
        self.runs.append("")

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in ("pre", "code")
        self.runs.append("")

    def handle_data(self, data: str) -> None:
        self.text += data
        if not self._code:
            self.runs[-1:] = [(self.runs[-1] if self.runs else "") + data]

    def handle_comment(self, data: str) -> None:
        self.tags.add("!--")

    def handle_decl(self, decl: str) -> None:
        self.tags.add("!")

    def handle_pi(self, data: str) -> None:
        self.tags.add("?")


MATHS = re.compile(r"\$.*\$|\\\(.*\\\)|\\\[.*\\\]|\\begin\{", re.DOTALL)


def harm_in(page: str) -> list[str]:
    """List what a page could do, or fetch; mathematics counts, as typesetting it can make links."""
    read = Page(page)
    harm = sorted(read.tags - HARMLESS)
    for name, value in read.attributes:
        if name not in HARMLESS_ATTRIBUTES:
            harm.append(name)
        if name == "href" and not value.startswith(("http://", "https://", "#")):
            harm.append(value)
        if name in ("style", "class") and ("url" in value or "ermaid" in value):
            harm.append(value)
    return harm + [run for run in read.runs if MATHS.search(run)]


HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "a <b onclick='x()'>b</b> & &lt;c&gt; &amp;",
    "<!-- c --> <![CDATA[x]]> <?php x ?> <!DOCTYPE x>",
    "<javascript:alert(1)> <https://example.org>",
    "[a](javascript:alert(1)) [b]( javascript:alert(1)) [c](data:text/html;x) [d](JaVaScRiPt:x)",
    "![p](https://evil.example/p.png) ![p][r]\n\n[r]: https://evil.example/p.png",
    "[r]: javascript:alert(1)\n\n[text][r] [r]",
    "[a](https://x.example/\"onmouseover='y()')",
    "[a](https://x.example/<script>) [<b>x</b>](https://x.example)",
    "[![p](https://evil.example/p.png)](https://x.example)",
    "$x$ $$\\href{javascript:alert(1)}{y}$$ \\\\(z\\\\) \\(z\\) \\\\[q\\\\] \\begin{align}a\\end{align}",
    "costs $5 and $6",
    "`a<b>` ``x ` <script> `` `unclosed <script>",
    "```\n<script>\n```\n<script>",
    "````\n```\n<script>\n````\n<script>",
    "~~~ html\n<script>\n~~~",
    '```mermaid\ngraph TD; A-->B; click A "javascript:alert(1)"\n```',
    "```<script>\nx\n```",
    "```unclosed\n<script>\n",
    "- ```\n  <script>\n  ```\n- <script>",
    "- ~~~\n<script>\n```\n<script>\n```",
    "> ```\n> <script>\n<script>",
    "    <script>\n\n\t<script>",
    "1. a\n\n       <script>",
    "$$\n\n```\n$$ <script>alert(1)</script>\n```",
    "\\begin{x}\n\n```\n\\end{x} <script>alert(1)</script>\n```",
    "```\n$$\n```\n\n<script>\n\n```\n$$\n```",
    "\\<script\\> \\`<script>\\` \\",
    "| a | <script> |\n|---|---|\n| `|<script>` | $ | $ |",
    "# <script>\n\n<script>\n===\n\ntext\n---",
    "a\r<script>\r\n```\r\n<script>\r\n```",
    "<scr\x00ipt> <\x1b[31mscript>",
    "[^1] [^1]: <script>\n\n: <script>",
    'www.example.org/<script> https://example.org/"><script>',
    "- [ ] task <script>\n- [x] done",
]


@pytest.mark.parametrize("renderer", RENDERERS.values(), ids=RENDERERS.keys())
def test_hostile_text_can_do_nothing(renderer) -> None:
    for text in HOSTILE:
        assert harm_in(renderer(safe_markdown(text))) == [], text


def test_the_check_would_notice() -> None:
    """Each renderer lets most of it through as it stands."""
    for renderer in RENDERERS.values():
        assert sum(bool(harm_in(renderer(text))) for text in HOSTILE) > len(HOSTILE) / 3


@pytest.mark.parametrize("renderer", RENDERERS.values(), ids=RENDERERS.keys())
def test_no_combination_of_pieces_can_do_anything(renderer) -> None:
    pieces = [
        "<script>", "</script>", "<img src=x onerror=y>", "`", "```", "````", "~~~", "\n", "\n\n", "    ", "\t", "- ", "> ",
        "$", "$$", "\\", "\\(", "\\)", "[a](javascript:x)", "![", "](", "[", "]", "https://x.example", "a", " ", "|", "#", "===", "---",
        "```python\n", "\n```\n", "\r", "&lt;script&gt;", "\\begin{a}", "\\end{a}", "<!--", "-->", "*", "_", ":",
    ]  # fmt: skip
    chance = random.Random(7)
    for _ in range(400):
        text = "".join(chance.choices(pieces, k=chance.randrange(2, 30)))
        assert harm_in(renderer(safe_markdown(text))) == [], repr(text)


@pytest.mark.parametrize("renderer", [RENDERERS["nbconvert"], RENDERERS["gfm"]], ids=["nbconvert", "gfm"])
def test_markdown_stays_markdown_and_no_letter_is_lost(renderer) -> None:
    text = (
        "# Title\n\nI **look** at *this*, `a<b & c`, x < y & z, $5 and a\\b.\n\n- one\n- two\n\n1. first\n\n> quoted\n\n"
        '| a | b |\n|---|---|\n| 1 | 2 |\n\n```json\n{"a": "<b>"}\n```\n\nSee [the docs](https://example.org/a?b=1&c=2).'
    )
    page = Page(renderer(safe_markdown(text)))
    assert {"strong", "em", "code", "ul", "ol", "li", "blockquote", "table", "pre", "h4", "a"} <= page.tags
    assert "h1" not in page.tags  # the page's own headings are larger
    assert ("href", "https://example.org/a?b=1&c=2") in page.attributes
    for words in ("Title", "a<b & c", "x < y & z", "$5", "a\\b", '{"a": "<b>"}'):
        assert words in page.text


@pytest.mark.parametrize("renderer", RENDERERS.values(), ids=RENDERERS.keys())
def test_a_fence_holds_any_text(renderer) -> None:
    for mark, count in itertools.product("`~", range(1, 12)):
        text = f"a\n{mark * count}\n<b>\n{mark * count}python\n$$ c"
        page = Page(renderer(fenced(text, "python")))
        assert page.text.strip() == text
        assert page.tags <= {"div", "pre", "code", "span"}


@pytest.mark.parametrize("renderer", RENDERERS.values(), ids=RENDERERS.keys())
def test_plain_words_and_inline_code_mean_nothing(renderer) -> None:
    text = "a*b* _c_ `d` <e> [f](https://g.example) $h$ \\i # j ![k](l) &amp; ~~m~~"
    for write in (plain, inline_code):
        page = Page(renderer(f"x {write(text)} y"))
        assert page.text.strip() == f"x {text} y"
        assert page.tags <= {"p", "code", "span"}


def test_what_cannot_be_seen_or_sent_is_made_visible() -> None:
    assert clean("a\x1b[31mb\x1b]0;title\x07c\x00d\u202ee\ud800\r\nf\x7f") == "abc\u2400d\\u202ee\\ud800\nf\u2421"


@pytest.mark.parametrize("piece", ["`", "``` ", "[a](", "<", "~~~\n", "```\n", "`a ", "- ", "> ", "\\", "$", "    x\n"])
def test_time_is_linear(piece) -> None:
    def seconds(length: int) -> float:
        text = piece * (length // len(piece))
        began = time.process_time()
        safe_markdown(text)
        return time.process_time() - began

    assert seconds(20_000) < 0.5
