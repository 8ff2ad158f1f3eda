"""``%rlm`` parses, makes one call, and shows a view; a user's mistake is a `UsageError` of one line."""

from __future__ import annotations

import inspect
import os
import queue
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.oinspect import getdoc

from rlm_kernel.clients.scripted import ScriptedClient
from rlm_kernel.environment.interpreter import make_shell
from rlm_kernel.errors import ChildCleanupError
from rlm_kernel.jupyter.magics import COMMANDS, RLMMagics
from rlm_kernel.jupyter.magics.rlm import cell_parser
from rlm_kernel.jupyter.shell_session import is_rlm_line
from rlm_kernel.session.config import Settings
from rlm_kernel.session.handles import ChildHandle
from rlm_kernel.session.session import RLMSession
from rlm_kernel.values import ChildState, ChildStatus, CleanupReport

OF_THE_CONTRACT = {
    *("model", "config", "status", "tree", "timeline", "cost", "logs"),
    *("cancel", "send", "close", "reset", "cleanup", "export"),
}


class SessionWithoutNursery(RLMSession):
    prepared = 0

    def prepare(self) -> None:
        self.prepared += 1


@pytest.fixture
def session() -> Iterator[SessionWithoutNursery]:
    made = SessionWithoutNursery(Settings(environ={}), {})
    yield made
    made.shutdown()


@pytest.fixture
def magics(session: SessionWithoutNursery) -> RLMMagics:
    return RLMMagics(make_shell(), session)


def fail_once(session: RLMSession, monkeypatch) -> None:
    """Let the next stop report a survivor."""
    real = session.supervisor.stop
    left = [CleanupReport("stop", survivors=(4194000,))]
    monkeypatch.setattr(session.supervisor, "stop", lambda *args: left.pop() if left else real(*args))


def test_without_a_model_the_summary_says_what_to_type(magics) -> None:
    assert "%rlm model " in repr(magics.rlm(""))


def test_the_summary_shows_model_episode_and_answer(magics, session) -> None:
    magics.rlm("model demo")
    session.finalization.begin_cell()
    session.finalization.FINAL("the answer")
    session.finalization.end_cell(success=True)
    text = repr(magics.rlm(""))
    for word in ("demo", session.episode_id, "the answer"):
        assert word in text


def test_naming_a_model_prepares_the_nursery_and_shows_the_model(magics, session, capsys) -> None:
    magics.rlm("model openai/test")
    assert session.prepared == 1
    assert capsys.readouterr().out == "model: openai/test\n"
    magics.rlm("model")
    assert session.prepared == 1
    assert capsys.readouterr().out == "model: openai/test\n"


def test_the_demo_model_is_said_to_be_a_stand_in(magics, capsys) -> None:
    magics.rlm("model demo")
    assert "stand-in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", ["nonsense", "status", "%%rlm"]),
        ("stauts", ["'stauts'", "did you mean `%rlm status`"]),
        ("help stauts", ["did you mean `%rlm status`"]),
        ("status --lvie", ["--lvie", "did you mean --live"]),
        ("status --liv", ["--liv"]),
        ("status 'c1", ["status", "quotation"]),
        ("cost c1", ["cost", "'c1'"]),
        ("cancel", ["ID", "%rlm cancel [--grace S] ID"]),
        ("cancel c1", ["'c1'", "none has been started"]),
        ("cancel c1 --grace soon", ["--grace", "'soon'", "seconds"]),
        ("cancel c1 --grace=-1", ["--grace", "'-1'", "seconds"]),
        ("cancel c1 --grace=nan", ["--grace", "'nan'", "seconds"]),
        ("send", ["ID", "TEXT"]),
        ("send c1", ["TEXT", "%rlm send ID TEXT"]),
        ("logs", ["ID"]),
        ("logs c1 --lines 0", ["--lines", "'0'"]),
        ("tree c1", ["'c1'"]),
        ("timeline c1", ["'c1'"]),
        ("export", ["ID", "OUT"]),
        ("export c1", ["OUT"]),
        ("export c1 a b", ["'b'"]),
        ("model demo demo", ["demo"]),
        ("config max_depth=0", ["max_depth", "0"]),
        ("config max_depth=x", ["max_depth", "'x'"]),
        ("config nothing=1", ["nothing"]),
        ("config nothing", ["nothing"]),
        ("model nonsense", ["nonsense"]),
        ("status c9", ["c9"]),
        ("reset now", ["reset", "now"]),
        ("close now", ["close", "now"]),
        ("cleanup now", ["cleanup", "now"]),
        ("cleanup --aba", ["--aba", "did you mean --abandon"]),
    ],
)
def test_a_mistake_is_a_usage_error_of_one_line_and_changes_nothing(magics, session, line, words) -> None:
    before = session.settings.items()
    with pytest.raises(UsageError) as caught:
        magics.rlm(line)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert session.settings.items() == before


@pytest.mark.parametrize("command", list(COMMANDS))
@pytest.mark.parametrize("line", ["{} --help", "{} -h", "help {}", "help %{}"])
def test_every_command_explains_itself_with_all_its_arguments(magics, capsys, command, line) -> None:
    assert magics.rlm(line.format(command)) is None
    shown = capsys.readouterr().out
    assert shown.startswith(f"%rlm {command}")
    for name in arguments(COMMANDS[command].parser):
        assert name in shown


@pytest.mark.parametrize("line", ["help", "--help", "-h"])
def test_the_overview_names_every_command_and_every_option_of_both_magics(magics, capsys, line) -> None:
    assert magics.rlm(line) is None
    shown = capsys.readouterr().out
    assert set(COMMANDS) >= OF_THE_CONTRACT
    parsers = {f"%rlm {name}": command.parser for name, command in COMMANDS.items()} | {"%%rlm": cell_parser()}
    for magic, parser in parsers.items():
        assert f"\n{magic}" in shown
        for name in arguments(parser):
            assert name in shown
    assert inspect.cleandoc(shown) == getdoc(magics.rlm)  # what `%rlm?` shows


def arguments(parser: ArgumentParser) -> list[str]:
    """Return what can be given: options by name, other arguments by the word that stands for them."""
    return [name for action in parser._actions for name in action.option_strings or [str(action.metavar)]]


def test_config_shows_all_settings_or_one(magics) -> None:
    assert "max_depth" in repr(magics.rlm("config"))
    one = repr(magics.rlm("config max_depth"))
    assert "RLM_MAX_DEPTH" in one
    assert "kill_grace_s" not in one


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("/tmp/my runs", "/tmp/my runs"),
        ("/tmp/it's=there", "/tmp/it's=there"),
        ("'/tmp/my runs'", "/tmp/my runs"),
        ('"a" and "b"', '"a" and "b"'),
        ("--help", "--help"),
    ],
)
def test_a_value_is_the_rest_of_the_line_with_spaces_and_quotes(magics, session, typed, value) -> None:
    """Only quotes around the whole are taken off, which people type out of habit."""
    magics.rlm(f"config run_dir = {typed} ")
    assert session.settings["run_dir"] == value


def test_python_is_expanded_in_a_line_as_ipython_does_it(magics, session) -> None:
    magics.shell.user_ns["limit"] = 7
    magics.shell.register_magics(magics)
    magics.shell.run_line_magic("rlm", "config max_depth={limit - 3}")
    assert session.settings["max_depth"] == 4
    magics.shell.run_line_magic("rlm", "config max_depth=$limit")
    assert session.settings["max_depth"] == 7


def test_an_error_that_is_nobodys_typing_is_no_usage_error(magics, session, monkeypatch) -> None:
    fail_once(session, monkeypatch)
    magics.rlm("close")
    with pytest.raises(ChildCleanupError):
        session.check_may_run()
    monkeypatch.setattr(session.supervisor, "stop", lambda *args: CleanupReport("stop", survivors=(4194000,)))
    with pytest.raises(ChildCleanupError):
        magics.rlm("cleanup")
    monkeypatch.undo()


def test_graces_that_outlast_a_server_are_set_with_a_note(magics, session, capsys) -> None:
    magics.rlm("config kill_grace_s = 5")
    assert session.settings["kill_grace_s"] == 5.0
    assert "note:" in capsys.readouterr().out


def test_reset_begins_a_new_episode(magics, session, capsys) -> None:
    before = session.episode_id
    session.namespace["mine"] = 1
    magics.rlm("reset")
    assert session.episode_id != before
    assert session.namespace["mine"] == 1
    assert session.episode_id in capsys.readouterr().out


def test_a_reset_that_cannot_confirm_raises_and_keeps_the_episode(magics, session, capsys, monkeypatch) -> None:
    before = session.episode_id
    fail_once(session, monkeypatch)
    with pytest.raises(ChildCleanupError):
        magics.rlm("reset")
    assert session.episode_id == before
    assert "new episode" not in capsys.readouterr().out


def test_close_raises_nothing_and_reports_a_failure(magics, session, capsys, monkeypatch) -> None:
    fail_once(session, monkeypatch)
    magics.rlm("close")
    assert "4194000" in capsys.readouterr().out
    assert session.cleanup_failure is not None


def test_cleanup_confirms_and_unlocks(magics, session, monkeypatch) -> None:
    fail_once(session, monkeypatch)
    magics.rlm("close")
    magics.rlm("cleanup")
    assert session.cleanup_failure is None


def test_abandon_names_what_it_leaves_and_unlocks(magics, session, capsys, monkeypatch) -> None:
    fail_once(session, monkeypatch)
    magics.rlm("close")
    capsys.readouterr()
    magics.rlm("cleanup --abandon")
    assert "4194000" in capsys.readouterr().out
    assert session.cleanup_failure is None
    magics.rlm("cleanup --abandon")
    assert "nothing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cell", "only_lines"),
    [
        ("%rlm cleanup", True),
        ("%rlm?", True),
        ("%%rlm?", False),
        ("\n%rlm cleanup\n\n%rlm status", True),
        ("%%rlm\nWhat is this about?", False),
        ("%%rlm --background\n%rlm status", False),
        ("%rlm cleanup\nx = 1", False),
        ("%rlmx", False),
    ],
)
def test_lines_of_rlm_run_while_a_cleanup_has_failed_and_a_task_for_the_model_does_not(cell, only_lines) -> None:
    assert is_rlm_line(cell) is only_lines


# -- with real children


SLEEP = "```repl\nimport time\ntime.sleep(60)\n```"
PRINT = "```repl\nprint('earlier\\nlater')\nFINAL('done')\n```"


class Family:
    """A session with children: ``quick`` has ended, ``planner`` and both ``twin`` sleep until they are stopped."""

    def __init__(self, run_dir: Path) -> None:
        self.session = RLMSession(Settings({"run_dir": str(run_dir)}, environ={}), {})
        factory = ScriptedClient.factory(SLEEP, rules={"quick": PRINT})
        self.session.configure_value("client_factory", factory)
        query = self.session.functions["rlm_query"]
        running: queue.Queue[str] = queue.Queue()
        with self.session.listening(lambda status: running.put(status.id) if status.pid else None):
            self.quick: ChildHandle = query("quick", blocking=False, name="quick")
            self.planner, self.twin, self.other_twin = (
                query("sleep", blocking=False, name=name) for name in ("planner", "twin", "twin")
            )
            seen: set[str] = set()
            while len(seen) < 4:
                seen.add(running.get(timeout=30))
        assert self.quick.wait(30).done
        self.magics: Any = RLMMagics(make_shell(), self.session)

    @property
    def states(self) -> list[str]:
        return [str(handle.status().state) for handle in (self.planner, self.twin, self.other_twin)]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    made = Family(tmp_path_factory.mktemp("runs"))
    yield made
    assert made.session.shutdown().ok


def mistake(family: Family, line: str) -> str:
    with pytest.raises(UsageError) as caught:
        family.magics.rlm(line)
    return str(caught.value)


def test_children_are_found_by_id_and_by_name(family) -> None:
    shown = repr(family.magics.rlm(f"status planner {family.twin.id} --live planner quick"))
    rows = [line.split()[0] for line in shown.splitlines()[2:]]
    assert rows == [family.planner.id, family.twin.id]


def test_an_ambiguous_name_is_said_to_be_one_and_nothing_is_stopped(family) -> None:
    message = mistake(family, "cancel planner twin")
    assert "2 children" in message
    assert f"{family.twin.id}, {family.other_twin.id}" in message
    assert family.states == ["running"] * 3


def test_an_unknown_child_gets_the_ones_that_exist_with_their_names(family) -> None:
    message = mistake(family, "cancel planer")
    assert "did you mean planner" in message
    assert f"{family.quick.id} (quick), {family.planner.id} (planner)" in message


def test_who_types_a_variable_is_told_the_id(family) -> None:
    family.session.namespace["h"] = family.planner
    assert family.planner.id in mistake(family, "logs h")


def test_a_message_is_the_rest_of_the_line_as_it_is(family, capsys) -> None:
    text = """it's "so" -- {or} $not  --help"""
    family.magics.rlm(f"send planner {text} ")
    assert capsys.readouterr().out.startswith(f"{family.planner.id}: message 1 sent")
    assert family.planner.status().messages_sent == 1
    family.magics.rlm("send 'planner' --")
    assert "message 2 sent" in capsys.readouterr().out
    assert "completed" in mistake(family, "send quick too late")


def test_what_is_sent_is_what_the_child_gets(family, monkeypatch) -> None:
    sent: list[str] = []

    def send(ref: object, text: str) -> ChildStatus:
        sent.append(text)
        return family.planner.status()

    monkeypatch.setattr(family.session.supervisor, "send", send)
    texts = ['it\'s "so" -- {or}  --help', "--", "-h now", "'a' 'b'"]
    for text in texts:
        family.magics.rlm(f"send planner   {text} ")
    assert sent == texts


def test_the_tree_below_a_child_is_shown(family) -> None:
    shown = repr(family.magics.rlm("tree planner"))
    assert "planner" in shown
    assert "twin" not in shown
    assert all(name in repr(family.magics.rlm("tree")) for name in ("quick", "planner", "twin"))


def test_the_timeline_and_the_cost_are_shown(family) -> None:
    assert "planner" in repr(family.magics.rlm("timeline"))
    only = repr(family.magics.rlm("timeline planner"))
    assert "planner" in only
    assert "quick" not in only
    assert repr(family.magics.rlm("cost"))


def test_what_a_child_printed_is_shown(family, capsys) -> None:
    family.magics.rlm("logs quick -n 2")
    shown = capsys.readouterr().out
    assert "later" in shown
    assert "earlier\n" not in shown


def test_a_run_is_exported_by_the_name_of_its_child(family, tmp_path, capsys) -> None:
    family.magics.rlm(f"export quick '{tmp_path / 'my run.jsonl'}'")
    assert family.quick.id in capsys.readouterr().out
    assert "FINAL" in (tmp_path / "my run.jsonl").read_text()


def test_many_children_are_shown_from_the_latest_on_and_live_ones_always(family, monkeypatch) -> None:
    monkeypatch.setattr("rlm_kernel.jupyter.magics.looking._SHOWN", 1)
    shown = repr(family.magics.rlm("status"))
    assert "quick" not in shown
    assert "planner" in shown
    assert "--all" in shown
    assert "quick" in repr(family.magics.rlm("status --all"))


def test_cancel_returns_when_the_processes_are_gone_and_says_what_ended(family, capsys) -> None:
    pids = [handle.status().pid for handle in (family.planner, family.twin)]
    family.magics.rlm(f"cancel planner {family.twin.id} quick --grace 0")
    shown = capsys.readouterr().out
    assert f"cancel: {family.planner.id}, {family.twin.id} stopped" in shown
    assert "asked 0, terminated 2" in shown  # no time was given to a cooperative stop
    assert f"{family.quick.id} had ended already: completed" in shown
    assert family.states == ["cancelled", "cancelled", "running"]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert family.quick.status().state is ChildState.COMPLETED


def test_a_child_of_an_earlier_episode_is_said_to_be_stale(family) -> None:
    family.magics.rlm("reset")
    assert "reset has ended" in mistake(family, f"cancel {family.planner.id}")
    assert "none has been started" in mistake(family, "cancel planner")
