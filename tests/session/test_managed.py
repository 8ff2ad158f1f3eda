"""Promises of `rlm_kernel.session.managed` and of the backend over it, with real children."""

from __future__ import annotations

import contextvars
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlm_kernel.clients.scripted import ScriptedClient
from rlm_kernel.environment.local import LocalREPLEnv
from rlm_kernel.errors import (
    ChildCleanupError,
    ChildFailedError,
    ChildLimitError,
    ConfigurationError,
    EpisodeClosing,
    EpisodeFinalized,
    StaleHandleError,
)
from rlm_kernel.session.backends import ManagedChildBackend
from rlm_kernel.session.controller import RecursiveController
from rlm_kernel.session.managed import ManagedChildren
from rlm_kernel.values import ChildState, CleanupReport, FinalAnswer, ManagedChildConfig
from tests.session.conftest import task
from tests.session.test_cleanup_failure import is_gone, nothing_dies
from tests.support.model_server import ModelServer, reply, script
from tests.support.plain_client import PlainFactory

NAMES = {
    "llm_query",
    "llm_query_batched",
    "rlm_query",
    "rlm_query_batched",
    "rlm_status",
    "rlm_wait",
    "rlm_result",
    "rlm_as_completed",
    "rlm_cancel",
    "rlm_send",
    "rlm_share",
}


def root_chat(messages: list[dict[str, str]], model: str | None = None) -> str:
    """The root's own model: it is not the children's."""
    return f"root: {messages[-1]['content']}"


def config(server: ModelServer, **options: Any) -> ManagedChildConfig:
    graces = {"shutdown_grace_s": 0.05, "terminate_grace_s": 0.05, "kill_grace_s": 0.4}
    return ManagedChildConfig(
        client_factory=PlainFactory(server.base_url),
        **{**graces, "max_children_total": 6, **options},
    )


class Rig:
    """Managed children, the server that their models are at, and the helpers as attributes."""

    def __init__(self, server: ModelServer, managed: ManagedChildren) -> None:
        self.server = server
        self.managed = managed
        self.gates = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self.managed.helpers()[name]

    def hold(self) -> tuple[Any, int]:
        """Start a child that waits for its model; return its handle and its pid."""
        self.gates += 1
        prompt = f"[[block gate-{self.gates}]] held"
        handle = self.rlm_query(prompt, blocking=False)
        self.server.wait_for_request(f"<task>\n{prompt}")
        return handle, handle.status().pid


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("runs")
        patch.setenv("RLM_RUN_DIR", str(path))
        yield path


@pytest.fixture(scope="module")
def one_rig(run_dir: Path) -> Iterator[Rig]:
    with (
        ModelServer() as server,
        ManagedChildren(
            config(server), chat_fn=root_chat, system_prompt="A prompt of one's own.\n{helpers}"
        ) as managed,
    ):
        rig = Rig(server, managed)
        # What the first child brings (nursery, threads) belongs to the module, not to a test.
        assert rig.rlm_query(task("FINAL('warm')")) == "warm"
        yield rig


@pytest.fixture
def rig(one_rig: Rig) -> Iterator[Rig]:
    one_rig.managed.begin_episode()
    yield one_rig
    one_rig.managed.begin_episode()
    # No child is left, but the threads that wrote down its end or served its calls may not have ended: what they have
    # open just now is no leak.
    assert one_rig.managed.session.supervisor.observers.flush(10)
    one_rig.server._http.end_connections()


@pytest.fixture
def own(server: ModelServer, run_dir: Path) -> Iterator[Rig]:
    """For tests that end it."""
    managed = ManagedChildren(config(server), chat_fn=root_chat)
    yield Rig(server, managed)
    managed.close()


def test_children_work_under_the_system_prompt_that_was_given(rig: Rig) -> None:
    assert rig.rlm_query(task("FINAL(1)")) == "1"
    system = rig.server.requests[-1].body["messages"][0]["content"]
    assert system.startswith("A prompt of one's own.")
    assert "llm_query" in system


# -- helpers


def test_the_helpers_are_those_of_a_namespace_without_what_finalizes(rig: Rig) -> None:
    assert set(rig.managed.helpers()) == NAMES


def test_the_root_asks_the_chat_function_and_children_ask_their_own_client(rig: Rig) -> None:
    assert rig.llm_query("hello") == "root: hello"
    assert rig.llm_query_batched(["a", "b"]) == ["root: a", "root: b"]
    assert rig.rlm_query(task("FINAL('child')")) == "child"
    assert rig.managed.usage.calls == 4


def test_context_variables_reach_the_threads_of_a_batch(run_dir: Path) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="lost")
    variable.set("kept")
    scripted = ManagedChildConfig(client_factory=ScriptedClient.factory("x"))
    with ManagedChildren(scripted, chat_fn=lambda messages: variable.get()) as managed:
        assert managed.helpers()["llm_query_batched"](["a", "b"]) == ["kept", "kept"]


def test_without_a_chat_function_the_root_uses_the_factory_too(run_dir: Path) -> None:
    with ManagedChildren(ManagedChildConfig(client_factory=ScriptedClient.factory("made"))) as managed:
        assert managed.helpers()["llm_query"]("p") == "made"


def test_the_configuration_is_not_overridden_from_outside(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLM_MAX_DEPTH", "7")
    monkeypatch.setenv("RLM_MODEL", "demo")
    given = ManagedChildConfig(
        client_factory=ScriptedClient.factory("x"), model="m", max_total_tokens=5, preload=("json",)
    )
    with ManagedChildren(given) as managed:
        assert managed.session.settings.managed() == given
        assert Path(managed.session.settings["run_dir"]) == run_dir


def test_what_is_no_configuration_or_chat_function_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="config="):
        ManagedChildren({"max_depth": 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="chat_fn"):
        ManagedChildren(ManagedChildConfig(client_factory=ScriptedClient.factory("x")), chat_fn="openai/x")  # type: ignore[arg-type]


# -- the backend


def test_the_backend_has_the_common_surface_and_nonblocking_queries(rig: Rig) -> None:
    backend = ManagedChildBackend(managed=rig.managed)
    assert (backend.query("q"), backend.query_batched(["a"])) == ("root: q", ["root: a"])
    assert backend.recursive_query(task("FINAL(context)"), context="given") == "given"
    handle = backend.recursive_query(task("FINAL('later')"), blocking=False)
    assert (handle.wait(20).state, handle.result()) == (ChildState.COMPLETED, "later")
    answers = backend.recursive_query_batched([task("FINAL('a')"), script("[[status 400]]"), task("FINAL('c')")])
    assert (answers[0], answers[2]) == ("a", "c")
    assert answers[1].startswith("Error: ")
    traces = backend.child_traces
    assert [(trace.depth, trace.result_preview) for trace in traces] == [
        (1, r) for r in ("given", "later", "a", None, "c")
    ]
    assert [trace.error is None for trace in traces] == [True, True, True, False, True]
    assert (backend.depth, backend.max_depth, backend.limits.max_children_total) == (0, 2, 6)
    backend.close()
    assert rig.managed.begin_episode().ok, "a backend leaves children that it has not made"


def test_beyond_the_total_blocking_calls_say_so_and_nonblocking_ones_raise(rig: Rig) -> None:
    quick = task("FINAL('x')")
    assert rig.rlm_query_batched([quick] * 7) == ["x"] * 6 + ["Error: max_children_total exceeded"]
    assert rig.rlm_query(quick) == "Error: max_children_total exceeded"
    with pytest.raises(ChildLimitError) as raised:
        rig.rlm_query(quick, blocking=False)
    assert (raised.value.limit, raised.value.value) == ("max_children_total", 6)
    rig.managed.begin_episode()
    assert rig.rlm_query(quick) == "x"


# -- verbs


def test_a_finalization_stops_the_children_and_ends_starting_until_the_next_episode(rig: Rig) -> None:
    handle, pid = rig.hold()
    report = rig.managed.finalize(FinalAnswer("the answer"))
    assert is_gone(pid)
    assert (report.stopped, report.ok) == ((handle.id,), True)
    with pytest.raises(EpisodeFinalized, match="a reset begins a new episode"):
        rig.rlm_query("p", blocking=False)
    assert rig.rlm_query(task("FINAL('still blocking')")) == "still blocking"
    assert handle.status().state is ChildState.CANCELLED
    folder = rig.managed.session.run_folder
    assert folder is not None
    assert '"the answer"' in (folder / "run.json").read_text()
    rig.managed.begin_episode("episode/of mine")
    assert rig.managed.episode_id == "episode/of mine"
    with pytest.raises(StaleHandleError):
        handle.status()
    fresh = rig.rlm_query(task("FINAL('x')"), blocking=False)
    assert (fresh.episode_id, fresh.wait(20).result) == ("episode/of mine", "x")


def test_a_new_episode_stops_the_children_first(rig: Rig) -> None:
    _, pid = rig.hold()
    rig.managed.begin_episode()
    assert is_gone(pid)


@pytest.mark.parametrize("verb", ["finalize", "begin_episode"])
def test_what_cannot_be_confirmed_is_an_error_refuses_all_and_is_unlocked_by_a_cleanup(rig: Rig, verb: str) -> None:
    _, pid = rig.hold()
    managed, episode = rig.managed, rig.managed.episode_id
    assert managed.cleanup_failure is None
    with nothing_dies(rig.managed):  # type: ignore[arg-type]
        with pytest.raises(
            ChildCleanupError, match=f"{verb.replace('begin_episode', 'reset')}: .* pid {pid} "
        ) as raised:
            getattr(managed, verb)()
        assert raised.value.survivors == (pid,)
        assert managed.cleanup_failure is not None
        calls: list[Callable[[], Any]] = [
            lambda: rig.llm_query("p"),
            lambda: rig.rlm_query("p"),
            lambda: rig.rlm_query("p", blocking=False),
            managed.begin_episode,
        ]
        for call in calls:
            with pytest.raises(ChildCleanupError, match=r"call cleanup\(\)") as refused:
                call()
            assert refused.value.survivors == (pid,)
            assert "%rlm" not in str(refused.value)
        assert managed.cleanup().survivors == (pid,)
        assert managed.episode_id == episode
    assert managed.cleanup().ok
    assert is_gone(pid)
    assert managed.cleanup_failure is None
    assert managed.begin_episode().ok
    assert rig.llm_query("works") == "root: works"


def test_a_close_reaches_the_children_while_another_thread_waits_for_them(own: Rig) -> None:
    handle, pid = own.hold()
    statuses: list[Any] = []

    def ask() -> None:
        with pytest.raises(ChildFailedError) as raised:
            own.rlm_query("[[block other]] held")
        statuses.append(raised.value)

    waiting = threading.Thread(target=lambda: statuses.append(own.rlm_wait(handle)))
    asking = threading.Thread(target=ask)
    waiting.start()
    asking.start()
    own.server.wait_for_request("<task>\n[[block other]] held")
    assert own.managed.close().ok
    assert is_gone(pid)
    assert own.managed.session.supervisor.nursery_pid is None
    for thread in (waiting, asking):
        thread.join(10)
        assert not thread.is_alive()
    assert len(statuses) == 2
    assert own.managed.close().ok
    for call in (own.llm_query, own.rlm_query):
        with pytest.raises(EpisodeClosing, match="closed for good"):
            call("p")
    with pytest.raises(EpisodeClosing):
        own.managed.begin_episode()


def test_a_close_that_cannot_confirm_can_be_called_again(own: Rig) -> None:
    _, pid = own.hold()
    with nothing_dies(own.managed), pytest.raises(ChildCleanupError) as raised:  # type: ignore[arg-type]
        own.managed.close()
    assert raised.value.survivors == (pid,)
    assert own.managed.close().ok
    assert is_gone(pid)


def test_an_interrupt_during_a_stop_hastens_it_and_comes_through_when_the_children_are_gone(
    server: ModelServer, run_dir: Path
) -> None:
    with ManagedChildren(config(server, shutdown_grace_s=30, terminate_grace_s=30, kill_grace_s=1)) as managed:
        rig = Rig(server, managed)
        stubborn = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
said = False
while True:
    try:
        if not said:
            said = True
            llm_query('at ' + 'work')
        signal.pause()
    except BaseException:
        llm_query('was ' + 'asked')
"""
        handle = rig.rlm_query(script(reply(f"```repl\n{stubborn}```")), blocking=False)
        server.wait_for_request("at work")
        pid = handle.status().pid

        def interrupt() -> None:
            server.wait_for_request("was asked")
            os.kill(os.getpid(), signal.SIGINT)

        helper = threading.Thread(target=interrupt)
        helper.start()
        with pytest.raises(KeyboardInterrupt):
            managed.finalize()
        assert is_gone(pid)
        helper.join(10)


# -- nobody closes


def test_one_that_is_forgotten_is_closed_when_it_is_collected(server: ModelServer, run_dir: Path) -> None:
    """Its processes, threads and descriptors are gone: the fixture of every test looks."""
    rig = Rig(server, ManagedChildren(config(server), chat_fn=root_chat))
    _, pid = rig.hold()
    gone = weakref.ref(rig.managed)
    helper = rig.llm_query
    rig.managed = None  # type: ignore[assignment]
    gc.collect()
    assert helper("its helpers keep it") == "root: its helpers keep it"
    assert not is_gone(pid)
    del helper
    gc.collect()
    assert gone() is None


def test_one_that_is_open_when_the_interpreter_exits_is_closed(server: ModelServer, run_dir: Path) -> None:
    program = f"""
import sys
from rlm_kernel.clients.openai_compatible import OpenAICompatibleClient
from rlm_kernel.session.managed import ManagedChildren
from rlm_kernel.values import ManagedChildConfig
managed = ManagedChildren(ManagedChildConfig(
    client_factory=lambda: OpenAICompatibleClient({server.base_url!r}, {server.api_key!r}, "test-model")))
handle = managed.helpers()["rlm_query"]("[[block never]] held", blocking=False)
sys.stdin.readline()
print(handle.status().pid, managed.session.supervisor.nursery_pid)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    server.wait_for_request("held", 30)
    out, err = process.communicate("\n", timeout=30)
    assert (process.returncode, err) == (0, "")
    pids = [int(pid) for pid in out.split()]
    assert len(pids) == 2
    assert [is_gone(pid) for pid in pids] == [True, True]


# -- below an environment


def environment_over(managed: ManagedChildren) -> LocalREPLEnv:
    """Make an environment that leaves the children open when it is closed: they are shared."""

    class Kept:
        def close(self) -> CleanupReport:
            return managed.finalize()

        def __getattr__(self, name: str) -> Any:
            return getattr(managed, name)

    return LocalREPLEnv(
        recursive_controller=RecursiveController(root_chat, root_chat, None, None, object(), Kept())  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("code", ["FINAL('kept')", "answer.update(content='kept', ready=True)"])
def test_an_environment_whose_cleanup_fails_keeps_its_answer_and_refuses_all_until_it_succeeds(
    rig: Rig, code: str
) -> None:
    with environment_over(rig.managed) as environment:
        environment.reset(episode_id="mine")
        rig.gates += 1
        prompt = f"[[block gate-{rig.gates}]] held"
        assert environment.execute(f"h = rlm_query({prompt!r}, blocking=False)").observation.result.success
        rig.server.wait_for_request(f"<task>\n{prompt}")
        [status] = rig.managed.statuses()
        with nothing_dies(rig.managed):  # type: ignore[arg-type]
            result = environment.execute(code)
            assert (result.done, result.observation.metadata["final_answer"]) == (True, "kept")
            assert result.observation.metadata["survivors"] == [status.pid]
            for refused in (lambda: environment.execute("1"), environment.reset):
                with pytest.raises(ChildCleanupError):
                    refused()
            assert environment.state().final_answer == "kept"
        assert rig.managed.cleanup().ok
        assert is_gone(status.pid or 0)
        after = environment.execute("rlm_query('p', blocking=False)").observation.result
        assert "EpisodeFinalized" in (after.exception or "")
        assert not environment.reset().done


def test_an_environment_that_is_closed_in_the_middle_of_a_wait_ends_its_step(rig: Rig) -> None:
    environment = environment_over(rig.managed)
    environment.reset()
    rig.gates += 1
    prompt = f"[[block gate-{rig.gates}]] held"
    ended: list[Any] = []

    def step() -> None:
        ended.append(environment.execute(f"s = rlm_wait(rlm_query({prompt!r}, blocking=False))\nprint(s.state)"))

    thread = threading.Thread(target=step)
    thread.start()
    rig.server.wait_for_request(f"<task>\n{prompt}")
    pid = rig.managed.statuses()[-1].pid
    environment.close()
    assert is_gone(pid or 0)
    thread.join(10)
    assert ended[0].observation.result.stdout == "cancelled\n"
