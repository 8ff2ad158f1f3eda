"""In a real browser: JupyterLab in headless Chromium, used as a person uses it: by its menus, its toolbar, its cells.

One server and one page for all. What is expected of children is known through pidfds that are opened before.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.support.browser import MISSING, Browser, Cell, Notebook, find_chromium, texts
from tests.support.generations import MAX_DEPTH, READY_S, start_generations
from tests.support.kernels import Fifo, Processes
from tests.support.lab import Lab
from tests.support.model_server import ModelServer, code, reply, script

pytestmark = pytest.mark.slow

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SANITIZE = NOTEBOOKS / "sanitize.cfg"

QUICKSTART = nbformat.read(NOTEBOOKS / "quickstart.ipynb", as_version=4)


def empty_notebook() -> nbformat.NotebookNode:
    """Return a notebook of one empty cell, for our kernel."""
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell()], metadata=QUICKSTART.metadata)


def without_outputs(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return a copy of a notebook as it is before it was ever run."""
    copy = nbformat.from_dict(notebook)
    for cell in copy.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return copy


# ------------------------------------------------------------------------------------------------------ fixtures


class Photographer:
    """A plugin that keeps what the page looked like when a test failed."""

    def __init__(self, browser: Browser, lab: Lab, folder: Path) -> None:
        self._browser, self._lab, self._folder = browser, lab, folder

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if report.failed and report.when == "call":
            picture = self._folder / f"{item.name}.png"
            with suppress(Exception):  # a browser that has gone is what the test is going to tell
                self._browser.page.screenshot(path=picture)
                report.sections.append(("the page", f"{picture}\n{texts(self._browser.page.locator('body'))[-3000:]}"))
            report.sections.append(("console of the page", "\n".join(self._browser.console)[-3000:]))
            report.sections.append(("log of the server", self._lab.log[-3000:]))
        return report


@pytest.fixture(scope="module")
def lab(module_server: ModelServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab"), RLM_MODEL="openai/test", **MAX_DEPTH, **module_server.environment) as lab:
        lab.write("quickstart.ipynb", without_outputs(QUICKSTART))
        lab.write("waiting.ipynb", empty_notebook())
        yield lab


@pytest.fixture(scope="module")
def browser(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find_chromium()
    if executable is None:
        (pytest.fail if os.environ.get("RLM_TEST_BROWSER") == "required" else pytest.skip)(MISSING)
    lab: Lab = request.getfixturevalue("lab")
    folder = tmp_path_factory.mktemp("browser")
    with Browser(folder, executable) as browser:
        photographer = Photographer(browser, lab, folder)
        request.config.pluginmanager.register(photographer)
        browser.page.goto(lab.address)
        yield browser
        request.config.pluginmanager.unregister(photographer)
    assert browser.foreign == []


@pytest.fixture(scope="module")
def shared_notebook(browser: Browser) -> Notebook:
    """A notebook whose kernel has a nursery: one that came to be within a test would look like a leak of it."""
    notebook = Notebook(browser.page, "waiting.ipynb")
    notebook.run(f"assert rlm_query({script(reply('FINAL(1)'))!r}) == '1'")
    return notebook


@pytest.fixture
def notebook(shared_notebook: Notebook, server: ModelServer) -> Iterator[Notebook]:
    """The shared notebook, to be seen. A cell that a failed test has left running is stopped, so that it fails no other test."""
    shared_notebook.show()
    yield shared_notebook
    if shared_notebook.is_busy:
        shared_notebook.press("interrupt")
        shared_notebook.wait_until_idle()


# --------------------------------------------------------------------------------------------------------- tests


def test_the_launcher_offers_the_kernel_with_its_logo(browser: Browser) -> None:
    card = browser.page.locator(".jp-LauncherCard[data-category='Notebook'][title='Python 3 (RLM)']")
    assert card.locator("img").evaluate("image => image.decode().then(() => image.naturalWidth)") > 0


def test_the_tab_key_offers_what_the_magic_can_do(notebook: Notebook) -> None:
    offered = notebook.complete("%rlm s")
    assert {"send", "status"} <= set(offered)
    assert all(name.startswith("s") for name in offered)


def test_a_cell_that_waits_shows_a_table_that_changes_and_ends_in_the_final_state(
    notebook: Notebook, server: ModelServer
) -> None:
    gates = ["first", "second"]
    prompts = [script(f"[[block {gate}]]{reply(f'FINAL({gate})')}") for gate in gates]
    cell = notebook.begin(f"hs = [rlm_query(p, blocking=False) for p in {prompts!r}]\n_ = rlm_wait(hs)")
    before = cell.wait_for(r"(running[^]*){2}")
    cell.wait_for(r"(running[^]*){2}", other_than=before)  # nothing has happened, but time has passed
    server.release("first")
    cell.wait_for(r"completed[^]*running")
    assert cell.runs
    server.release("second")
    cell.finish()
    after = cell.text
    assert (after.count("completed"), after.count("running")) == (2, 0)
    assert cell.locator.locator("table").count() == 1
    assert cell.error == ""


def test_the_stop_button_leaves_no_process_and_shows_what_has_become_of_each_child(
    notebook: Notebook, server: ModelServer, tmp_path: Path, fifo: Fifo
) -> None:
    family = start_generations(notebook.run, server, fifo)
    cell = notebook.begin("rlm_wait(hs)")
    cell.wait_for("running")
    with Processes(family.below) as processes:
        notebook.press("interrupt")
        cell.finish()
        left = processes.left
    assert left == []
    assert "KeyboardInterrupt" in cell.error
    assert texts(cell.locator.locator("table")).count("cancelled") >= len(["hs"] * 4)
    assert notebook.run("[str(h.status().state) for h in hs]").text == str(["cancelled"] * 4)


def test_a_cell_of_the_loop_shows_each_iteration_and_the_answer(notebook: Notebook) -> None:
    task = script(code("seen = 6 * 7\nprint(seen)"), reply("It was **found**.\n\nFINAL(it is 42)"))
    cell = notebook.run(f"%%rlm --into found\n{task}")
    shown = cell.text
    assert shown.index("seen = 6 * 7") < shown.index("42") < shown.rindex("it is 42")
    assert cell.locator.locator("strong", has_text="found").count() == 1  # the model's words are Markdown
    assert notebook.run("found, seen").text == "('it is 42', 42)"


def test_the_quickstart_runs_from_top_to_bottom_and_shows_what_it_is_to_show(browser: Browser, lab: Lab) -> None:
    others = lab.processes
    notebook = Notebook(browser.page, "quickstart.ipynb")
    notebook.choose("Run", "runmenu:run-all")
    cells = [cell for cell in QUICKSTART.cells if cell.cell_type == "code"]
    assert notebook.cells.count() == len(cells)
    for number, expected in enumerate(cells):
        cell = Cell(notebook.cells.nth(number)).finish()
        tags = expected.metadata.get("tags", [])
        assert bool(cell.error) == ("raises-exception" in tags), f"{expected.source}\n{cell.text}"
        if "nbval-ignore-output" not in tags:
            assert sanitized(cell.plain) == sanitized(plain_text(expected)), expected.source
    notebook.shut_down()
    assert lab.processes == others


def plain_text(cell: nbformat.NotebookNode) -> str:
    """Return what the kept outputs of a cell show, without those of HTML."""
    found = []
    for output in cell.outputs:
        if output.output_type == "stream":
            found.append(output.text)
        elif output.output_type == "error":
            found.append("\n".join(output.traceback))
        elif "text/html" not in output.data:
            found.append(output.data["text/plain"])
    return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(text.strip() for text in found))


def sanitized(text: str) -> str:
    """Return a text without what differs from run to run, as for ``pytest --nbval``."""
    for pattern, replacement in re.findall(r"^regex: (.*)\nreplace: (.*)$", SANITIZE.read_text(), re.MULTILINE):
        text = re.sub(pattern, replacement, text)
    return "\n".join(line.rstrip() for line in text.splitlines())


def test_a_restart_and_a_shutdown_by_the_menu_leave_no_process(
    notebook: Notebook, lab: Lab, server: ModelServer, fifo: Fifo
) -> None:
    """The last one: it ends the kernel that the tests share."""
    family = start_generations(notebook.run, server, fifo)
    notebook.begin("rlm_wait(hs)")
    with Processes(family.all) as processes:
        notebook.press("restart")
        notebook.accept("Restart")
        notebook.wait_until_idle()
        left = processes.left
    assert left == []
    assert notebook.run("'hs' in globals(), rlm_status()").text == "(False, [])"

    notebook.run("h = rlm_query('[[block]] to the end', blocking=False)")
    server.wait_for_request("to the end", READY_S)
    pids = sorted(lab.processes)
    assert len(pids) == len(["kernel", "nursery", "child"])
    with Processes(pids) as processes:
        notebook.shut_down()
        left = processes.left
    assert left == []
