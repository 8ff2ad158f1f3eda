"""A cleanup that cannot confirm: nothing of the user's is lost, nothing new begins, and a later attempt unlocks.

The processes are real, and so is their survival: the nursery is stopped, and no signal of the root's reaches anybody, as if the
processes were stuck in the operating system.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlm_kernel.children import posix
from rlm_kernel.errors import ChildCleanupError
from rlm_kernel.values import ChildState
from tests.session.conftest import Root, held, task
from tests.support.model_server import ModelServer

GRACES = {"shutdown_grace_s": "0.05", "terminate_grace_s": "0.05", "kill_grace_s": "0.3"}


@contextlib.contextmanager
def nothing_dies(root: Root) -> Iterator[None]:
    nursery = root.session.supervisor.nursery_pid
    assert nursery
    os.kill(nursery, signal.SIGSTOP)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(posix, "signal_pidfd", lambda *_: True)
            yield
    finally:
        os.kill(nursery, signal.SIGCONT)


@pytest.fixture
def child(own_root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A child that waits for its model."""
    own_root.served(server, monkeypatch)
    for name, text in GRACES.items():
        own_root.session.configure(name, text)
    handle = own_root.rlm_query(held("FINAL('never')"), blocking=False)
    server.wait_for_request()
    return handle


def is_gone(pid: int) -> bool:
    """Tell whether a process has exited; a zombie that its parent is about to reap has."""
    seen = posix.parent_and_state(pid)
    return seen is None or seen[1] in "ZX"


def by_final(root: Root) -> None:
    root.FINAL("kept")


def by_dict(root: Root) -> None:
    root.answer["content"] = "kept"
    root.answer["ready"] = True


def refused(call: Callable[[], object], pid: int) -> bool:
    with pytest.raises(ChildCleanupError, match=f"pid {pid} ") as raised:
        call()
    return raised.value.survivors == (pid,)


@pytest.mark.parametrize("finalize", [by_final, by_dict])
def test_the_final_answer_is_kept_everything_new_is_refused_and_a_cleanup_unlocks(
    own_root: Root, child: Any, finalize: Callable[[Root], None]
) -> None:
    session, pid = own_root.session, child.status().pid
    session.finalization.begin_cell()
    finalize(own_root)
    assert session.finalization.end_cell(success=True) is not None
    own_root.namespace["mine"] = [1]
    episode = session.episode_id
    with nothing_dies(own_root):
        report = session.finalize()
        assert (report.ok, report.survivors) == (False, (pid,))
        assert report.duration_s < 0.4 + 0.25
        assert not is_gone(pid), "this test is worth nothing"
        assert (child.status().state, child.status().exited) == (ChildState.CANCELLED, False)
        assert session.final_answer is not None
        assert session.final_answer.text == "kept"
        calls: list[Callable[[], object]] = [
            session.check_may_run,
            lambda: own_root.rlm_query("p"),
            lambda: own_root.rlm_query("p", blocking=False),
            lambda: own_root.rlm_query_batched(["p"], blocking=False),
            lambda: own_root.llm_query("p"),
        ]
        assert [refused(call, pid) for call in calls] == [True] * 5
        again = session.reset()
        assert (again.ok, again.survivors, session.episode_id) == (False, (pid,), episode)
        assert [status.id for status in own_root.rlm_status()] == [child.id]
        folder = session.run_folder
        assert folder is not None
        written = json.loads((folder / "run.json").read_text())
        assert written["final_answer"] == "kept"
        assert written["verbs"][-1]["survivors"] == [pid]
    assert session.cleanup().ok
    assert is_gone(pid)
    assert child.status().exited
    session.check_may_run()
    assert session.final_answer is not None
    assert session.final_answer.text == "kept"
    assert own_root.mine == [1]
    assert session.reset().ok
    assert session.episode_id != episode
    assert session.final_answer is None
    assert own_root.rlm_query(task("FINAL('works')")) == "works"


@pytest.mark.parametrize("verb", ["reset", "finalize"])
def test_any_verb_unlocks_when_it_confirms(own_root: Root, child: Any, verb: str) -> None:
    pid = child.status().pid
    with nothing_dies(own_root):
        assert own_root.session.close().survivors == (pid,)
    assert getattr(own_root.session, verb)().ok
    assert is_gone(pid)
    own_root.session.check_may_run()
    assert own_root.rlm_query(task("FINAL('works')")) == "works"


def test_a_cancel_that_cannot_confirm_is_an_error_that_names_the_process(own_root: Root, child: Any) -> None:
    pid = child.status().pid
    with nothing_dies(own_root), pytest.raises(ChildCleanupError) as raised:
        own_root.rlm_cancel(child)
    assert raised.value.survivors == (pid,)
    assert child.status().state is ChildState.CANCELLED
    assert own_root.session.close().ok
    assert is_gone(pid)


def test_survivors_below_a_child_are_named_too_and_all_are_gone_in_the_end(
    own_root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_root.served(server, monkeypatch)
    for name, text in {**GRACES, "max_depth": "3"}.items():
        own_root.session.configure(name, text)
    own_root.rlm_query(task("rlm_query('[[block never]] deepest')"), blocking=False)
    server.wait_for_request("<task>\n[[block never]] deepest")
    pids = sorted(status.pid for status in own_root.rlm_status())
    assert len(pids) == 2
    with nothing_dies(own_root):
        assert own_root.session.close().survivors == tuple(pids)
    assert own_root.session.cleanup().ok
    assert all(map(is_gone, pids))


def test_what_is_abandoned_unlocks_at_once_and_leaves_nothing_when_it_ends_after_all(
    own_root: Root, child: Any
) -> None:
    session, pid = own_root.session, child.status().pid
    with nothing_dies(own_root):
        assert not session.close().ok
        failure = session.lifecycle.abandon()
        assert failure is not None
        assert failure.survivors == (pid,)
        session.check_may_run()
        assert session.reset().ok
        assert not is_gone(pid)
    assert own_root.rlm_query(task("FINAL('works')")) == "works"
    assert session.shutdown().ok
    assert is_gone(pid)


def test_a_shutdown_with_survivors_names_them_and_the_nursery_goes_on_killing(own_root: Root, child: Any) -> None:
    session, pid = own_root.session, child.status().pid
    pidfd = posix.open_pidfd(pid)
    assert pidfd is not None
    with nothing_dies(own_root):
        assert session.shutdown().survivors == (pid,)
        assert session.supervisor.nursery_pid is not None
    assert posix.pidfd_has_exited(pidfd, 10.0)
    os.close(pidfd)
    assert session.shutdown().ok
    assert session.supervisor.nursery_pid is None
