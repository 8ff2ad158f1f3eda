"""The parts of the documentation that follow from the program: settings, commands, magics, the tree of errors.

    python -m tests.generated_docs          # write them into the pages

In a page such a part stands between ``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``. tests/test_docs.py holds the pages to it.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from rlm_kernel import errors
from rlm_kernel.cli import build_parser
from rlm_kernel.jupyter.magics.commands import explain
from rlm_kernel.jupyter.magics.rlm import COMMANDS, cell_parser
from rlm_kernel.session.config import SETTINGS, Settings

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"

_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
_COLUMNS = "100"


def parts() -> dict[str, str]:
    """Return the text of each part by its name."""
    return {
        "settings": settings_table(),
        "commands": "\n\n".join(f"{heading}\n\n{_fenced(text)}" for heading, text in command_help()),
        "magics": "\n\n".join(f"### `{name}`\n\n{_fenced(text)}" for name, text in magic_help()),
        "errors": _fenced(_error_tree()),
    }


def filled(page: str) -> str:
    """Return a page with its generated parts as they must be."""
    known = parts()
    return _PART.sub(lambda match: f"{match[1]}\n{known[match[2]]}\n\n{match[3]}", page)


def settings_table() -> str:
    """Return the table of settings."""
    defaults = Settings(environ={}).items()
    rows = [("Name", "Environment variable", "Default", "Meaning")]
    for name, setting in SETTINGS.items():
        variable = f"`{setting.env}`" if setting.env else ""
        rows.append((f"`{name}`", variable, _shown(defaults[name]), setting.help))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def command_help() -> Iterator[tuple[str, str]]:
    """Give the heading and the help of every command and sub-command."""
    with mock.patch.dict(os.environ, {"COLUMNS": _COLUMNS, "NO_COLOR": "1"}):
        for parser in _parsers(build_parser()):
            level = "##" if len(parser.prog.split()) < 3 else "###"
            yield f"{level} `{parser.prog}`", parser.format_help().rstrip()


def magic_help() -> Iterator[tuple[str, str]]:
    """Give the name and the explanation of every sub-command of the magic, and of the cell magic."""
    for name, command in COMMANDS.items():
        yield f"%rlm {name}", explain(command.parser, "%rlm")
    yield "%%rlm", explain(cell_parser(), "%%rlm")


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _parsers(below)


def _error_tree() -> str:
    return textwrap.dedent((inspect.getdoc(errors) or "").partition("::\n\n")[2])


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _fenced(text: str) -> str:
    return f"```text\n{text}\n```"


if __name__ == "__main__":
    for path in sorted(REFERENCE.glob("*.md")):
        text = path.read_text("utf-8")
        if filled(text) != text:
            path.write_text(filled(text), "utf-8")
            print(f"written: {path}")
