"""The nursery on its own: driven over its control socket, as its root would, without a supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlm_kernel.children import posix
from rlm_kernel.children.nursery_process import NurseryProcess
from rlm_kernel.errors import NurseryError
from rlm_kernel.values import Graces
from rlm_kernel.wire import messages as m
from rlm_kernel.wire.channel import Channel, ChannelClosed, close_fds
from tests.children.helpers import DEADLINE_S, ENTRY, ROOT, Reports, Watched, is_gone

Make = Callable[..., "Root"]
SOON = Graces(0.1, 0.1, 1.0)
LATE = Graces(30, 30, 30)


class Root:
    """Plays the root for one nursery."""

    def __init__(self, **settings: Any) -> None:
        self.nursery = NurseryProcess.start(**settings)
        self.channels: dict[str, Channel[Any]] = {}
        self.pidfds: dict[str, int] = {}
        self._inbox: list[Any] = []

    def close(self) -> None:
        self.nursery.kill()
        assert self.nursery.wait(DEADLINE_S)
        self.nursery.close()
        for channel in self.channels.values():
            channel.close()
        close_fds(self.pidfds.values())

    def tell(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        self.nursery.channel.queue(message, fds)
        assert self.nursery.channel.flush()

    def spawn(self, child_id: str, do: str, reports: Reports | None = None, **task: Any) -> None:
        """Ask for a fork, and send the start message along."""
        timeout_s, graces = task.pop("timeout_s", 60.0), task.pop("graces", SOON)
        ours, theirs = socket.socketpair()
        null = os.open(os.devnull, os.O_WRONLY)
        channel = self.channels[child_id] = Channel(ours, m.FromChild)
        self.tell(m.Spawn(child_id, timeout_s, graces), (theirs.detach(), null))
        start = m.Start(
            child_id,
            1,
            None,
            "",
            ENTRY,
            json.dumps({"do": do, **task}).encode(),
            b"",
            dict(os.environ),
            {},
            ROOT,
            tuple(sys.path),
        )
        channel.queue(start, () if reports is None else reports.attach())
        with contextlib.suppress(ChannelClosed):  # the fork may have been refused by now
            channel.flush()

    def expect(self, kind: type[Any]) -> Any:
        """Wait for the next message, which must be of a kind."""
        message = self.next()
        assert isinstance(message, kind), message
        return message

    def next(self) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while not self._inbox:
            assert self.nursery.channel.wait_readable(deadline), "the nursery says nothing"
            for message, fds in self.nursery.channel.receive():
                if isinstance(message, m.Started):
                    self.pidfds[message.id] = fds[0]
                self._inbox.append(message)
            assert self._inbox or not self.nursery.channel.eof, "the nursery has hung up"
        return self._inbox.pop(0)

    def exited(self) -> m.Exited:
        exited: m.Exited = self.expect(m.Exited)
        return exited


@pytest.fixture(scope="module")
def module_root() -> Iterator[Root]:
    root = Root()
    root.expect(m.NurseryReady)
    yield root
    root.close()


@pytest.fixture
def root(module_root: Root, no_leftovers: None) -> Iterator[Root]:
    yield module_root
    assert module_root._inbox == []
    for channel in module_root.channels.values():
        channel.close()
    module_root.channels.clear()
    close_fds(module_root.pidfds.values())
    module_root.pidfds.clear()


@pytest.fixture
def make_root(no_leftovers: None) -> Iterator[Make]:
    """Make roots whose nurseries belong to one test."""
    made: list[Root] = []

    def make(**settings: Any) -> Root:
        made.append(Root(**settings))
        return made[-1]

    yield make
    for root in made:
        root.close()


@pytest.fixture
def own_root(make_root: Make) -> Root:
    """One whose nursery a test may hurt."""
    root = make_root()
    root.expect(m.NurseryReady)
    return root


def answer_of(root: Root, child_id: str) -> Any:
    [(message, _)] = root.channels[child_id].receive()
    return message


def test_a_child_is_started_reported_and_reaped(root: Root) -> None:
    root.spawn("a", "echo", text="hi")
    started = root.expect(m.Started)
    assert started.id == "a"
    assert root.exited() == m.Exited("a", 0)
    assert answer_of(root, "a") == m.Answer("hi")
    assert is_gone(started.pid)
    assert posix.pidfd_has_exited(root.pidfds["a"])


def test_requests_are_served_in_order_also_those_sent_before_it_was_warm(make_root: Make) -> None:
    root = make_root()
    for number in range(5):
        root.spawn(str(number), "echo")
    root.expect(m.NurseryReady)
    messages = [root.next() for _ in range(10)]
    assert [message.id for message in messages if isinstance(message, m.Started)] == list("01234")
    assert sorted(message.id for message in messages if isinstance(message, m.Exited)) == list("01234")


def test_a_flood_of_requests_needs_no_more_descriptors_than_a_few(make_root: Make) -> None:
    """Two descriptors come with each of 200 requests; the nursery may have 128 open."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        root = make_root()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for number in range(200):
        root.spawn(str(number), "exit", code=0)
    root.expect(m.NurseryReady)
    seen = [root.next() for _ in range(400)]
    assert sum(isinstance(message, m.Exited) for message in seen) == 200


def test_the_steps_follow_each_other_side_by_side_for_all(root: Root, reports: Reports) -> None:
    for name in "abc":
        root.spawn(name, "stubborn", reports)
        root.expect(m.Started)
    reports.take(3)
    began = time.monotonic()
    root.tell(m.Stop(("a", "b", "c"), SOON))
    exits = [root.exited() for _ in range(3)]
    assert 0.2 <= time.monotonic() - began < 0.45
    assert {(e.code, e.asked, e.terminated, e.killed) for e in exits} == {(-9, True, True, True)}


def test_the_request_to_stop_is_repeated_for_a_child_that_was_about_to_enter_a_system_call(
    root: Root, reports: Reports
) -> None:
    root.spawn("a", "count_requests", reports)
    root.expect(m.Started)
    reports.next()
    root.tell(m.Stop(("a",), LATE))
    exited = root.exited()
    assert (exited.code, exited.asked, exited.terminated) == (0, True, False)


def test_a_second_stop_only_hastens(root: Root, reports: Reports) -> None:
    root.spawn("a", "stubborn", reports)
    root.expect(m.Started)
    reports.next()
    root.tell(m.Stop(("a",), SOON))
    root.tell(m.Stop(("a",), LATE))
    assert root.exited().killed
    root.spawn("b", "stubborn", reports)
    root.expect(m.Started)
    reports.next()
    root.tell(m.Stop(("b",), LATE))
    root.tell(m.Stop(("b",), LATE.from_kill()))
    assert root.exited().killed


def test_a_stop_sent_with_the_spawn_is_delivered_late_and_never_lost(root: Root) -> None:
    for number in range(20):
        name = f"early{number}"
        root.spawn(name, "pause")
        root.tell(m.Stop((name,), LATE))
        root.expect(m.Started)
        exited = root.exited()
        assert (exited.code, exited.terminated, exited.killed) == (130, False, False)


def test_a_stop_for_an_unknown_child_is_ignored(root: Root) -> None:
    root.tell(m.Stop(("nobody",), SOON))
    root.spawn("a", "echo")
    root.expect(m.Started)
    root.exited()


def test_timeouts_are_the_nurserys_own_business(root: Root, reports: Reports) -> None:
    root.spawn("a", "stubborn", reports, timeout_s=0.1)
    root.expect(m.Started)
    assert root.expect(m.TimedOut).id == "a"
    assert root.exited().killed


def test_exited_is_only_said_when_what_the_child_left_is_gone(root: Root, reports: Reports) -> None:
    root.spawn("a", "daemonize", reports)
    root.expect(m.Started)
    daemon = reports.next()["daemon"]
    exited = root.exited()
    assert is_gone(daemon)
    assert exited.leftover == ()


def test_a_process_that_forks_itself_away_again_and_again_is_hunted_down(own_root: Root, reports: Reports) -> None:
    """Each of its generations is adopted by the nursery when the one before has gone."""
    own_root.spawn("a", "fork_chain", reports, graces=Graces(0, 0, 5.0))
    own_root.expect(m.Started)
    exited = own_root.exited()
    assert (exited.code, exited.leftover) == (0, ())
    assert reports.everybody_is_gone()


def test_the_nursery_ignores_sigint_and_its_children_do_not(root: Root, reports: Reports) -> None:
    root.spawn("a", "pause", reports)
    started = root.expect(m.Started)
    reports.next()
    os.kill(root.nursery.pid, signal.SIGINT)
    os.kill(started.pid, signal.SIGINT)
    assert root.exited().code == 130
    assert not root.nursery.has_exited


def test_an_ignored_sigint_is_not_inherited(make_root: Make, reports: Reports) -> None:
    """An idle kernel ignores SIGINT, and exec inherits that."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    try:
        root = make_root()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGINT, before)
    root.expect(m.NurseryReady)
    root.spawn("a", "facts")
    root.expect(m.Started)
    root.exited()
    facts = json.loads(answer_of(root, "a").result)
    assert facts["blocked"] == []
    root.spawn("b", "pause", reports)
    root.expect(m.Started)
    reports.next()
    root.tell(m.Stop(("b",), LATE))
    assert root.exited().code == 130


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_nursery_stops_all_children_first(
    own_root: Root, reports: Reports, signum: signal.Signals
) -> None:
    own_root.spawn("polite", "clean_up_when_asked", reports)
    own_root.spawn("stubborn", "stubborn", reports)
    own_root.expect(m.Started)
    own_root.expect(m.Started)
    pids = [report["pid"] for report in reports.take(2)]
    os.kill(own_root.nursery.pid, signum)
    assert reports.next()["cleaned"]
    assert own_root.nursery.wait(DEADLINE_S)
    assert [is_gone(pid) for pid in pids] == [True, True]


def test_a_closed_control_channel_stops_everything(own_root: Root, reports: Reports) -> None:
    own_root.spawn("a", "daemonize", reports, then="pause")
    own_root.expect(m.Started)
    report = reports.next()
    own_root.nursery.channel.close()
    assert own_root.nursery.wait(DEADLINE_S)
    assert is_gone(report["pid"])
    assert is_gone(report["daemon"])


def test_garbage_on_the_control_channel_stops_everything(own_root: Root, reports: Reports) -> None:
    own_root.spawn("a", "pause", reports)
    own_root.expect(m.Started)
    pid = reports.next()["pid"]
    os.write(own_root.nursery.channel.fileno(), b"printed by some C library")
    assert own_root.nursery.wait(DEADLINE_S)
    assert is_gone(pid)


def test_quit_waits_for_the_children_that_are_left(own_root: Root, reports: Reports) -> None:
    own_root.spawn("a", "pause", reports)
    own_root.expect(m.Started)
    reports.next()
    own_root.tell(m.Quit())
    assert not own_root.nursery.wait(0.0)
    own_root.tell(m.Stop(("a",), LATE))
    own_root.exited()
    assert own_root.nursery.wait(DEADLINE_S)


def test_a_nursery_killed_outright_takes_its_children_along(own_root: Root, reports: Reports) -> None:
    own_root.spawn("a", "stubborn", reports)
    own_root.expect(m.Started)
    with Watched(reports.next()["pid"]) as watched:
        own_root.nursery.kill()
        assert watched.alive(1.0) == []


def test_its_exit_hooks_run_in_no_child(tmp_path: Path, make_root: Make) -> None:
    marks = tmp_path / "hooks"
    (tmp_path / "leaves_a_hook.py").write_text(
        f"import atexit, os\natexit.register(lambda: open({str(marks)!r}, 'a').write(f'{{os.getpid()}}\\n'))\n"
    )
    environ = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(tmp_path)
    try:
        root = make_root(preload=["leaves_a_hook"])
    finally:
        if environ is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = environ
    root.expect(m.NurseryReady)
    for name in ("echo", "raise", "system_exit"):
        root.spawn(name, name)
        root.expect(m.Started)
        root.exited()
    assert not marks.exists()
    root.nursery.channel.close()
    assert root.nursery.wait(DEADLINE_S)
    assert marks.read_text() == f"{root.nursery.pid}\n"


def write_threaded(folder: Path, name: str) -> None:
    (folder / f"{name}.py").write_text(
        "import threading\n"
        f"threading.Thread(target=threading.Event().wait, name='{name}-pool', daemon=True).start()\n"
        "def warm_up(): pass\n"
    )


def test_a_preload_that_leaves_a_thread_behind_is_dropped_with_a_warning_that_names_it(
    tmp_path: Path, make_root: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_threaded(tmp_path, "greedy")
    (tmp_path / "modest.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    root = make_root(preload=["modest", "greedy", "no_such_module"])
    ready = root.expect(m.NurseryReady)
    assert len(ready.warnings) == 2
    assert "'greedy' was left out" in ready.warnings[0]
    assert "greedy-pool" in ready.warnings[0]
    assert "'no_such_module' failed" in ready.warnings[1]
    root.spawn("a", "echo")
    root.expect(m.Started)
    assert root.exited().code == 0


def test_with_a_second_thread_a_fork_is_refused_and_the_thread_is_named(
    tmp_path: Path, make_root: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_threaded(tmp_path, "stray")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    root = make_root(warm_up="stray:warm_up")
    assert "stray-pool" in root.expect(m.NurseryReady).warnings[0]
    root.spawn("a", "echo")
    failed = root.expect(m.SpawnFailed)
    assert failed.id == "a"
    assert "more than one thread (stray-pool)" in failed.error


def test_a_nursery_that_cannot_be_executed_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch, no_leftovers: None
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(NurseryError, match="cannot start the nursery process"):
        NurseryProcess.start()


def test_a_nursery_that_dies_says_what_it_wrote_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_root: Make
) -> None:
    (tmp_path / "breaks.py").write_text("def warm_up(): raise RuntimeError('no way to warm up')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    nursery = NurseryProcess.start(warm_up="breaks:warm_up", log_path=str(tmp_path / "logs" / "nursery.log"))
    assert nursery.wait(DEADLINE_S)
    text = nursery.describe_exit()
    assert "exit code 1" in text
    assert text.endswith("RuntimeError: no way to warm up")
    nursery.close()
    nursery.close()
    nursery.kill()


def test_secrets_are_not_in_the_nurserys_environment_unless_exempt(
    monkeypatch: pytest.MonkeyPatch, make_root: Make
) -> None:
    monkeypatch.setenv("HIDDEN_API_KEY", "sk-hidden")
    monkeypatch.setenv("KEPT_API_KEY", "sk-kept")
    root = make_root(keep_secrets=["KEPT_API_KEY"])
    environ = Path(f"/proc/{root.nursery.pid}/environ").read_bytes()
    root.expect(m.NurseryReady)
    environ = Path(f"/proc/{root.nursery.pid}/environ").read_bytes()
    assert b"sk-hidden" not in environ
    assert b"sk-kept" in environ
