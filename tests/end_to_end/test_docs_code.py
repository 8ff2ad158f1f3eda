"""The code on the pages of the documentation and in README runs, and gives what stands below it.

Each page is one notebook: its blocks of Python are cells, which run one after the other in a fresh episode of one kernel, with the demo
model and no network. Blocks in another language (text, sh) are not run. A block of text with the title "Output" says what the cell above it
shows: each of its lines is found there, where … stands for anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlm_kernel.session.config import Settings
from tests.support.kernels import Cell, Kernel

DEFAULTS = Settings(environ={}).items()
CHECKOUT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(python|text \{title=\"Output\"\})\n(.*?)^```$", re.MULTILINE | re.DOTALL)

PAGES = [
    path
    for path in [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
    if "\n```python\n" in path.read_text("utf-8")
]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel(tmp_path_factory.mktemp("docs")) as running:
        # The nursery comes to be before the first test, for which it would look like a leak.
        running.ok("%rlm model demo\nrlm_query('How often does x occur?', context='x')")
        running.ok("%rlm reset")
        yield running


def shown(cell: Cell) -> str:
    displayed = [m["content"]["data"].get("text/plain", "") for m in cell.messages if m["msg_type"] == "display_data"]
    return "\n".join([cell.stdout, cell.text, *displayed])


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(CHECKOUT).as_posix())
def test_the_code_on_a_page_runs_and_gives_what_it_says(path: Path, kernel: Kernel) -> None:
    last = None
    text_of_page = path.read_text("utf-8")
    for kind, text in _BLOCK.findall(text_of_page):
        if kind == "python":
            last = kernel.ok(text.rstrip("\n"))
            continue
        assert last is not None
        for line in text.splitlines():
            pattern = ".*".join(map(re.escape, line.split("…")))
            assert re.search(pattern, shown(last)), f"{line!r} is not in:\n{shown(last)}"
    changed = sorted(set(re.findall(r"^%rlm config (\w+)=", text_of_page, re.MULTILINE)))
    kernel.ok("\n".join(["%rlm reset", *(f"%rlm config {name}={DEFAULTS[name]}" for name in changed)]))
