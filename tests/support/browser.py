"""A real browser for tests: headless Chromium of the system, driven by playwright, and a notebook in JupyterLab as a person uses it.

Nothing is fetched: playwright uses the Chromium that is installed, and the browser finds no host but this machine. What a test waits
for is a condition of the page, or a mutation of it, each with a deadline.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

from playwright.sync_api import ConsoleMessage, Locator, Page, Playwright, Request, expect, sync_playwright

from tests.support.kernels import MARK, kill_marked

NAMES = ("chromium", "chromium-browser", "google-chrome")

MISSING = (
    f"no browser: none of {', '.join(NAMES)} is on PATH. Install one, for example with: apt-get install chromium "
    "(with RLM_TEST_BROWSER=required this is a failure)"
)

WAIT_S = 30.0
"""Seconds for anything to come about in the page: a busy machine may need several for the first load."""

_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # it needs that when root starts it, as in most containers; its pages are ours
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)

_WAIT_FOR_TEXT = """
([element, pattern, other, timeout]) => new Promise((resolve, reject) => {
  const wanted = new RegExp(pattern);
  const look = () => {
    const text = element.innerText;
    if (text !== other && wanted.test(text)) {
      end();
      resolve(text);
    }
  };
  const end = () => {
    observer.disconnect();
    clearTimeout(timer);
  };
  const observer = new MutationObserver(look);
  const timer = setTimeout(() => {
    end();
    reject(new Error(`no ${pattern} within ${timeout} ms in: ${element.innerText}`));
  }, timeout);
  observer.observe(element, {childList: true, subtree: true, characterData: true});
  look();
})
"""
"""Looks at an element whenever it is changed, until its text fits."""


def find_chromium() -> str | None:
    """Return the path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser with one page. Use as a context manager; on leaving, nothing of it runs any more.

    Args:
        home: a directory for what it keeps; must be a new one.
        executable: the path of Chromium.
        width: of the page, in pixels.
        height: of the page, in pixels.
        scale: pixels of a picture for one of the page.

    Attributes:
        foreign: addresses that its pages asked for and that are not on this machine.
        console: what its pages wrote to the console as errors.
    """

    def __init__(
        self, home: Path, executable: str, *, width: int = 1200, height: int = 900, scale: float = 1.0
    ) -> None:
        self._home = home
        self._executable = executable
        self._size = (width, height)
        self._scale = scale
        self._mark = uuid.uuid4().hex
        self._stack = contextlib.ExitStack()
        self.foreign: list[str] = []
        self.console: list[str] = []
        self.page: Page

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            # Playwright ends it; what of it is not a child of its own may take a moment, or needs to be told.
            stack.callback(kill_marked, self._mark, lambda: None)
            playwright = stack.enter_context(sync_playwright())
            self.page = self._launch(playwright)
            stack.callback(self.page.context.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, exc, trace)

    def _launch(self, playwright: Playwright) -> Page:
        width, height = self._size
        context = playwright.chromium.launch_persistent_context(
            self._home / "profile",
            executable_path=self._executable,
            args=_ARGUMENTS,
            env={**os.environ, "HOME": str(self._home), MARK: self._mark},
            viewport={"width": width, "height": height},
            device_scale_factor=self._scale,
            handle_sigint=False,  # the tests end it
            handle_sigterm=False,
            handle_sighup=False,
        )
        context.set_default_timeout(WAIT_S * 1000)
        context.on("request", self._note_request)
        page = context.pages[0]
        page.on("console", self._note_message)
        page.on("pageerror", lambda error: self.console.append(str(error)))
        return page

    def _note_request(self, request: Request) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:", "about:")):
            self.foreign.append(request.url)

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.console.append(message.text)


class Notebook:
    """A notebook in JupyterLab, opened in its file browser, with a kernel that is idle.

    Args:
        page: a page in which JupyterLab is open.
        name: of a file in its folder.
    """

    def __init__(self, page: Page, name: str) -> None:
        self.page = page
        self._tab = page.locator(".lm-DockPanel-tabBar .lm-TabBar-tab", has_text=name)
        self.panel = page.locator(".jp-NotebookPanel:visible")  # the others are behind other tabs
        self.cells = self.panel.locator(".jp-CodeCell")
        self._status = page.locator("#jp-main-statusbar")
        page.locator(".jp-DirListing-item", has_text=name).dblclick()
        self.show()

    def show(self) -> None:
        """Bring it before other tabs, and wait until its kernel is idle."""
        self._tab.click()
        expect(self._tab).to_have_class(re.compile("jp-mod-current"))
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """Wait until the kernel is there and does nothing."""
        self._expect_status("| Idle")

    @property
    def is_busy(self) -> bool:
        """Whether a cell runs."""
        return "| Busy" in self._status.inner_text()

    def _expect_status(self, text: str) -> None:
        expect(self._status).to_contain_text(text, timeout=WAIT_S * 1000)

    # -- cells

    def begin(self, code: str) -> Cell:
        """Write a text into the last cell, and run it. Does not wait for its end."""
        cell = Cell(self.cells.last)
        number = self.cells.count()
        editor = cell.locator.locator(".cm-content")
        editor.click()
        self.page.keyboard.insert_text(code)
        self.press("run")
        expect(self.cells).to_have_count(number + 1)  # JupyterLab adds one when the last is run
        return Cell(self.cells.nth(number - 1))

    def run(self, code: str) -> Cell:
        """Run a text in the last cell, which must succeed."""
        cell = self.begin(code).finish()
        assert cell.error == "", cell.text
        return cell

    def complete(self, code: str) -> list[str]:
        """Write a text into the last cell and press the tab key. Returns what is offered; the cell is empty again then."""
        editor = self.cells.last.locator(".cm-content")
        editor.click()
        self.page.keyboard.insert_text(code)
        self.page.keyboard.press("Tab")
        completer = self.page.locator(".jp-Completer:not(.lm-mod-hidden)")
        completer.wait_for()
        offered = completer.locator(".jp-Completer-match").all_inner_texts()
        self.page.keyboard.press("Escape")
        completer.wait_for(state="hidden")
        self.page.keyboard.press("Control+A")
        self.page.keyboard.press("Delete")
        return offered

    # -- the surface

    def press(self, button: str) -> None:
        """Press a button of the notebook's toolbar."""
        self.panel.locator(f".jp-NotebookPanel-toolbar [data-jp-item-name='{button}'] [data-command]").click()

    def choose(self, menu: str, command: str) -> None:
        """Choose a command from a menu."""
        self.page.locator(".lm-MenuBar-itemLabel", has_text=menu).first.click()
        self.page.locator(f".lm-Menu-item[data-command='{command}']").click()

    def accept(self, label: str) -> None:
        """Press the button by which a dialog is confirmed."""
        self.page.locator(".jp-Dialog .jp-mod-accept", has_text=label).click()

    def shut_down(self) -> None:
        """End the kernel by the menu, and wait until JupyterLab says that there is none."""
        self.choose("Kernel", "kernelmenu:shutdown")
        self._expect_status("No Kernel")


class Cell:
    """A cell of code in the page."""

    def __init__(self, locator: Locator) -> None:
        self.locator = locator
        self._prompt = locator.locator(".jp-InputPrompt")
        self.outputs = locator.locator(".jp-OutputArea-output")

    def finish(self) -> Self:
        """Wait until its reply has come."""
        expect(self._prompt).to_have_text(re.compile(r"\[\d+\]:"), timeout=WAIT_S * 1000)
        return self

    @property
    def runs(self) -> bool:
        """Whether it has been sent, and its reply has not come."""
        return self._prompt.inner_text() == "[*]:"

    @property
    def text(self) -> str:
        """What its outputs show, as text."""
        return texts(self.outputs)

    @property
    def plain(self) -> str:
        """What its outputs show, without those of HTML."""
        return texts(self.locator.locator(".jp-OutputArea-output:not([data-mime-type='text/html'])"))

    @property
    def error(self) -> str:
        """What its error shows, empty if there is none."""
        return texts(self.locator.locator("[data-mime-type='application/vnd.jupyter.stderr']"))

    def wait_for(self, pattern: str, *, other_than: str | None = None) -> str:
        """Wait until its outputs show a text, looking whenever they change.

        Args:
            pattern: a regular expression of JavaScript that the text has a match of.
            other_than: a text that is not meant.

        Returns:
            What they show at that moment.
        """
        area = self.locator.locator(".jp-Cell-outputWrapper")
        return str(
            area.evaluate(
                f"(element, rest) => ({_WAIT_FOR_TEXT})([element, ...rest])", [pattern, other_than, WAIT_S * 1000]
            )
        )


def texts(locator: Locator) -> str:
    """Return what elements show, one below the other, as text without empty lines around each."""
    return "\n".join(text.strip() for text in locator.all_inner_texts())
