"""Promises of the verbs: `rlm_kernel.session.lifecycle` and `rlm_kernel.session.session`, with real children."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rlm_kernel.errors import (
    ChildCleanupError,
    ChildFailedError,
    EpisodeClosing,
    EpisodeFinalized,
    StaleHandleError,
)
from rlm_kernel.values import ChildState, CleanupReport, Graces
from tests.session.conftest import Root, block, final, held, task
from tests.support.model_server import ModelServer


def is_alive(pid: int | None) -> bool:
    try:
        os.kill(pid or 0, 0)
    except ProcessLookupError:
        return False
    return True


def start_held(root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch, count: int = 1) -> list[Any]:
    """Start children that wait for their model."""
    root.served(server, monkeypatch)
    handles = root.rlm_query_batched([held("FINAL('never')")] * count, blocking=False)
    server.wait_for_request(count=count)
    return list(handles)


# -- the verbs


@pytest.mark.parametrize("verb", ["close", "finalize", "cleanup", "reset"])
def test_every_verb_returns_when_every_child_has_exited(
    root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    handles = start_held(root, server, monkeypatch, 3)
    pids = [handle.status().pid for handle in handles]
    assert all(map(is_alive, pids))
    report = getattr(root.session, verb)()
    assert not any(map(is_alive, pids))
    assert (report.verb, report.ok, report.asked, report.killed) == (verb, True, 3, 0)
    assert sorted(report.stopped) == sorted(handle.id for handle in handles)


def test_a_close_keeps_handles_results_and_variables_and_allows_new_children(
    root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.scripted(final("kept"))
    done = root.rlm_query("p", blocking=False)
    done.wait(20)
    (live,) = start_held(root, server, monkeypatch)
    root.namespace["mine"] = 1
    episode = root.session.episode_id
    assert root.session.close().stopped == (live.id,)
    assert done.result() == "kept"
    assert (live.status().state, live.status().exited) == (ChildState.CANCELLED, True)
    with pytest.raises(ChildFailedError, match="cancelled"):
        live.result()
    assert (root.mine, root.session.episode_id) == (1, episode)
    assert root.rlm_query(task("FINAL('new')")) == "new"


def test_a_close_with_nothing_to_stop_does_nothing(root: Root) -> None:
    report = root.session.close()
    assert (report.stopped, report.ok, report.asked) == ((), True, 0)


def test_a_reset_begins_a_new_episode_and_keeps_the_users_variables(root: Root) -> None:
    root.scripted(final("x"))
    handle = root.rlm_query("p", blocking=False)
    handle.wait(20)
    root.namespace.update(mine=1, llm_query="rebound", context="old")
    root.say_final("old answer")
    before, answer, folder = root.session.episode_id, root.answer, root.session.run_folder
    assert root.session.reset().ok
    assert root.session.episode_id != before
    assert root.mine == 1
    assert callable(root.llm_query)
    assert root.context == ""
    assert root.answer == {"content": "", "ready": False}
    assert root.answer is not answer
    assert root.session.final_answer is None
    assert root.session.run_folder is None
    assert folder is not None
    assert json.loads((folder / "run.json").read_text())["ended"] is True
    with pytest.raises(StaleHandleError):
        handle.status()
    assert root.rlm_status() == []


def test_the_final_answer_stops_the_children_and_stays(
    root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (handle,) = start_held(root, server, monkeypatch)
    root.say_final(0)
    assert handle.status().state is ChildState.CANCELLED
    assert root.session.final_answer is not None
    assert root.session.final_answer.value == 0
    with pytest.raises(EpisodeFinalized):
        root.rlm_query("p", blocking=False)
    assert root.session.close().ok
    assert root.session.final_answer.value == 0


def test_a_wait_in_another_thread_ends_when_a_verb_stops_its_child(
    root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (handle,) = start_held(root, server, monkeypatch)
    statuses: list[Any] = []
    waiter = threading.Thread(target=lambda: statuses.append(handle.wait()))
    waiter.start()
    root.session.close()
    waiter.join(10)
    assert not waiter.is_alive()
    assert statuses[0].state is ChildState.CANCELLED


def test_code_that_swallows_the_request_is_stopped_all_the_same(
    root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.served(server, monkeypatch)
    root.session.configure("shutdown_grace_s", "0.1")
    root.session.configure("terminate_grace_s", "0.1")
    python = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    try:
        llm_query('[[block never]] stubborn')
    except BaseException:
        pass
"""
    handle = root.rlm_query(task(python), blocking=False)
    server.wait_for_request(lambda request: len(request.body["messages"]) == 1)
    report = root.session.close()
    assert (report.ok, report.killed, report.stopped) == (True, 1, (handle.id,))
    assert handle.status().exited


# -- side by side


def test_verbs_of_several_threads_all_return(root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    handles = start_held(root, server, monkeypatch, 2)
    verbs: list[Callable[[], CleanupReport]] = [
        root.session.close,
        root.session.reset,
        root.session.close,
        root.session.cleanup,
        root.session.reset,
        root.session.finalize,
    ]
    barrier = threading.Barrier(len(verbs))
    reports: list[CleanupReport] = []

    def run(verb: Callable[[], CleanupReport]) -> None:
        barrier.wait()
        reports.append(verb())

    threads = [threading.Thread(target=run, args=(verb,)) for verb in verbs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(report.verb for report in reports) == ["cleanup", "close", "close", "finalize", "reset", "reset"]
    assert all(report.ok for report in reports)
    assert sorted(i for report in reports for i in report.stopped) == sorted(h.id for h in handles)
    assert not root.session.lifecycle.busy
    assert root.rlm_query(task("FINAL('after')")) == "after"


def test_admission_is_shut_as_soon_as_a_verb_is_announced(root: Root) -> None:
    root.scripted(final("x"))
    root.session.lifecycle.begin()
    root.session.lifecycle.begin()
    assert root.session.lifecycle.busy
    with pytest.raises(EpisodeClosing, match="a stop is under way"):
        root.rlm_query("p", blocking=False)
    assert root.session.close(begun=True).ok
    with pytest.raises(EpisodeClosing):
        root.rlm_query("p")
    assert root.session.close(begun=True).ok
    assert root.rlm_query("p") == "x"


def test_a_verb_that_breaks_leaves_the_session_usable(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object) -> CleanupReport:
        raise RuntimeError("our bug")

    root.scripted(final("x"))
    with monkeypatch.context() as patch:
        patch.setattr(root.session.supervisor, "stop", broken)
        with pytest.raises(RuntimeError, match="our bug"):
            root.session.close()
    assert not root.session.lifecycle.busy
    assert root.rlm_query("p") == "x"


def test_each_verb_is_one_line_in_the_log(root: Root, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rlm_kernel.session.lifecycle"):
        root.session.close()
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["close"]
    assert "asked 0, terminated 0, killed 0" in caplog.text


# -- what cannot be confirmed


class Stops:
    """Stands in for ``supervisor.stop``: reports survivors as long as there are any, and notes the graces."""

    def __init__(self) -> None:
        self.survivors: tuple[int, ...] = (4_000_001, 4_000_002)
        self.graces: list[Graces] = []

    def __call__(self, verb: str, graces: Graces, refs: object = None) -> CleanupReport:
        self.graces.append(graces)
        return CleanupReport(verb, duration_s=2.0, survivors=self.survivors)


@pytest.fixture
def stops(root: Root, monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_in = Stops()
    with monkeypatch.context() as patch:
        patch.setattr(root.session.supervisor, "stop", stand_in)
        yield stand_in
    assert root.session.cleanup().ok


def test_survivors_block_the_session_with_an_error_that_says_what_to_do(root: Root, stops: Stops) -> None:
    root.scripted(final("x"))
    report = root.session.close()
    assert not report.ok
    for call in (
        root.session.check_may_run,
        lambda: root.rlm_query("p"),
        lambda: root.rlm_query("p", blocking=False),
        lambda: root.llm_query("p"),
    ):
        with pytest.raises(
            ChildCleanupError, match=r"pid 4000001, 4000002 .*%rlm cleanup.*%rlm cleanup --abandon"
        ) as raised:
            call()
        assert raised.value.survivors == (4_000_001, 4_000_002)
        assert raised.value.report == report
    assert root.session.cleanup_failure is not None
    assert root.rlm_status() == []


def test_a_reset_that_cannot_be_confirmed_is_no_reset(root: Root, stops: Stops) -> None:
    episode = root.session.episode_id
    assert not root.session.reset().ok
    assert root.session.episode_id == episode


def test_the_next_verb_begins_at_sigkill_and_one_that_confirms_unblocks(root: Root, stops: Stops) -> None:
    root.scripted(final("x"))
    root.session.close()
    root.session.reset()
    stops.survivors = ()
    assert root.session.cleanup().ok
    root.session.check_may_run()
    assert root.session.cleanup_failure is None
    root.session.close()
    usual = Graces()
    assert stops.graces == [usual, usual.from_kill(), usual.from_kill(), usual]
    assert root.rlm_query("p") == "x"


def test_survivors_that_are_abandoned_unblock_and_are_named_in_the_log(
    root: Root, stops: Stops, caplog: pytest.LogCaptureFixture
) -> None:
    root.scripted(final("x"))
    root.session.close()
    failure = root.session.lifecycle.abandon()
    assert failure is not None
    assert failure.survivors == (4_000_001, 4_000_002)
    assert "abandoned: pid 4000001, 4000002" in caplog.text
    root.session.check_may_run()
    assert root.rlm_query("p") == "x"
    assert root.session.lifecycle.abandon() is None


def test_what_was_abandoned_blocks_nothing_again_and_what_is_new_does(root: Root, stops: Stops) -> None:
    """Nobody loses their variables to one process that cannot be killed: they may go on, and reset."""
    stops.survivors = (4_000_003,)
    root.session.close()
    root.session.lifecycle.abandon()
    episode = root.session.episode_id
    assert root.session.close().ok
    assert root.session.reset().ok
    assert root.session.episode_id != episode
    assert root.session.lifecycle.run("shutdown", for_good=True).survivors == (4_000_003,)
    root.session.lifecycle._shut = False
    root.session.lifecycle.abandon()
    stops.survivors = (4_000_003, 4_000_004)
    assert root.session.close().survivors == (4_000_004,)
    with pytest.raises(ChildCleanupError, match="pid 4000004 "):
        root.session.check_may_run()


def test_the_final_answer_is_kept_when_the_children_cannot_be_confirmed(root: Root, stops: Stops) -> None:
    root.session.finalization.begin_cell()
    root.FINAL("kept")
    root.session.finalization.end_cell(success=True)
    assert not root.session.finalize().ok
    assert root.session.final_answer is not None
    assert root.session.final_answer.value == "kept"
    stops.survivors = ()
    assert root.session.cleanup().ok
    assert root.session.final_answer.value == "kept"


def test_survivors_are_written_down(root: Root, stops: Stops) -> None:
    root.scripted(final("x"))
    root.rlm_query("p")
    root.session.close()
    folder = root.session.run_folder
    assert folder is not None
    assert json.loads((folder / "run.json").read_text())["verbs"][-1]["survivors"] == [4_000_001, 4_000_002]


# -- the end


def test_a_shutdown_ends_children_nursery_and_threads_and_may_come_twice(
    own_root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (handle,) = start_held(own_root, server, monkeypatch)
    pids = [handle.status().pid, own_root.session.supervisor.nursery_pid]
    assert own_root.session.shutdown().stopped == (handle.id,)
    assert not any(map(is_alive, pids))
    assert own_root.session.supervisor.nursery_pid is None
    assert own_root.session.shutdown().ok
    assert handle.status().state is ChildState.CANCELLED
    with pytest.raises(EpisodeClosing):
        own_root.rlm_query("p", blocking=False)
    folder = own_root.session.run_folder
    assert folder is not None
    assert json.loads((folder / "run.json").read_text())["ended"] is True


def test_two_shutdowns_at_once_both_return(
    own_root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_held(own_root, server, monkeypatch)
    reports: list[CleanupReport] = []
    threads = [threading.Thread(target=lambda: reports.append(own_root.session.shutdown())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [report.ok for report in reports] == [True, True]


def test_a_session_that_never_started_anything_ends_at_once(own_root: Root) -> None:
    assert own_root.session.shutdown().ok
    assert not own_root.run_dir.exists()


def in_a_fork(body: Callable[[], Any]) -> Any:
    """Run a function in a forked copy of this process, and return what it returned."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, json.dumps(body()).encode())
        except BaseException as error:
            os.write(writer, json.dumps(repr(error)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(said)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("used", [True, False])
def test_a_forked_copy_of_the_root_gets_a_clear_error_and_ends_nothing(
    root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch, used: bool
) -> None:
    (handle,) = start_held(root, server, monkeypatch)
    if used:
        root.llm_query("so that there is a client")

    def body() -> list[str]:
        said = []
        for call in (
            lambda: root.llm_query("x"),
            lambda: root.llm_query_batched(["x"]),
            lambda: root.rlm_query("x"),
            lambda: root.rlm_query("x", blocking=False),
            lambda: root.rlm_status(),
            lambda: root.rlm_wait(handle, timeout_s=0),
            handle.result,
            root.session.close,
        ):
            try:
                said.append(repr(call()))
            except Exception as error:
                said.append(type(error).__name__)
        said.append(str(root.session.shutdown().stopped))
        return said

    assert in_a_fork(body) == ["ForkedProcessError"] * 8 + ["()"]
    assert is_alive(handle.status().pid)
    server.release("held")
    assert handle.wait(20).result == "never"


# -- the session


def test_whoever_listens_is_told_of_every_state(root: Root) -> None:
    seen: list[tuple[str, ChildState]] = []
    ended = threading.Event()

    def listen(status: Any) -> None:
        seen.append((status.id, status.state))
        if status.done:
            ended.set()

    root.scripted(final("x"))
    with root.session.listening(listen):
        handle = root.rlm_query("p", blocking=False)
        assert ended.wait(20)
    assert {child for child, _ in seen} == {handle.id}
    states = [state for _, state in seen]
    assert states[-1] is ChildState.COMPLETED
    assert len(states) == len(set(states))
    root.rlm_query("p")
    assert len(seen) == len(states)


def test_settings_hold_for_children_started_from_now_on(root: Root) -> None:
    root.session.configure("max_iterations", "1")
    root.scripted(block("1"), "FINAL(at the last chance)")
    assert root.rlm_query("p") == "at the last chance"
    root.session.configure("max_iterations", "2")
    root.scripted(block("1"), final("in time"))
    assert root.rlm_query("p") == "in time"


def test_a_refused_model_changes_nothing(root: Root) -> None:
    root.scripted(final("x"))
    with pytest.raises(ValueError, match="opnai/x"):
        root.session.configure("model", "opnai/x")
    assert root.rlm_query("p") == "x"


def test_the_model_is_called_what_the_user_calls_it(root: Root) -> None:
    assert root.session.model_name is None
    root.session.configure("model", "openai/gpt-x")
    assert root.session.model_name == "openai/gpt-x"
    root.session.configure("client_factory", "some.module:make")
    root.session.configure_value("model", None)
    assert root.session.model_name == "some.module:make"
