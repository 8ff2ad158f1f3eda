"""The Tab key offers what may stand at that place of a line of ``%rlm`` or ``%%rlm``, and touches nothing before the word."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.completer import CompletionContext, provisionalcompleter

from rlm_kernel.clients.specs import KNOWN_PROVIDERS
from rlm_kernel.environment.interpreter import make_shell
from rlm_kernel.jupyter.magics import COMMANDS, RLMMagics
from rlm_kernel.jupyter.magics.completion import RLMCompleter
from rlm_kernel.session.config import SETTINGS, Settings
from rlm_kernel.session.session import RLMSession
from rlm_kernel.values import ChildState, ChildStatus


@pytest.fixture(scope="module")
def shell() -> Iterator[Any]:
    """A shell with the magics and one session, which has no child of its own."""
    shell: Any = make_shell()
    shell.user_ns.clear()
    shell.init_user_ns()
    session = RLMSession(Settings(environ={}), shell.user_ns)
    shell.register_magics(RLMMagics(shell, session))
    completer = RLMCompleter(shell, session)
    completer.register()
    shell.rlm_session = session
    yield shell
    completer.unregister()
    assert shell.Completer.custom_matchers == []
    assert session.shutdown().ok


def child(number: int, state: ChildState, name: str = "", model: str | None = None) -> ChildStatus:
    return ChildStatus(f"c{number}", name or f"c{number}", 1, None, state, model=model)


@pytest.fixture
def children(shell, monkeypatch) -> None:
    """Children as a session would tell of them."""
    there = [
        child(1, ChildState.COMPLETED, "planner", "openai/gpt-x"),
        child(2, ChildState.RUNNING, "two words", "gpt-y"),
        child(3, ChildState.WAITING, "reader"),
        child(10, ChildState.QUEUED, "twin"),
        child(11, ChildState.FAILED, "twin"),
        child(12, ChildState.FAILED, "{brace}"),
    ]
    monkeypatch.setattr(shell.rlm_session.supervisor, "status", lambda refs=None: there)


def tab(shell: Any, text: str, after: str = "") -> tuple[str, list[str]]:
    """Press the key. Returns what has been typed of the word, and the texts that may take its place."""
    with provisionalcompleter():
        found = list(shell.Completer.completions(text + after, len(text)))
    typed = {text[c.start : c.end] for c in found}
    assert len(typed) <= 1
    assert all(c.end == len(text) for c in found)
    line = (text + after)[text.rfind("\n") + 1 :].partition("\n")[0]
    column = len(text) - text.rfind("\n") - 1
    if not text.startswith("%%") and all(c._origin == "rlm" for c in found):
        with pytest.warns(PendingDeprecationWarning):  # the older interface, without Jedi
            assert [c.text for c in found] == list(shell.complete("", line, column)[1])
    return typed.pop() if typed else "", [c.text for c in found]


def offered(shell: Any, text: str) -> list[str]:
    return tab(shell, text)[1]


def test_sub_commands(shell) -> None:
    assert offered(shell, "%rlm ") == list(COMMANDS)
    assert tab(shell, "%rlm st") == ("st", ["status"])
    assert tab(shell, "table = %rlm st") == ("st", ["status"])
    assert tab(shell, "if x:\n    %rlm st", "\n    y") == ("st", ["status"])
    assert offered(shell, "%rlm help canc") == ["cancel"]


def test_the_magic_without_its_percent_sign_where_ipython_takes_it(shell, monkeypatch) -> None:
    assert offered(shell, "rlm st") == ["status"]
    ours = RLMCompleter(shell, shell.rlm_session)
    monkeypatch.setitem(shell.user_ns, "rlm", 1)
    assert ours.complete("rlm st", 0, 6) == ("", [])
    monkeypatch.delitem(shell.user_ns, "rlm")
    monkeypatch.setattr(shell, "automagic", False)
    assert ours.complete("rlm st", 0, 6) == ("", [])


def test_options_that_were_not_given_yet(shell) -> None:
    assert tab(shell, "%rlm status --") == ("--", ["--live", "--all", "--help"])
    assert offered(shell, "%rlm status --live --") == ["--all", "--help"]
    assert offered(shell, "%rlm cleanup --ab") == ["--abandon"]
    assert offered(shell, "%rlm export c1 out.ipynb --f") == ["--force"]


@pytest.mark.usefixtures("children")
@pytest.mark.parametrize("command", ["status", "logs", "export", "tree", "timeline", "cancel", "send"])
def test_children_by_id_and_name_those_that_live_first(shell, command) -> None:
    """A name that two have is no name, and one that would need quotes is not offered; who has ended cannot be stopped or told anything."""
    texts = offered(shell, f"%rlm {command} ")
    living, ended = ["c2", "c3", "reader", "c10"], ["c1", "planner", "c11", "c12"]
    expected = living if command in ("cancel", "send") else living + ended
    assert [text for text in texts if not text.startswith("--") and text != "root"] == expected
    assert ("root" in texts) is (command == "export")
    assert tab(shell, f"%rlm {command} rea") == ("rea", ["reader"])


@pytest.mark.usefixtures("children")
def test_a_child_that_was_named_is_not_offered_again(shell) -> None:
    assert offered(shell, "%rlm cancel reader c") == ["c2", "c10"]
    assert offered(shell, "%rlm cancel c3 --grace 1 c") == ["c2", "c10"]


@pytest.mark.usefixtures("children")
def test_the_state_of_a_child_is_its_kind(shell) -> None:
    with provisionalcompleter():
        kinds = {c.text: c.type for c in shell.Completer.completions("%rlm status ", 12)}
    assert (kinds["c2"], kinds["reader"], kinds["planner"]) == ("running", "waiting", "completed")


def test_settings_and_their_values(shell, monkeypatch) -> None:
    assert offered(shell, "%rlm config ") == [f"{name}=" for name in SETTINGS]
    assert tab(shell, "%rlm config limits_locked=") == ("", ["true", "false"])
    assert tab(shell, "%rlm config limits_locked = t") == ("t", ["true"])
    assert offered(shell, "%rlm config max_depth=") == ["2"]
    assert "none" in offered(shell, "%rlm config max_total_tokens=")
    assert offered(shell, "%rlm config model=openr") == ["openrouter/"]
    monkeypatch.setitem(shell.user_ns, "make_client", lambda: None)
    assert offered(shell, "%rlm config client_factory=make") == ["make_client"]


@pytest.mark.usefixtures("children")
def test_models(shell, monkeypatch) -> None:
    """What a spec begins with, the configured one, and those that this session has used."""
    texts = offered(shell, "%rlm model ")
    assert {f"{name}/" for name in KNOWN_PROVIDERS if name != "demo"} | {"demo", "openai/gpt-x"} == set(texts)
    assert texts[0] == "openai/gpt-x"
    assert tab(shell, "%rlm model openai/g") == ("openai/g", ["openai/gpt-x"])
    assert "gpt-y" in offered(shell, "%%rlm --model ")
    monkeypatch.setitem(shell.rlm_session.settings._values, "model", "ollama/tiny")
    assert offered(shell, "%rlm model oll") == ["ollama/tiny", "ollama/"]


def test_the_first_line_of_a_cell_for_the_model(shell, monkeypatch) -> None:
    monkeypatch.setitem(shell.user_ns, "report", "a long text")
    texts = offered(shell, "%%rlm --")
    assert {"--context", "--model", "--max-iterations", "--background", "--into"} <= set(texts)
    assert tab(shell, "%%rlm --context rep", "\nWhat?") == ("rep", ["report"])
    assert tab(shell, "%%rlm --context=rep") == ("rep", ["report"])
    assert tab(shell, "%%rlm --background --into rep") == ("rep", ["report"])
    assert "rlm_query" not in offered(shell, "%%rlm --context ")
    assert "--context" not in offered(shell, "%%rlm --context report --")
    assert offered(shell, "%%rlm --max-iterations ") == ["30"]


def test_nothing_is_ours_in_a_task_in_a_message_in_a_files_name_or_in_python(shell) -> None:
    ours = RLMCompleter(shell, shell.rlm_session)
    for text in (
        "%%rlm\nrlm ",
        "%%rlm\n%rlm ",
        "%%rlm\n--",
        "x = 1\n%%rlm --",
        "%rlm send c1 ",
        "%rlm send c1 --",
        "%rlm export c1 ",
        "%rlm nonsense ",
        "%rlm config nonsense=",
        "%rlm",
        "print('%rlm st",
        "%rlmx ",
        "",
    ):
        lines = text.split("\n")
        assert ours.complete(text, len(lines) - 1, len(lines[-1])) == ("", []), text


def test_it_never_raises(shell, monkeypatch, capsys) -> None:
    def broken(refs: object = None) -> list[ChildStatus]:
        raise RuntimeError("broken")

    monkeypatch.setattr(shell.rlm_session.supervisor, "status", broken)
    ours = RLMCompleter(shell, shell.rlm_session)
    for text in ("%rlm status ", "%rlm model ", "%rlm cancel --grace 1 ", "%%rlm --model "):
        context = CompletionContext(token="", full_text=text, cursor_position=len(text), cursor_line=0, limit=None)
        assert ours.match(context)["completions"] == []
    assert capsys.readouterr() == ("", "")


def test_no_model_server_is_asked(shell, monkeypatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a completion has opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for text in ("%rlm model ollama/", "%%rlm --model vllm/", "%rlm config model="):
        assert offered(shell, text)
