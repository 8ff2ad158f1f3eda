"""Promises of `rlm_kernel.session.local_runner`: runs in this process, with children of either kind."""

from __future__ import annotations

import contextvars
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlm_kernel.clients.scripted import ScriptedClient
from rlm_kernel.errors import ChildCleanupError, ConfigurationError, EpisodeClosing, ModelCallError, UsageMistake
from rlm_kernel.loop.prompts import RLM_SYSTEM_PROMPT_QWEN
from rlm_kernel.loop.trajectory import read_trajectory
from rlm_kernel.session.local_runner import LocalRLMRunner, RLMRunResult
from rlm_kernel.values import ManagedChildConfig, Usage
from tests.session.conftest import block, final
from tests.session.test_cleanup_failure import is_gone, nothing_dies
from tests.support.model_server import ModelServer
from tests.support.plain_client import PlainFactory


class Chat:
    """A chat function that gives its replies in turn, or those of the first rule whose text is in the task, and keeps
    what it was sent."""

    def __init__(self, *replies: Any, **rules: Any) -> None:
        self.replies = list(replies)
        self.rules = {name.replace("_", " "): reply for name, reply in rules.items()}
        self.sent: list[list[dict[str, str]]] = []
        self.models: list[str | None] = []

    def __call__(self, messages: list[dict[str, str]], model: str | None = None) -> Any:
        self.sent.append([dict(message) for message in messages])
        self.models.append(model)
        first = next((m["content"] for m in messages if m["role"] == "user"), "")
        reply = next((reply for text, reply in self.rules.items() if text in first), None)
        if reply is None:
            reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return reply(messages) if callable(reply) else reply

    def last_user(self, call: int) -> str:
        assert self.sent[call][-1]["role"] == "user"
        return self.sent[call][-1]["content"]

    @property
    def system(self) -> str:
        return self.sent[0][0]["content"]


def run(
    *replies: Any, context: Any = "the context", task: str = "the task", **options: Any
) -> tuple[RLMRunResult, Chat]:
    rules = options.pop("rules", {})
    chat = Chat(*replies, **rules)
    return LocalRLMRunner(chat, **options).run(context, task), chat


# -- the loop


def test_every_block_runs_in_order_in_one_namespace_before_finalization_is_looked_at() -> None:
    reply = f"{block('order = [1]; FINAL(order)')}\nand\n```python\norder.append(2)\n```\n{block('order.append(3); print(order)')}"
    result, chat = run(reply)
    assert (result.final_answer, result.iterations, result.depth, result.stop_reason) == ("[1]", 1, 0, "final")
    assert [message["role"] for message in result.messages] == ["system", "user", "assistant"]
    result, chat = run(reply.replace("FINAL(order)", ""), block("FINAL(order)"))
    assert result.final_answer == "[1, 2, 3]"
    assert "[1, 2, 3]" in chat.last_user(1)
    assert "the task" in chat.last_user(1)


def test_observations_show_code_and_output_each_cut_with_a_note() -> None:
    code = f"x = '{'c' * 25_000}'\nprint('o' * 30_000)"
    _, chat = run(block(code), final("done"))
    text = chat.last_user(1)
    assert text.count("o") < 21_000
    assert text.count("c" * 10_000) < 3
    assert "of 30,001 characters left out" in text or "of 30,000 characters left out" in text
    assert f"of {len(code):,} characters left out" in text


def test_a_reply_without_a_block_gets_a_reminder() -> None:
    result, chat = run("I will look at it.", final("ok"))
    assert (result.final_answer, result.iterations) == ("ok", 2)
    assert "no code block" in chat.last_user(1)


def test_a_final_line_outside_of_blocks_counts_only_where_there_is_no_block() -> None:
    result, _ = run("FINAL(plain (balanced) text) and more")
    assert (result.final_answer, result.stop_reason) == ("plain (balanced) text", "final_in_reply")
    result, chat = run(f"{block('x = 1')}\nFINAL(too early)", final("later"))
    assert (result.final_answer, result.iterations) == ("later", 2)
    assert "was not taken" in chat.last_user(1)


@pytest.mark.parametrize(
    ("last", "answer"),
    [
        ("I think:\nFINAL(best (so far))", "best (so far)"),
        ("the whole reply", "the whole reply"),
        ("  ", None),
    ],
)
@pytest.mark.parametrize("turn", [block("print(1)"), "only text"])
def test_when_the_iterations_run_out_there_is_one_last_call(last: str, answer: str | None, turn: str) -> None:
    result, chat = run(turn, turn, turn, turn, turn, last, max_iterations=5)
    assert (result.final_answer, result.iterations, len(chat.sent)) == (answer, 5, 6)
    assert "REPL iterations have run out" in chat.last_user(5)
    assert "run out of REPL iterations" in chat.last_user(5)
    assert "FINAL(" in chat.last_user(5)


@pytest.mark.parametrize("nothing", ["", None, "<think>hm</think>"])
def test_empty_replies_get_one_reminder_and_then_the_last_chance(nothing: Any) -> None:
    result, chat = run(nothing, nothing, "FINAL(x)")
    assert (result.final_answer, len(chat.sent)) == ("x", 3)
    assert "Your reply was empty" in chat.last_user(1)


def test_chat_functions_with_and_without_a_model_are_called_rightly() -> None:
    models: list[Any] = []

    def one(messages: list[dict[str, str]]) -> str:
        models.append("none")
        return "FINAL(1)"

    def two(messages: list[dict[str, str]], model: str | None = "own") -> str:
        models.append(model)
        return "FINAL(2)"

    assert LocalRLMRunner(one).run("c", "t", model="m").final_answer == "1"
    assert LocalRLMRunner(two).run("c", "t", model="m").final_answer == "2"
    assert LocalRLMRunner(two).run("c", "t").final_answer == "2"
    assert models == ["none", "m", "own"]


def test_a_type_error_inside_the_chat_function_is_not_taken_for_a_wrong_signature() -> None:
    calls = []

    def chat(messages: list[dict[str, str]], model: str | None = None) -> str:
        calls.append(1)
        raise TypeError("my own mistake")

    with pytest.raises(TypeError, match="my own mistake"):
        LocalRLMRunner(chat).run("c", "t")
    assert calls == [1]


def test_a_failed_model_call_ends_the_run_and_is_never_an_answer() -> None:
    def chat(messages: list[dict[str, str]]) -> str:
        raise ModelCallError("no luck")

    with pytest.raises(ModelCallError, match="no luck"):
        LocalRLMRunner(chat).run("c", "t")


def test_the_first_messages_say_what_is_there_and_that_it_was_not_looked_at() -> None:
    _, chat = run("FINAL(1)", context=["ab", "cde"])
    assert "not looked at the context yet" in chat.sent[0][1]["content"]
    assert "the task" in chat.sent[0][1]["content"]
    assert "of type list[str], 5 characters in all" in chat.system
    for name in ("llm_query(", "llm_query_batched(", "rlm_query(", "rlm_query_batched(", "SHOW_VARS"):
        assert name in chat.system
    for name in ("blocking=False", "rlm_status", "rlm_wait", "rlm_result", "rlm_cancel", "rlm_send", "rlm_share"):
        assert name not in chat.system


def test_the_names_in_the_namespace_are_those_of_the_prompt() -> None:
    result, _ = run(
        block(
            "mine = 1\nnames = sorted(n for n in globals() if not n.startswith('_'))\nprint(SHOW_VARS())\nFINAL(names)"
        )
    )
    names = set(eval(result.final_answer or ""))
    expected = {"llm_query", "llm_query_batched", "rlm_query", "rlm_query_batched", "FINAL", "FINAL_VAR", "SHOW_VARS"}
    assert expected | {"context", "answer", "mine"} <= names
    assert not {"rlm_status", "rlm_wait", "rlm_share", "task"} & names
    result, _ = run(block("mine = 1\nFINAL(SHOW_VARS())"))
    assert result.final_answer == "mine: int"


def test_without_managed_children_nonblocking_queries_say_what_is_missing() -> None:
    _, chat = run(block("rlm_query('p', blocking=False)"), block("rlm_query('p', schema=int)"), final("x"))
    assert "ManagedModeRequired" in chat.last_user(1)
    assert "managed=ManagedChildConfig(" in chat.last_user(1)
    assert "schema= needs managed children" in chat.last_user(2)


def test_a_task_too_long_to_show_is_whole_in_the_repl() -> None:
    task = "word " * 4000
    result, chat = run(block("FINAL(len(task))"), task=task)
    assert result.final_answer == str(len(task))
    assert len(chat.sent[0][1]["content"]) < 6000
    assert "`task`" in chat.sent[0][1]["content"]


def test_own_system_prompts_are_used_below_too() -> None:
    _, chat = run(block("FINAL(rlm_query('below'))"), rules={"below": "FINAL(x)"}, system_prompt="Mine {helpers}")
    assert [messages[0]["content"].startswith("Mine # What") for messages in chat.sent] == [True, True]
    _, chat = run("FINAL(x)", system_prompt=RLM_SYSTEM_PROMPT_QWEN)
    assert "expensive" in chat.system


def test_a_run_may_run_so_many_blocks_and_no_more() -> None:
    many = "\n".join(block(f"print('block', {n})") for n in range(5))
    _, chat = run(many, "FINAL(x)", max_iterations=2, env_max_iterations_multiplier=2)
    assert "block 3" in chat.last_user(1)
    assert "this run may run 4 blocks of code" in chat.last_user(1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_iterations", 0),
        ("depth", -1),
        ("env_max_iterations_multiplier", 0),
        ("max_depth", -1),
        ("max_batch_workers", 0),
    ],
)
def test_bad_arguments_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}={value}"):
        LocalRLMRunner(Chat(""), **{name: value})  # type: ignore[arg-type]


def test_a_bad_task_or_timeout_is_refused_by_name() -> None:
    with pytest.raises(UsageMistake, match="task_prompt"):
        LocalRLMRunner(Chat("")).run("c", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="timeout_s=0"):
        LocalRLMRunner(Chat("")).run("c", "t", timeout_s=0)


# -- children in this process


def test_a_child_recurs_with_a_repl_of_its_own() -> None:
    result, chat = run(
        block("x = 1\nanswer_below = rlm_query('below', context=[1, 2, 3])\nprint('x is', x)"),
        block("FINAL(answer_below)"),
        rules={"below": block("print('not shown above')\nx = 2\nFINAL(sum(context))")},
    )
    assert result.final_answer == "6"
    assert "x is 1" in chat.last_user(2)
    assert "not shown above" not in chat.last_user(2)
    [trace] = result.child_traces
    assert (trace.depth, trace.prompt_preview, trace.result_preview, trace.error) == (1, "below", "6", None)
    assert result.usage == Usage(calls=3)


def test_the_context_of_a_child_is_its_prompt() -> None:
    result, _ = run(block("FINAL(rlm_query('below'))"), rules={"below": block("FINAL(context + '!')")})
    assert result.final_answer == "below!"


def test_children_of_a_batch_run_side_by_side_each_with_its_own_output() -> None:
    meeting = threading.Barrier(2)

    def child(messages: list[dict[str, str]]) -> str:
        if len(messages) == 2:
            meeting.wait(10)
            return block("for _ in range(20): print(context)")
        text = messages[-1]["content"]
        return "FINAL(mixed)" if "below 1" in text and "below 2" in text else "FINAL(own)"

    result, _ = run(block("FINAL(rlm_query_batched(['below 1', 'below 2']))"), rules={"below": child})
    assert result.final_answer == "['own', 'own']"


def test_the_depth_limit_holds_and_children_of_children_count_in_the_one_total() -> None:
    nested = block("FINAL(rlm_query('level ' + str(int(context[6:]) + 1)))")
    result, chat = run(nested, context="level 0", rules={"level 3": "direct"}, max_depth=3)
    assert result.final_answer == "direct"
    assert [len(messages) for messages in chat.sent] == [2, 2, 2, 1]
    result, _ = run(nested, context="level 0", max_depth=9, max_children_total=3)
    assert result.final_answer == "Error: max_children_total exceeded"


def test_limits_of_the_runner_reach_its_children() -> None:
    result, _ = run(
        block("FINAL(rlm_query_batched(['below 1', 'below 2', 'below 3']))"),
        rules={"below": block("FINAL(context * 10)")},
        max_children_per_batch=2,
        result_truncation_limit=3,
    )
    assert result.final_answer == "['bel', 'bel']"


def test_a_child_that_takes_too_long_is_interrupted_and_its_trace_says_so() -> None:
    result, _ = run(
        block("FINAL(rlm_query('below'))"), rules={"below": block("while True: pass")}, per_child_timeout_s=0.05
    )
    assert result.final_answer == "Error: child timeout after 0.050s"
    assert result.child_traces[0].error == "child timeout after 0.050s"


def test_callbacks_hear_of_children_and_may_fail() -> None:
    told: list[Any] = []

    def broken(*args: Any) -> None:
        told.append(args)
        raise ValueError

    result, _ = run(
        block("FINAL(rlm_query('below'))"),
        rules={"below": "FINAL(x)"},
        on_subcall_start=broken,
        on_subcall_complete=broken,
    )
    assert result.final_answer == "x"
    assert told[0] == (1, "default", "below")
    assert (told[1][:2], told[1][3]) == ((1, "default"), None)


def test_context_variables_reach_children_of_a_batch() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="lost")
    variable.set("kept")
    result, _ = run(
        block("FINAL(rlm_query_batched(['below', 'below']))"), rules={"below": lambda _: f"FINAL({variable.get()})"}
    )
    assert result.final_answer == "['kept', 'kept']"


def test_a_backend_of_the_users_own_is_used() -> None:
    made: list[dict[str, Any]] = []

    class Backend:
        child_traces = ("mine",)

        def query(self, prompt: str, model: str | None = None) -> str:
            return f"q {prompt}"

        def query_batched(self, prompts: list[str], model: str | None = None) -> list[str]:
            return [f"b {prompt}" for prompt in prompts]

        recursive_query, recursive_query_batched = query, query_batched

    def factory(chat_fn: Any, **options: Any) -> Backend:
        made.append(options)
        return Backend()

    code = "FINAL([llm_query('a'), llm_query_batched(['b']), rlm_query('c'), rlm_query_batched(['d'])])"
    result, _ = run(block(code), backend_factory=factory)
    assert result.final_answer == "['q a', ['b b'], 'q c', ['b d']]"
    assert result.child_traces == ["mine"]
    assert set(made[0]) == {"system_prompt", "max_iterations", "depth", "env_max_iterations_multiplier"}


# -- ends


def test_a_run_ends_at_its_deadline_without_an_answer() -> None:
    run("FINAL(x)")  # what is imported for the first run takes its time, too
    began = time.monotonic()
    chat = Chat(block("x = rlm_query('below')"), below=block("while True: pass"))
    result = LocalRLMRunner(chat, per_child_timeout_s=50).run("c", "t", timeout_s=0.2)
    assert (result.final_answer, result.stop_reason, result.iterations) == (None, "deadline", 1)
    assert result.child_traces[0].error
    assert time.monotonic() - began < 5


def test_a_close_ends_a_run_in_another_thread_at_its_next_model_call() -> None:
    asked, go_on = threading.Event(), threading.Event()
    raised: list[BaseException] = []

    def chat(messages: list[dict[str, str]]) -> str:
        asked.set()
        go_on.wait(10)
        return block("llm_query('more')")

    runner = LocalRLMRunner(chat)

    def work() -> None:
        try:
            runner.run("c", "t")
        except EpisodeClosing as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert asked.wait(10)
    runner.close()
    go_on.set()
    thread.join(10)
    assert len(raised) == 1
    with pytest.raises(EpisodeClosing):
        runner.run("c", "t")
    runner.close()


def test_an_interrupt_comes_through_and_abandoned_children_make_no_further_call() -> None:
    started, go_on, called_again = threading.Barrier(3), threading.Event(), []
    over = threading.Semaphore(0)

    def child(messages: list[dict[str, str]]) -> str:
        if len(messages) > 2:
            called_again.append(1)
            return "FINAL(x)"
        started.wait(10)
        go_on.wait(10)
        return block("pass")

    def interrupt() -> None:
        started.wait(10)
        os.kill(os.getpid(), signal.SIGINT)

    chat = Chat(block("rlm_query_batched(['below 1', 'below 2'])"), below=child)
    runner = LocalRLMRunner(chat, on_subcall_complete=lambda *_: over.release())
    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        runner.run("c", "t")
    helper.join(10)
    go_on.set()
    assert over.acquire(timeout=10)
    assert over.acquire(timeout=10)
    assert called_again == []


def test_runs_in_two_threads_do_not_mix() -> None:
    meeting = threading.Barrier(2)
    answers: dict[int, str | None] = {}

    def work(number: int) -> None:
        def chat(messages: list[dict[str, str]]) -> str:
            meeting.wait(10)
            if len(messages) == 2:
                return block(f"x = {number}\nfor _ in range(50): print('from', x)")
            return f"FINAL({number if f'from {1 - number}' not in messages[-1]['content'] else 'mixed'})"

        answers[number] = LocalRLMRunner(chat).run("c", "t").final_answer

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == {0: "0", 1: "1"}


def test_a_run_leaves_the_process_as_it_was() -> None:
    main, out = sys.modules["__main__"], sys.stdout
    run(block("import sys\nsys.modules['__main__'].leaked = 1\nprint(1)"), final("x"))
    assert sys.modules["__main__"] is main
    del main.leaked
    assert sys.stdout is out


def test_files_are_kept_only_where_a_place_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLM_RUN_DIR", raising=False)
    rules = {"below": "FINAL(x)"}
    result, _ = run(block("FINAL(rlm_query('below'))"), rules=rules)
    assert result.trajectory_path == ""
    monkeypatch.setenv("RLM_RUN_DIR", str(tmp_path))
    result, _ = run(block("FINAL(rlm_query('below'))"), rules=rules)
    path = Path(result.trajectory_path)
    [folder] = tmp_path.iterdir()
    assert path == folder / "root.jsonl"
    assert {each.name for each in folder.iterdir()} == {"run.json", "root.jsonl", "c1.jsonl"}
    assert read_trajectory(path)


def test_verbose_tells_each_iteration_past_what_is_captured(capfd: pytest.CaptureFixture[str]) -> None:
    run(block("FINAL(rlm_query('below'))"), rules={"below": "FINAL(x)"}, verbose=True)
    assert "[depth=0] iteration=1 code_blocks=1" in capfd.readouterr().err


# -- managed children


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("runs")
        patch.setenv("RLM_RUN_DIR", str(path))
        yield path


class Managed:
    """A runner whose children are processes, and that stays for the module."""

    def __init__(self, server: ModelServer) -> None:
        self.server = server
        self.holds = 0
        self.chat = Chat("")
        config = ManagedChildConfig(
            client_factory=PlainFactory(server.base_url),
            shutdown_grace_s=0.05,
            terminate_grace_s=0.05,
            kill_grace_s=0.4,
        )
        self.runner = LocalRLMRunner(lambda messages: self.chat(messages), managed=config, max_children_total=3)

    @property
    def gate(self) -> str:
        return f"gate-{self.holds}"

    @property
    def hold(self) -> str:
        """Code that starts a child which waits for its model."""
        return f"h = rlm_query('[[block {self.gate}]] held', blocking=False)"

    def run(self, *replies: Any, **options: Any) -> RLMRunResult:
        self.chat = Chat(*replies)
        return self.runner.run("the context", "the task", **options)


@pytest.fixture(scope="module")
def one_managed(run_dir: Path) -> Iterator[Managed]:
    with ModelServer() as server:
        managed = Managed(server)
        # What the first child brings (nursery, threads) belongs to the module, not to a test.
        assert managed.run(block("FINAL(rlm_query('[[reply: FINAL(warm)]]'))")).final_answer == "warm"
        yield managed
        managed.runner.close()


@pytest.fixture
def managed(one_managed: Managed) -> Iterator[Managed]:
    one_managed.holds += 1
    yield one_managed
    one_managed.server.release(one_managed.gate)
    assert one_managed.runner._children is not None
    # No child is left, but the threads that wrote down its end or served its calls may not have ended: what they have
    # open just now is no leak.
    assert one_managed.runner._children.session.supervisor.observers.flush(10)
    one_managed.server._http.end_connections()


def pid_of(managed: Managed) -> int:
    """Wait until the one child asks its model, and return its pid."""
    managed.server.wait_for_request(f"<task>\n[[block {managed.gate}]] held")
    children = managed.runner._children
    assert children is not None
    pid = children.statuses()[-1].pid
    assert pid is not None
    return pid


def test_a_managed_run_starts_children_in_the_background_and_collects_them(managed: Managed) -> None:
    result = managed.run(
        block("hs = rlm_query_batched(['[[reply: FINAL(a)]]', '[[status 400]]'], blocking=False)"),
        block("print([s.state for s in rlm_wait(hs)])\nFINAL(llm_query('x') + hs[0].result())"),
        "direct",
    )
    assert result.final_answer == "directa"
    assert "['completed', 'failed']" not in result.messages[0]["content"]
    good, bad = result.child_traces
    assert (good.depth, good.result_preview, good.error) == (1, "a", None)
    assert (bad.result_preview, bad.error is not None) == (None, True)
    assert result.usage.calls == 4
    assert Path(result.trajectory_path).exists()
    for name in ("blocking=False", "rlm_status", "rlm_wait", "rlm_result", "rlm_cancel", "rlm_send", "rlm_share"):
        assert name in managed.chat.system


def test_each_run_counts_anew_and_a_surplus_is_an_error_in_its_place(managed: Managed) -> None:
    for _ in range(2):
        answers = managed.run(block("FINAL(rlm_query_batched(['[[reply: FINAL(a)]]'] * 4))")).final_answer
        assert answers == "['a', 'a', 'a', 'Error: max_children_total exceeded']"


@pytest.mark.parametrize(
    "finalize", ["FINAL('x')", "x = 'x'; FINAL_VAR('x')", "answer.update(content='x', ready=True)"]
)
def test_children_that_still_run_are_gone_when_the_run_has_its_answer(managed: Managed, finalize: str) -> None:
    pids = []

    def then(messages: list[dict[str, str]]) -> str:
        pids.append(pid_of(managed))
        return block(finalize)

    result = managed.run(block(managed.hold), then)
    assert result.final_answer == "x"
    assert is_gone(pids[0])
    assert result.child_traces[0].error


def test_an_exception_in_the_run_stops_its_children(managed: Managed) -> None:
    pids = []

    def then(messages: list[dict[str, str]]) -> str:
        pids.append(pid_of(managed))
        raise ModelCallError("no luck")

    with pytest.raises(ModelCallError, match="no luck"):
        managed.run(block(managed.hold), then)
    assert is_gone(pids[0])


def test_an_interrupt_of_a_wait_stops_the_children_before_it_comes_through(managed: Managed) -> None:
    pids = []

    def interrupt() -> None:
        pids.append(pid_of(managed))
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        managed.run(block(f"{managed.hold}\nrlm_wait(h)"))
    helper.join(10)
    assert is_gone(pids[0])


def test_a_managed_run_ends_at_its_deadline_in_the_middle_of_a_wait(managed: Managed) -> None:
    result = managed.run(block(f"{managed.hold}\nrlm_wait(h)"), timeout_s=0.3)
    assert (result.final_answer, result.stop_reason) == (None, "deadline")
    assert result.child_traces[0].error


def test_one_managed_run_at_a_time(managed: Managed) -> None:
    def again(messages: list[dict[str, str]]) -> str:
        with pytest.raises(UsageMistake, match="one run at a time"):
            managed.runner.run("c", "t")
        return "FINAL(x)"

    assert managed.run(again).final_answer == "x"


def test_survivors_are_an_error_that_keeps_the_answer_and_the_next_run_confirms(managed: Managed) -> None:
    pids: list[int] = []
    runner = managed.runner

    def then(messages: list[dict[str, str]]) -> str:
        pids.append(pid_of(managed))
        return block("FINAL('kept')")

    assert runner._children is not None
    with nothing_dies(SimpleNamespace(session=runner._children.session)):  # type: ignore[arg-type]
        # Started before: a nursery that is stopped starts nobody.
        os.kill(runner._children.session.supervisor.nursery_pid or 0, signal.SIGCONT)

        def stop_nursery(messages: list[dict[str, str]]) -> str:
            reply = then(messages)
            assert runner._children is not None
            os.kill(runner._children.session.supervisor.nursery_pid or 0, signal.SIGSTOP)
            return reply

        with pytest.raises(ChildCleanupError) as raised:
            managed.run(block(managed.hold), stop_nursery)
        assert raised.value.survivors == (pids[0],)
        assert runner.last_result is not None
        assert runner.last_result.final_answer == "kept"
        with pytest.raises(ChildCleanupError):
            managed.run("FINAL(x)")
    assert managed.run("FINAL(works)").final_answer == "works"
    assert is_gone(pids[0])


def test_managed_and_a_backend_of_ones_own_exclude_each_other() -> None:
    config = ManagedChildConfig(client_factory=ScriptedClient.factory("x"))
    with pytest.raises(ValueError, match="cannot be combined with managed="):
        LocalRLMRunner(Chat(""), backend_factory=lambda *_, **__: None, managed=config)
    with pytest.raises(ConfigurationError, match="depth=1: must be 0 with managed="):
        LocalRLMRunner(Chat(""), depth=1, managed=config)


def test_a_close_in_the_middle_of_a_wait_ends_run_and_children(server: ModelServer, run_dir: Path) -> None:
    """And nothing is left of it: the fixture of every test looks for processes, threads and descriptors."""
    managed = Managed(server)
    raised: list[BaseException] = []

    def work() -> None:
        try:
            managed.run(block(f"{managed.hold}\nrlm_wait(h)"))
        except EpisodeClosing as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    pid = pid_of(managed)
    managed.runner.close()
    assert is_gone(pid)
    thread.join(10)
    assert not thread.is_alive()
    assert len(raised) == 1
    managed.runner.close()
    with pytest.raises(EpisodeClosing):
        managed.run("FINAL(x)")
