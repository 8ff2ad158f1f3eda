"""README.md says what is so: its two commands, which come first, its extras, its models, and the order of its tour.

What holds for all pages (links, commands, magics, names) is in test_docs.py.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from rlm_kernel.cli import build_parser
from rlm_kernel.clients.specs import PROVIDERS, parse_spec

CHECKOUT = Path(__file__).resolve().parents[1]
README = (CHECKOUT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [shlex.split(part) for line in lines for part in line.split("&&")]


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


def test_every_model_and_provider_is_known():
    models = re.findall(r"(?:%rlm model|--model) ([a-z]\S*)", README)
    assert "demo" in models
    assert len(models) > 2
    for model in models:
        parse_spec(model)
    assert set(re.findall(r"\b([a-z]+)/…", README)) <= set(PROVIDERS)


def test_the_tour_begins_with_a_model_and_collects_a_child():
    """Whoever types what stands there has a child's answer after five cells. That they run: end_to_end/test_docs_code.py."""
    cells = "".join(blocks("python")[:4])
    assert cells.startswith("%rlm model demo\n")
    assert (
        cells.index("blocking=False")
        < cells.index("%rlm status")
        < cells.index("rlm_wait(h")
        < cells.index("rlm_result(h)")
    )
