"""README.md says what is so: its table of settings, its commands, and its tour."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlm_kernel.cli import build_parser
from rlm_kernel.clients.specs import PROVIDERS, parse_spec
from rlm_kernel.environment.interpreter import Interpreter, make_shell
from rlm_kernel.jupyter.magics import _HELP, RLMMagics
from rlm_kernel.session.config import SETTINGS, Settings
from rlm_kernel.session.helpers import HELPER_NAMES
from rlm_kernel.session.rundir import MAX_TOTAL_BYTES
from rlm_kernel.session.session import RLMSession

CHECKOUT = Path(__file__).resolve().parents[1]
README = (CHECKOUT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [shlex.split(part) for line in lines for part in line.split("&&")]


def settings_table() -> str:
    """Write the table of settings as it must stand in README."""
    defaults = Settings(environ={}).items()
    rows = [("Name", "Environment variable", "Default", "Meaning")]
    for name, setting in SETTINGS.items():
        variable = f"`{setting.env}`" if setting.env else ""
        rows.append((f"`{name}`", variable, shown(defaults[name]), setting.help))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def shown(value: Any) -> str:
    if value is None or value == ():
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_the_table_of_settings_is_that_of_the_code():
    """Every setting is there, in order, with its variable, its default and its meaning."""
    table = settings_table()
    assert f"\n\n{table}\n\n" in README, f"README.md needs this table:\n{table}"


def test_the_two_commands_are_there():
    assert commands()[:2] == [["pip", "install", "."], ["rlm-kernel", "demo"]]
    assert commands()[2:4] == [["pip", "install", ".[test]"], ["pytest"]]


def test_every_command_of_ours_is_understood():
    spans = [shlex.split(span) for span in re.findall(r"`(rlm-kernel [^`]+)`", README)]
    ours = [words for words in [*commands(), *spans] if words[0] == "rlm-kernel"]
    assert {words[1] for words in ours} >= {"demo", "run", "install"}
    for words in ours:
        if words[-1] == "--help":
            with pytest.raises(SystemExit) as exit_:
                build_parser().parse_args(words[1:])
            assert exit_.value.code == 0
        else:
            assert build_parser().parse_args(words[1:]).command


def test_the_extras_that_are_installed_exist():
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = set(re.findall(r'"\.\[(\w+)\]"', README))
    assert wanted
    assert wanted <= set(project["optional-dependencies"])
    assert project["requires-python"] == ">=3.11"
    assert "Python 3.11 to 3.13" in README


def test_every_magic_exists():
    named = set(re.findall(r"%rlm (\w+)", README))
    assert named
    assert named <= set(_HELP)
    assert set(re.findall(r"%rlm config (\w+)=", README)) <= {*SETTINGS, "NAME"}


def test_every_helper_exists():
    named = set(re.findall(r"\b(?:rlm|llm)_[a-z_]+(?=[(`])", README))
    assert named
    assert named <= {*HELPER_NAMES, "rlm_kernel"}


def test_every_model_and_provider_is_known():
    models = re.findall(r"(?:%rlm model|--model) ([a-z]\S*)", README)
    assert "demo" in models
    assert len(models) > 2
    for model in models:
        parse_spec(model)
    assert set(re.findall(r"\b([a-z]+)/…", README)) <= set(PROVIDERS)


def test_every_file_that_is_linked_exists():
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", README) if "://" not in target]
    assert targets
    assert [target for target in targets if not (CHECKOUT / target).exists()] == []


def test_what_is_said_about_files_is_so():
    assert f"Beyond {Settings(environ={})['keep_runs']} episodes" in README
    assert f"or {MAX_TOTAL_BYTES >> 30} GiB" in README


@pytest.fixture(scope="module")
def shell() -> Any:
    """A shell that has made its event loop, which it keeps, before anybody counts descriptors."""
    shell = make_shell()
    assert Interpreter(shell).execute("import asyncio; await asyncio.sleep(0)").success
    return shell


@pytest.fixture
def interpreter(shell: Any, tmp_path: Path) -> Iterator[Interpreter]:
    session = RLMSession(Settings({"model": "demo", "run_dir": str(tmp_path)}, environ={}), shell.user_ns)
    shell.register_magics(RLMMagics(shell, session))
    yield Interpreter(shell)
    shell.user_ns.clear()  # what was shared lives as long as its name
    assert session.shutdown().ok


def test_the_tour_runs(interpreter: Interpreter):
    """Its cells run one after the other with the demo model, and the children's answers are right."""
    cells = blocks("python")
    assert len(cells) > 3
    for cell in cells:
        result = interpreter.execute(cell)
        assert result.success, f"{cell}\n{result.stderr}"
    names = interpreter.namespace
    log = names["log"]
    assert names["rlm_result"](names["h"]) == f"'comet' occurs {log.count('comet')} times."
    assert [s.result for s in names["rlm_wait"](names["handles"])] == [
        f"'{word}' occurs {log.count(word)} times." for word in ("moon", "cloud")
    ]
    assert "".join(names["halves"]) == log
