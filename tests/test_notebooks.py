"""The notebooks as they are committed: executed, in the one kept form, with nothing in them of the machine that made them.

That their outputs are right is what nbval checks (`.ci/run`).
"""

from __future__ import annotations

import ast
import getpass
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from tests.notebooks import FOLDER, METADATA, ids_begin_with, normalized

PATHS = sorted(FOLDER.glob("*.ipynb"))

IGNORED = "nbval-ignore-output"
RAISES = "raises-exception"

SECRETS = re.compile(r"\b(sk-[\w-]{16,}|hf_\w{16,}|gh[pousr]_\w{16,}|AKIA\w{12,}|eyJ[\w-]{16,})")
MACHINE = re.compile(r"(?<![\w/<:.~])/(home|root|tmp|var|usr|opt|work|Users|private|mnt|srv)/")


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request) -> Path:
    return request.param


@pytest.fixture
def notebook(path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def texts(node: object) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for key, value in node.items():
            if not str(key).startswith("image/"):
                yield from texts(value)
    elif isinstance(node, list):
        for value in node:
            yield from texts(value)


def test_it_is_in_the_form_that_the_tool_writes(path, notebook) -> None:
    """Metadata, cell ids and counts are what ``python -m tests.notebooks`` makes of them, so that a diff shows real changes."""
    nbformat.validate(notebook)
    assert normalized(notebook, ids_begin_with(path)) == notebook, "run: python -m tests.notebooks " + path.stem


def test_only_cells_that_are_meant_to_fail_have_failed(notebook) -> None:
    for cell in code_cells(notebook):
        failed = any(output.output_type == "error" or "UsageError" in output.get("text", "") for output in cell.outputs)
        assert failed == (RAISES in tags(cell)), cell.source


def test_it_has_outputs_and_says_something_about_them(notebook) -> None:
    cells = code_cells(notebook)
    assert sum(bool(cell.outputs) for cell in cells) > len(cells) / 3
    assert notebook.cells[0].cell_type == "markdown"
    assert notebook.cells[0].source.startswith("# ")


def test_nothing_in_it_tells_of_the_machine_or_the_user(path, notebook) -> None:
    names = {str(Path.home()), str(FOLDER.parent), sys.prefix, socket.gethostname(), getpass.getuser()}
    names = {name for name in names if len(name) > 5}
    for text in texts([notebook.cells, notebook.metadata]):
        assert not MACHINE.search(text), text
        assert not SECRETS.search(text), text
        assert not [name for name in names if name in text], text


def test_what_may_show_a_live_view_is_not_compared(notebook) -> None:
    """Any wait may take a second on a slow machine, and then shows a table that nbval takes for another output."""
    for cell in code_cells(notebook):
        shown_live = any(output.output_type in ("display_data", "update_display_data") for output in cell.outputs)
        if shown_live or waits(cell.source):
            assert IGNORED in tags(cell), f"{cell.id} waits for children, so it needs the tag {IGNORED}:\n{cell.source}"


def test_what_is_not_compared_is_looked_at_by_a_later_cell(notebook) -> None:
    """A cell that waits and whose output is ignored is followed, with only text between, by one that shows what is promised."""
    cells = code_cells(notebook)
    for cell, following in zip(cells, [*cells[1:], None], strict=True):
        if waits(cell.source):
            assert following is not None, f"{cell.id} is the last cell"
            assert IGNORED not in tags(following) or not waits(following.source), f"{cell.id}, {following.id}"


def test_links_lead_somewhere(path, notebook) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)\s]+)\)", cell.source):
                assert "://" in target or (path.parent / target.partition("#")[0]).exists(), target


def waits(source: str) -> bool:
    """Say whether a cell's code waits for children for longer than no time at all."""
    if source.startswith("%%"):
        return source.startswith("%%rlm") and "--background" not in source.splitlines()[0]
    lines = ["" if re.match(r"\s*[%!]", line) else line for line in source.splitlines()]
    for node in ast.walk(compile("\n".join(lines), "cell", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)):
        if isinstance(node, ast.Await):
            return True
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if called in ("rlm_wait", "rlm_as_completed", "wait") and given.get("timeout_s") != "0":
                return True
            if called in ("rlm_query", "rlm_query_batched") and given.get("blocking") != "False":
                return True
    return False


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("rlm_wait(child)", True),
        ("rlm_wait(child, timeout_s=0)", False),
        ("%rlm status\nstatus = child.wait(1)", True),
        ("answer = await child", True),
        ("rlm_query('?')", True),
        ("rlm_query('?', blocking=False)", False),
        ("%%rlm --into answer\nHow many?", True),
        ("%%rlm --background\nHow many?", False),
        ("rlm_status()", False),
    ],
)
def test_waits_are_recognized(source, expected) -> None:
    assert waits(source) == expected


def test_ids_stay_and_new_cells_get_new_ones() -> None:
    """Cells put between others do not renumber them."""
    cells = [nbformat.v4.new_markdown_cell(id=id) for id in ("errors-01", "abcdef", "errors-02", "errors-01")]
    result = normalized(NotebookNode(nbformat=4, nbformat_minor=5, metadata=NotebookNode(), cells=cells), "errors-")
    assert [cell.id for cell in result.cells] == ["errors-01", "errors-03", "errors-02", "errors-04"]
    assert result.metadata == METADATA
    assert normalized(result, "errors-") == result
