"""Take the pictures of the documentation: ``python -m tests.support.screenshots``.

The views in a real JupyterLab, in its light and its dark theme, each at a moment that is held until the picture is taken. The model is a
stand-in that follows a script; so the pictures differ in nothing but numbers from one run to the next.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import nbformat
from PIL import Image
from playwright.sync_api import Locator

from tests.support.browser import MISSING, Browser, Cell, Notebook, find_chromium
from tests.support.lab import Lab
from tests.support.model_server import ModelServer, Reply

WIDTH, SCALE = 860, 1.4
"""Of the page; about 1,200 pixels in the picture."""

IMAGES = Path(__file__).parents[2] / "docs" / "images"

SHOWN = ("live-table.png", "live-table-dark.png", "loop.png", "timeline.png")
"""The pictures that the documentation shows."""

SETUP = """\
%xmode Minimal
from rlm_kernel.clients.demo import sample_text
log = sample_text()
%rlm config max_depth=3
%rlm config max_concurrent_children=4
rlm_query("Are you there?")
%rlm reset
"""
"""One child before all others: it waits for the nursery, which is none of what the pictures are to show."""

CHILDREN = """\
questions = {
    "comet": "On how many nights was the comet seen?",
    "weather": "Which nights had a clear sky?",
    "watches": "Who kept the most watches, and how were they shared out?",
    "plates": "How many plates were exposed?",
    "moon": "When did the moon spoil the seeing?",
    "letters": "List every letter that came or went.",
}
children = [
    rlm_query(question, context=log, blocking=False, name=name)
    for name, question in questions.items()
]
answers = rlm_wait(children)"""

TASK = """\
%%rlm --context log --into tails
When was the second tail of the comet first seen, and in what weather?"""


def _code(text: str) -> str:
    return f"```repl\n{text}\n```"


def _later(text: str, delay_s: float) -> Reply:
    return Reply(text, delay_s=delay_s)


_HELD = Reply(_code("FINAL('none')"), gate="picture")

_TURNS: dict[str, tuple[str | Reply, ...]] = {
    "Are you there": (_code("FINAL('yes')"),),
    "comet seen": (_later(_code("print(context.count('comet'))"), 0.6), _later(_code("FINAL('on 31 of 46')"), 0.9)),
    "clear sky": (
        _later(_code("clear = [n for n in context.split('\\n\\n') if 'clear' in n.lower()]\nprint(len(clear))"), 0.4),
        _later(_code("print(clear[0])"), 0.7),
        _HELD,
    ),
    "Who kept the most": (
        _later(
            _code(
                "names = ['Miss Ardley', 'Mr Toll', 'Dr Venn']\n"
                "print(rlm_query_batched([f'How many watches did {n} keep?' for n in names], context=context))"
            ),
            0.8,
        ),
        _code("FINAL('Miss Ardley')"),
    ),
    "How many watches": (_HELD,),
    "plates": (Reply("the key was refused", status=401, delay_s=1.1),),
    "moon": (_HELD,),
    "letter": (_HELD,),
    "second tail": (
        _later(
            "I look for the first lines that mention a tail.\n\n"
            + _code("hits = [line for line in context.splitlines() if 'tail' in line]\nprint(*hits[:3], sep='\\n')"),
            0.5,
        ),
        _later(
            "That is in the night of **1 November**. A child is to check the weather of that night.\n\n"
            + _code(
                "night = next(n for n in context.split('\\n\\n') if 'Two tails' in n)\n"
                "weather = rlm_query('What was the weather?', context=night)\nprint(weather)"
            ),
            0.7,
        ),
        _later("Both are known now.\n\n" + _code("FINAL(f'1 November 1887; {weather}')"), 0.5),
    ),
    "What was the weather": (Reply(_code("FINAL('haze round the moon')"), gate="weather"),),
}
"""What the model replies, turn by turn, to a task in which the words stand."""


def _reply(body: dict[str, Any]) -> Reply | str:
    messages = body["messages"]
    text = next(str(m["content"]) for m in messages if m["role"] == "user")
    turns = next(turns for words, turns in sorted(_TURNS.items(), key=lambda i: -len(i[0])) if words in text)
    return turns[min(sum(m["role"] == "assistant" for m in messages), len(turns) - 1)]


class Studio:
    """A notebook without anything around it, of which pictures are taken in both themes.

    Args:
        notebook: the notebook.
        folder: where the pictures go.
        wanted: names of the pictures to be kept, None for all.
    """

    def __init__(self, notebook: Notebook, folder: Path, wanted: Collection[str] | None) -> None:
        self.notebook = notebook
        self._folder = folder
        self._wanted = wanted
        self._page = notebook.page
        self._page.locator(".jp-SideBar.jp-mod-left .lm-mod-current").click()  # the file browser takes half of the page

    def take(self, name: str, *cells: Cell) -> None:
        """Take pictures of cells that are below each other: ``NAME.png``, and ``NAME-dark.png`` in the dark theme."""
        for theme, picture in (("Light", f"{name}.png"), ("Dark", f"{name}-dark.png")):
            if self._wanted is None or picture in self._wanted:
                self._use(theme)
                self._page.mouse.move(0, 0)
                self._crop(self._folder / picture, [cell.locator for cell in cells])

    def _use(self, theme: str) -> None:
        self._page.locator(".lm-MenuBar-itemLabel", has_text="Settings").click()
        self._page.locator(".lm-Menu-item", has_text=re.compile("^Theme")).click()
        self._page.locator(".lm-Menu-item", has_text=re.compile(f"^JupyterLab {theme}$")).click()
        self._page.wait_for_selector(f"body[data-jp-theme-light='{str(theme == 'Light').lower()}']", state="attached")

    def _crop(self, path: Path, cells: list[Locator]) -> None:
        cells[0].scroll_into_view_if_needed()
        boxes = [box for cell in cells if (box := cell.bounding_box()) is not None]
        left, top = min(box["x"] for box in boxes), boxes[0]["y"]
        width = max(box["x"] + box["width"] for box in boxes) - left
        height = boxes[-1]["y"] + boxes[-1]["height"] - top
        self._page.screenshot(path=path, clip={"x": left, "y": top, "width": width, "height": height})
        _optimize(path)
        print(f"{path}: {path.stat().st_size // 1024} KiB")


def _optimize(path: Path) -> None:
    """Write a picture again with a palette: half of the bytes, and nobody sees it."""
    with Image.open(path) as image:
        reduced = image.convert("RGB").quantize(256, kmeans=3, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)


def _take_all(studio: Studio, model: ModelServer) -> None:
    notebook = studio.notebook
    waiting = notebook.begin(CHILDREN)
    waiting.wait_for(r"completed[^]*weather\s+2\s+3\.\d s[^]*waiting[^]*queued[^]*failed")
    studio.take("live-table", waiting)
    model.release("picture")
    waiting.finish()

    studio.take("timeline", notebook.run("%rlm timeline"))
    studio.take("tree", notebook.run("%rlm tree"))
    studio.take("cards", notebook.run("children[0]"), notebook.run("rlm_status(children[3])"))

    task = notebook.begin(TASK)
    task.wait_for(r"\b[23]\.\d s ago")
    studio.take("loop-running", task)
    model.release("weather")
    studio.take("loop", task.finish())


def main() -> None:
    parser = argparse.ArgumentParser(description="Take the pictures of the documentation.")
    parser.add_argument("folder", nargs="?", type=Path, default=IMAGES, help="where they go (docs/images)")
    parser.add_argument("--all", action="store_true", help="also those that the documentation does not show")
    args = parser.parse_args()
    folder: Path = args.folder
    executable = find_chromium()
    if executable is None:
        sys.exit(MISSING)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"kernelspec": {"name": "rlm", "display_name": "Python 3 (RLM)", "language": "python"}}
    empty = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell()], metadata=metadata)
    with (
        tempfile.TemporaryDirectory() as home,
        ModelServer(_reply) as model,
        Lab(Path(home, "lab"), RLM_MODEL="openai/qwen3-8b", **model.environment) as lab,
        Browser(Path(home, "browser"), executable, width=WIDTH, height=2000, scale=SCALE) as browser,
    ):
        lab.write("observatory.ipynb", empty)
        browser.page.goto(lab.address)
        notebook = Notebook(browser.page, "observatory.ipynb")
        notebook.run(SETUP)
        _take_all(Studio(notebook, folder, None if args.all else SHOWN), model)


if __name__ == "__main__":
    main()
