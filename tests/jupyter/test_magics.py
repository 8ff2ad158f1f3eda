"""``%rlm`` parses, makes one call, and shows a view; a user's mistake is a `UsageError` of one line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from IPython.core.error import UsageError

from rlm_kernel.environment.interpreter import make_shell
from rlm_kernel.errors import ChildCleanupError
from rlm_kernel.jupyter.magics import RLMMagics
from rlm_kernel.session.config import Settings
from rlm_kernel.session.session import RLMSession
from rlm_kernel.values import CleanupReport


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
        ("nonsense", ["nonsense", "status"]),
        ("config max_depth=0", ["max_depth", "0"]),
        ("config max_depth=x", ["max_depth", "'x'"]),
        ("config nothing=1", ["nothing"]),
        ("config nothing", ["nothing"]),
        ("model nonsense", ["nonsense"]),
        ("status c9", ["c9"]),
        ("reset now", ["reset", "now"]),
        ("close now", ["close", "now"]),
        ("cleanup now", ["cleanup", "now"]),
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


def test_every_command_explains_itself(magics, capsys) -> None:
    for command in ("status", "model", "config", "reset", "close", "cleanup"):
        assert magics.rlm(f"{command} --help") is None
        assert command in capsys.readouterr().out


def test_config_shows_all_settings_or_one(magics) -> None:
    assert "max_depth" in repr(magics.rlm("config"))
    one = repr(magics.rlm("config max_depth"))
    assert "RLM_MAX_DEPTH" in one
    assert "kill_grace_s" not in one


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
