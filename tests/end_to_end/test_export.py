"""A run of a real kernel becomes a notebook, which nbclient runs again on the real kernel to the same answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import ensure_event_loop
from nbclient import NotebookClient

from rlm_kernel.jupyter.install import kernel_spec
from rlm_kernel.loop.trajectory import read_trajectory
from tests.support.kernels import Kernel, environment

SECRET = "sk-live-0123456789abcdef"
TEXT = "".join(f"line {n}: {'a whale' if n % 7 == 0 else 'nothing'}\n" for n in range(300))


@pytest.fixture(scope="module")
def kept_event_loop() -> None:
    ensure_event_loop()  # jupyter_client keeps one for good: it is not to look like a leak of the test


@pytest.fixture
def demo_kernel(kept_event_loop: None, tmp_path: Path) -> Iterator[Kernel]:
    with Kernel(tmp_path / "kernel", RLM_MODEL="demo", SOME_API_KEY=SECRET) as running:
        yield running


def run_again(home: Path, paths: list[Path]) -> list[str]:
    """Run notebooks with nbclient, one after the other in a fresh kernel of ours. Return what `%rlm` says after each."""
    cells: list[Any] = []
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        assert notebook.metadata.kernelspec.name == "rlm"
        ask = nbformat.v4.new_code_cell("%rlm")
        cells += [nbformat.v4.new_code_cell("%reset -f"), *notebook.cells, ask]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    manager = AsyncKernelManager()
    manager._kernel_spec = KernelSpec(**kernel_spec())
    client = NotebookClient(nbformat.v4.new_notebook(cells=cells), km=manager, timeout=30)
    home.mkdir()
    asyncio.run(client.async_execute(env=environment(home), cleanup_kc=True))
    manager.context.destroy(linger=0)
    return [cell.outputs[-1]["data"]["text/plain"] for cell in cells if cell.source == "%rlm"]


def test_an_exported_run_runs_again_to_the_same_answer(demo_kernel: Kernel, tmp_path: Path) -> None:
    """The root's run, with its children, and one child by itself; and nothing secret is in either file."""
    (tmp_path / "text.txt").write_text(TEXT)
    job = json.dumps(
        {
            "context": str(tmp_path / "text.txt"),
            "task": f"How often does 'whale' occur? ({SECRET})",
            "max_iterations": None,
        }
    )
    kernel = demo_kernel
    kernel.ok(f"from rlm_kernel.jupyter.run_command import serve_run; serve_run({job!r})", 30.0)
    kernel.ok(
        f"h = rlm_query('How often does \\'whale\\' occur?', context={TEXT!r}, blocking=False); rlm_wait(h)", 30.0
    )
    of_child = kernel.value("rlm_result(h)")
    kernel.ok(f"%rlm export root {tmp_path}/root.ipynb --tree")
    kernel.ok(f"%rlm export root {tmp_path}/root.jsonl")
    kernel.ok("import os; child = h.id")
    kernel.ok(f"%rlm export {{child}} {tmp_path}/child.ipynb")
    cell = kernel.run(f"%rlm export root {tmp_path}/root.ipynb")
    assert "exists already" in str(cell.error)
    answer = next(line["final_answer"] for line in read_trajectory(tmp_path / "root.jsonl") if line["type"] == "end")
    assert str(TEXT.count("whale")) in answer
    assert all(SECRET not in path.read_text() for path in tmp_path.glob("*.[ij]*"))
    summaries = run_again(tmp_path / "again", [tmp_path / "root.ipynb", tmp_path / "child.ipynb"])
    for summary, expected in zip(summaries, (answer, of_child), strict=True):
        (line,) = [line for line in summary.splitlines() if "final answer" in line]
        assert " ".join(expected.split()) in " ".join(line.split())
