"""Run the notebooks and write their outputs back, in the one form in which they are kept.

    python -m tests.notebooks                     # all of them, in place
    python -m tests.notebooks errors quickstart   # some
    python -m tests.notebooks --check             # change nothing; say which are not in the kept form

A notebook runs from top to bottom in a fresh kernel ``rlm`` of this environment, in its own folder, with nothing of the user's
configuration. What differs from machine to machine or from run to run without being an output is taken out, so that a diff shows what has
changed: timings, widget states, versions, the folders in which it kept files. Pictures are kept in few colours, which makes
them a quarter as large. Cells have ids like ``errors-07``: those that have one keep it, new ones get the next free number.

`tests.test_notebooks` holds the notebooks to this form, and nbval runs them and compares:
``pytest --nbval notebooks --nbval-sanitize-with notebooks/sanitize.cfg``
"""

from __future__ import annotations

import argparse
import base64
import copy
import io
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from tests.support.kernels import environment

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"

METADATA = {
    "kernelspec": {"display_name": "Python 3 (RLM)", "language": "python", "name": "rlm"},
    "language_info": {
        "codemirror_mode": {"name": "ipython", "version": 3},
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "nbconvert_exporter": "python",
        "pygments_lexer": "ipython3",
    },
}
"""The metadata of every notebook. The version of Python is left out: nothing here depends on it."""

RUNS_SHOWN = "~/.local/share/jupyter/rlm/runs"
"""What outputs name instead of the folder in which this run kept its files: where a user's are."""

TEMPORARY_SHOWN = "~/tmp"
"""What outputs name instead of a temporary folder with a random name."""

_CELL_TIMEOUT_S = 60


def ids_begin_with(path: Path) -> str:
    """Return the part of a notebook's cell ids before the number."""
    return "quick-" if path.stem == "quickstart" else f"{path.stem.split('_')[0]}-"


def normalized(notebook: NotebookNode, prefix: str) -> NotebookNode:
    """Return a copy in the form in which notebooks are kept.

    Args:
        notebook: the notebook.
        prefix: what its cell ids begin with.
    """
    result = copy.deepcopy(notebook)
    result.nbformat, result.nbformat_minor = 4, 5
    result.metadata = nbformat.from_dict(copy.deepcopy(METADATA))
    _number(result.cells, prefix)
    count = 0
    for cell in result.cells:
        tags = sorted(cell.metadata.get("tags", []))
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = count
            if "metadata" in output:  # what a kernel adds for one front end, such as the size of a picture, stays
                output.metadata = {
                    key: value for key, value in output.metadata.items() if not key.startswith("jupyter")
                }
    return result


def _number(cells: list[NotebookNode], prefix: str) -> None:
    """Give an id to each cell that has none of ours, or one that an earlier cell has, too."""
    known = re.compile(rf"{re.escape(prefix)}(\d{{2,}})")
    seen: set[str] = set()
    news = []
    for cell in cells:
        if known.fullmatch(cell.get("id", "")) and cell.id not in seen:
            seen.add(cell.id)
        else:
            news.append(cell)
    last = max((int(id[len(prefix) :]) for id in seen), default=0)
    for number, cell in enumerate(news, last + 1):
        cell.id = f"{prefix}{number:02}"


def execute(path: Path) -> NotebookNode:
    """Run a notebook in a fresh kernel and return it in the kept form.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell that is not tagged ``raises-exception`` has raised.
    """
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as home:
        client = NotebookClient(
            notebook, kernel_name="rlm", timeout=_CELL_TIMEOUT_S, record_timing=False, coalesce_streams=True
        )
        temporary = Path(home, "tmp")
        temporary.mkdir()
        client.execute(cwd=str(path.parent), env=environment(Path(home), TMPDIR=str(temporary)))
        notebook = _replaced(notebook, re.escape(os.path.join(home, "runs")), RUNS_SHOWN)
        notebook = _replaced(notebook, rf"{re.escape(str(temporary))}(/tmp\w+)?", TEMPORARY_SHOWN)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = _in_few_colours(output.data["image/png"])
    return normalized(notebook, ids_begin_with(path))


def _replaced(node: Any, pattern: str, new: str) -> Any:
    if isinstance(node, str):
        return re.sub(pattern, new, node)
    if isinstance(node, list):
        return [_replaced(each, pattern, new) for each in node]
    if isinstance(node, dict):
        return NotebookNode({key: _replaced(value, pattern, new) for key, value in node.items()})
    return node


def _in_few_colours(png: str) -> str:
    from PIL import Image

    file = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(png)))
    if picture.convert("RGBA").getchannel("A").getextrema() != (255, 255):
        return png  # with transparency the palette would not be exact where it shows most, on the ground
    picture.convert("RGB").quantize(64, method=Image.Quantize.MEDIANCUT).save(file, "PNG", optimize=True)
    return base64.encodebytes(file.getvalue()).decode()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks, without .ipynb (default: all)")
    parser.add_argument("--check", action="store_true", help="only say which notebooks are not in the kept form")
    options = parser.parse_args()
    paths = [FOLDER / f"{Path(name).stem}.ipynb" for name in options.names] or sorted(FOLDER.glob("*.ipynb"))
    differing = []
    for path in paths:
        if options.check:
            notebook = nbformat.read(path, as_version=4)
            if normalized(notebook, ids_begin_with(path)) != notebook:
                differing.append(path.name)
            continue
        print(path.name, file=sys.stderr)
        nbformat.write(execute(path), path)
    if differing:
        print("not in the kept form (python -m tests.notebooks brings them there): " + ", ".join(differing))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
