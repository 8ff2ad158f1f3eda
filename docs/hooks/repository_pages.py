"""Make pages of files that lie outside ``docs/``: the notebooks, the examples and the changelog.

MkDocs runs it at build time. Nothing is executed: a notebook's page shows the outputs that are kept in the file. Links from one page to
another name files of the repository, so that they also work where the repository is read; here they become links between pages.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]

READING_ORDER = (
    "quickstart",
    "background_children",
    "shared_contexts",
    "cancelling_and_steering",
    "nesting_and_limits",
    "errors",
    "the_loop",
    "local_servers_and_two_models",
    "trajectories",
    "rewards_and_rollouts",
)
"""Notebooks in the order in which the navigation shows them. Others come after these."""

_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_TEXT_LIMIT = 20_000
"""Characters of one text output that a page shows."""


def pages() -> dict[str, str]:
    """Return the pages that are made: file of the repository → where its page is in the site."""
    found = {"CHANGELOG.md": "changelog.md", "README.md": "index.md", "examples/README.md": "examples/index.md"}
    for path in sorted((ROOT / "examples").glob("*.py")):
        found[f"examples/{path.name}"] = f"examples/{path.stem}.md"
    names = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    for name in [*(n for n in READING_ORDER if n in names), *sorted(names - set(READING_ORDER))]:
        found[f"notebooks/{name}.ipynb"] = f"notebooks/{name}.md"
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the two parts of the navigation that follow from the files there are."""
    for entry in config.nav or ():
        for title in entry if isinstance(entry, dict) else ():
            folder = {"Notebooks": "notebooks/", "Examples": "examples/"}.get(title)
            if folder:
                entry[title] = [page for page in pages().values() if page.startswith(folder)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for source, target in pages().items():
        if source == "README.md":
            continue
        text = _content(ROOT / source)
        files.append(File.generated(config, target, content=_relinked(text, source, target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that lead out of ``docs/`` into links to the pages of those files."""
    if page.file.generated_by is not None:
        return markdown  # has been done
    return _relinked(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def _relinked(text: str, source: str, target: str) -> str:
    """Replace links to files of the repository.

    Args:
        text: Markdown.
        source: the file that it comes from, in the repository; links are relative to it.
        target: its page, in the site.
    """
    known = pages()

    def replaced(match: re.Match[str]) -> str:
        path = match[2]
        if "://" in path or path.startswith(("mailto:", "data:", "/")):
            return match[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        page = known.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else None)
        if page is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(page, posixpath.dirname(target) or '.')}{match[3] or ''}{match[4]}"

    return _LINK.sub(replaced, text)


def _content(path: Path) -> str:
    if path.suffix == ".ipynb":
        return notebook_markdown(path)
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        about = ast.get_docstring(ast.parse(text)) or ""
        return f"# {path.name}\n\n{about.partition(chr(10))[0]}\n\n{_fenced(text, 'python')}\n"
    return text


# ---------------------------------------------------------------------------------------------------------- notebooks


def notebook_markdown(path: Path) -> str:
    """Return a notebook as Markdown, with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code" and cell.source.strip():
            parts.append(_fenced(cell.source, _language(cell.source)))
            parts += [shown for output in cell.outputs if (shown := _output(output))]
    note = f"*This page is the notebook `notebooks/{path.name}`; download it from the repository to run it.*"
    heading, _, rest = "\n\n".join(parts).partition("\n")
    return f"{heading}\n\n{note}\n{rest}\n"


def _language(source: str) -> str:
    return "text" if source.lstrip().startswith("%%") else "ipython"


def _output(output: Any) -> str:
    if output.output_type == "stream":
        inner = _fenced(_shortened(output.text), "text")
    elif output.output_type == "error":
        inner = _fenced(_shortened("\n".join(output.traceback)), "text")
    else:
        inner = _shown(output.data)
    return f'<div class="nb-output" markdown="block">\n\n{inner}\n\n</div>' if inner else ""


def _shown(data: dict[str, Any]) -> str:
    """Choose the richest form that a page can show."""
    if "text/html" in data:
        # One line: a blank line would end the block of HTML.
        return "<div>" + re.sub(r"\s*\n\s*", " ", _joined(data["text/html"]).strip()) + "</div>"
    if "image/svg+xml" in data:
        return "<div>" + re.sub(r"\s*\n\s*", " ", _joined(data["image/svg+xml"]).strip()) + "</div>"
    for kind in ("image/png", "image/jpeg"):
        if kind in data:
            alt = _joined(data.get("text/plain", "picture")).strip().partition("\n")[0]
            image = _joined(data[kind]).replace("\n", "")
            return f'<img alt="{_escaped(alt)}" src="data:{kind};base64,{image}">'
    if "text/markdown" in data:
        return _joined(data["text/markdown"])
    text = _shortened(_joined(data.get("text/plain", "")))
    return _fenced(text, "text") if text.strip() else ""


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def _shortened(text: str) -> str:
    text = _ANSI.sub("", text).rstrip("\n")
    return text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]}\n… {len(text) - _TEXT_LIMIT:,} more characters"


def _fenced(text: str, language: str) -> str:
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
