"""The documentation names what exists: links, anchors, commands, magics, names, settings; and the site's navigation has every page.

That the code on the pages runs is tested in end_to_end/test_docs_code.py; that the site can be built, by .ci/run.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import rlm_kernel
from rlm_kernel.cli import build_parser
from rlm_kernel.clients.specs import PROVIDERS, parse_spec
from rlm_kernel.jupyter.magics import COMMANDS
from rlm_kernel.jupyter.magics.rlm import cell_parser
from rlm_kernel.session.config import SETTINGS, Settings
from rlm_kernel.session.helpers import HELPER_NAMES
from rlm_kernel.session.observation import CHILDREN, FINAL_LIMIT, SCHEMA, VARIABLES, observe
from rlm_kernel.session.rundir import MAX_TOTAL_BYTES
from rlm_kernel.session.session import RLMSession
from rlm_kernel.values import ChildState
from tests.generated_docs import filled

CHECKOUT = Path(__file__).resolve().parents[1]
DOCS = CHECKOUT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md"))
TEXTS = [*PAGES, CHECKOUT / "README.md", CHECKOUT / "CHANGELOG.md", CHECKOUT / "examples" / "README.md"]
SITE = (CHECKOUT / "mkdocs.yml").read_text("utf-8")
REFERENCE = "\n".join(path.read_text("utf-8") for path in PAGES if path.parent.name == "reference")


def named(path: Path) -> str:
    return path.relative_to(CHECKOUT).as_posix()


def without_code(text: str) -> str:
    return re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, and, in the reference, those of the names that are shown there."""
    text = path.read_text("utf-8")
    headings = re.findall(r"^#+ (.*)$", without_code(text), re.MULTILINE)
    plain = [re.sub(r"\]\([^)]*\)|[`\[\]]", "", heading).lower() for heading in headings]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip()) for heading in plain} | set(
        re.findall(r"^::: (\S+)", text, re.MULTILINE)
    )


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}(?: [^\n]*)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


# ------------------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("path", TEXTS, ids=named)
def test_every_link_leads_to_a_file_and_an_anchor_that_exist(path: Path) -> None:
    text = without_code(path.read_text("utf-8"))
    links = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r"(?:src|href)=\"([^\"]+)\"", text)]
    for link in links:
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert target.is_relative_to(CHECKOUT), link
        if anchor:
            assert anchor in anchors(target), f"{link}: {sorted(anchors(target))}"


def test_a_link_that_leads_nowhere_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One heading\n\n## `%rlm close`, and more\n\n```sh\n# a comment\n```\n")
    assert anchors(page) == {"one-heading", "rlm-close-and-more"}


def test_the_navigation_has_every_page_once() -> None:
    listed = re.findall(r"[\w/-]+\.md", SITE.partition("\nnav:\n")[2].replace("CHANGELOG.md", ""))
    assert len(listed) == len(set(listed))
    made = {"changelog.md"}  # of files outside docs/, by the hook
    assert set(listed) - made == {path.relative_to(DOCS).as_posix() for path in PAGES}


def test_the_site_loads_nothing_from_elsewhere() -> None:
    """The fonts, scripts and styles of the pages are their own."""
    assert "\n  font: false" in SITE
    assert re.findall(r"https?://", re.sub(r"#.*", "", SITE)) == []
    assert [named(path) for path in PAGES if re.search(r"<script|src=\"?https?:", path.read_text("utf-8"))] == []


# ---------------------------------------------------------------------------------------------------------- reference


def shown_in_reference() -> set[str]:
    return set(re.findall(r"^::: (\S+)", REFERENCE, re.MULTILINE))


def test_every_public_name_is_in_the_reference_once() -> None:
    names = re.findall(r"^::: rlm_kernel\.(\w+)$", REFERENCE, re.MULTILINE)
    assert sorted(names) == sorted(set(rlm_kernel.__all__) - {"__version__"})
    assert "`rlm_kernel.__version__`" in REFERENCE


def test_every_helper_is_in_the_reference() -> None:
    shown = {path.rpartition(".")[2] for path in shown_in_reference()}
    assert set(HELPER_NAMES) <= shown
    helpers = (DOCS / "reference" / "helpers.md").read_text("utf-8")
    assert "`context`" in helpers
    assert "`answer`" in helpers


def test_what_the_reference_shows_exists_and_is_described() -> None:
    """Each name, and each public method and property of a class, has a docstring."""
    bare = []
    for path in shown_in_reference():
        parts = path.split(".")
        found: Any = rlm_kernel
        for at, part in enumerate(parts[1:], 2):
            found = getattr(found, part, None) or importlib.import_module(".".join(parts[:at]))
        if not (inspect.isclass(found) or inspect.isroutine(found)):
            continue  # a text: its description stands below its definition
        bare += [] if inspect.getdoc(found) else [path]
        if inspect.isclass(found):
            members = {n: v for n, v in vars(found).items() if not n.startswith("_") and not n.startswith("model_")}
            bare += [
                f"{path}.{name}"
                for name, value in members.items()
                if isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value)
                if not inspect.getdoc(getattr(value, "__func__", value))
            ]
    assert bare == []


@pytest.mark.parametrize("name", ["cli", "errors", "magics", "settings"])
def test_what_follows_from_the_program_is_as_the_program_has_it(name: str) -> None:
    """Settings, commands with their options, magics and the tree of errors. Spaces, and how argparse joins options, differ by version."""
    page = (DOCS / "reference" / f"{name}.md").read_text("utf-8")
    assert "<!-- generated: " in page

    def comparable(text: str) -> str:
        return re.sub(r"(-\w) (\w+), (--[\w-]+) \2", r"\1, \3 \2", " ".join(text.split()))

    assert comparable(page) == comparable(filled(page)), "python -m tests.generated_docs writes it"


def test_the_states_are_all_there() -> None:
    text = (DOCS / "tutorial.md").read_text("utf-8")
    assert [state for state in ChildState if f"`{state}`" not in text] == []


def test_the_state_that_harnesses_see_is_described_key_by_key() -> None:
    page = (DOCS / "reference" / "messages.md").read_text("utf-8")
    session = RLMSession(Settings(environ={}), {})
    try:
        seen = observe(session)
    finally:
        assert session.shutdown().ok
    for key in seen:
        assert f"`{key}`" in page, key
    assert f"| `schema` | {SCHEMA}." in page
    assert f"cut at {FINAL_LIMIT:,} characters" in page
    assert f"the newest {VARIABLES} of them" in page
    assert f"at most {CHILDREN}, in start order" in page


# ------------------------------------------------------------------------------------------------ what the pages name


@pytest.mark.parametrize("path", TEXTS, ids=named)
def test_every_command_of_ours_is_understood(path: Path) -> None:
    text = path.read_text("utf-8")
    lines = [line for block in fenced(text, "sh") for line in block.splitlines()]
    words = [shlex.split(part, comments=True) for line in lines for part in line.split("&&")]
    words += [shlex.split(span) for span in re.findall(r"`((?:rlm-kernel|jupyter rlm) [^`…]+)`", without_code(text))]
    for command in words:
        if command[:2] == ["jupyter", "rlm"]:
            command = command[1:]
        elif command[:1] != ["rlm-kernel"]:
            continue
        command = [word.partition("|")[0] for word in command]  # `rlm-kernel runs list|show`
        if command[-1] == "--help" or len(command) == 2 or command[1:] == ["runs", "show"]:  # the name alone
            assert f" {command[1]} " in build_parser().format_help(), command
        else:
            assert build_parser().parse_args(command[1:]).command, command


@pytest.mark.parametrize("path", TEXTS, ids=named)
def test_magics_settings_variables_models_and_helpers_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    assert set(re.findall(r"%rlm ([a-z]+)", text)) <= set(COMMANDS)
    assert set(re.findall(r"%rlm config ([a-z_]+)=", text)) <= set(SETTINGS)
    assert set(re.findall(r"c\.RLM\.([a-z]\w*)", text)) <= set(SETTINGS)
    options = {name for action in cell_parser()._actions for name in action.option_strings}
    for line in re.findall(r"^%%rlm (.*)$", text, re.MULTILINE):
        assert set(re.findall(r"--[a-z-]+", line)) <= options, line
    variables = {setting.env for setting in SETTINGS.values() if setting.env} | {"RLM_KERNEL_NURSERY"}
    assert set(re.findall(r"\bRLM_[A-Z_]+\b", without_prompts(text))) <= variables
    for model in re.findall(r"(?:%rlm model|--model|RLM_MODEL=) ?([a-z]+/\S+?)[`\s]", text):
        parse_spec(model)
    assert set(re.findall(r"`([a-z]+)/…", text)) <= {*PROVIDERS, "litellm"}
    helpers = {*HELPER_NAMES, "rlm_kernel"}
    assert (
        set(re.findall(r"\b(?:rlm|llm)_(?:query|status|wait|result|as|cancel|send|share)\w*(?=[(`])", text)) <= helpers
    )


def without_prompts(text: str) -> str:
    return re.sub(r"RLM_SYSTEM_PROMPT\w*", "", text)


def test_every_provider_with_its_key_or_address_is_on_the_page_about_models() -> None:
    page = (DOCS / "how-to" / "models.md").read_text("utf-8")
    for name, provider in PROVIDERS.items():
        assert f"`{name}/…`" in page, name
        if provider.needs_key:
            assert f"`{name}/…` | `{provider.key_variables[0]}`" in page, name
        else:
            address = provider.base_url.removesuffix("/v1")
            assert f"| `{name}/…` | `{address}` | `{provider.url_variable}` |" in page, name


def test_defaults_that_are_told_in_prose_are_so() -> None:
    values = Settings(environ={}).items()
    limits = (DOCS / "how-to" / "nesting-and-limits.md").read_text("utf-8")
    for name in ("max_children_total", "max_concurrent_children", "max_iterations", "per_child_timeout_s"):
        assert f"`{name}` ({values[name]:g})" in limits, name
    stopping = (DOCS / "how-to" / "stopping.md").read_text("utf-8")
    for name in ("shutdown_grace_s", "terminate_grace_s"):
        assert f"`{name}` ({values[name]:g} s)" in stopping, name
    inspect_page = (DOCS / "how-to" / "inspect-and-export.md").read_text("utf-8")
    assert f"Beyond {values['keep_runs']} episodes (`keep_runs`) or {MAX_TOTAL_BYTES >> 30} GiB" in inspect_page
    assert f"every `keep_alive_s` ({values['keep_alive_s']:g}) seconds" in (DOCS / "how-to" / "servers.md").read_text(
        "utf-8"
    )
