"""Promises of `rlm_kernel.loop.runner`: what the loop runs, what it says to the model, when it ends."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlm_kernel.errors import ConfigurationError, ModelCallError, UsageMistake
from rlm_kernel.final_text import FinalCall, find_final
from rlm_kernel.loop.prompts import PromptFeatures, QueryMetadata
from rlm_kernel.loop.runner import LoopResult, LoopRunner, RunEvents
from rlm_kernel.loop.trajectory import IterationRecord, TrajectoryWriter, read_trajectory
from rlm_kernel.values import CodeResult, Completion, FinalAnswer, Message, ModelCall, Usage

Reply = str | None | BaseException | Callable[[list[Message]], str]


class ScriptedModel:
    """Gives the scripted replies one after another and keeps what it was sent. An exception is raised."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.sent: list[list[Message]] = []
        self.models: list[str | None] = []

    def complete(self, messages: list[Message], model: str | None = None) -> Completion:
        self.sent.append(messages)
        self.models.append(model)
        reply = self.replies.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        text: Any = reply(messages) if callable(reply) else reply
        return Completion(text, Usage(1, 10, 3))


class TinyREPL:
    """Runs code by ``exec``, with the final-answer rules that the Protocol asks for."""

    def __init__(self, context: object = "some context") -> None:
        self.context = context
        self.namespace: dict[str, Any] = {
            "context": context,
            "answer": {"content": "", "ready": False},
            "FINAL": lambda value: self._propose(value),
            "llm_query": self._llm_query,
        }
        self.ran: list[str] = []
        self.calls: list[ModelCall] = []
        self._final: FinalAnswer | None = None
        self._proposed: FinalAnswer | None = None

    @property
    def final_answer(self) -> FinalAnswer | None:
        return self._final

    def execute(self, code: str) -> CodeResult:
        self.ran.append(code)
        self._proposed, self.calls = None, []
        out = io.StringIO()
        exception = None
        with contextlib.redirect_stdout(out):
            try:
                exec(compile(code, "<cell>", "exec"), self.namespace)
            except Exception as error:
                exception = f"{type(error).__name__}: {error}"
        if exception is None:
            call = find_final(out.getvalue())
            self._final = self._final or self._proposed or (self.resolve_final(call) if call else None)
        return CodeResult(out.getvalue(), success=exception is None, exception=exception, model_calls=tuple(self.calls))

    def resolve_final(self, call: FinalCall) -> FinalAnswer:
        if call.kind == "FINAL":
            return FinalAnswer(call.argument)
        if call.argument not in self.namespace:
            raise UsageMistake(f"no variable {call.argument!r}; there are: context, answer")
        return FinalAnswer(self.namespace[call.argument])

    def partial_answer(self) -> str | None:
        return self.namespace["answer"]["content"] or None

    def context_metadata(self) -> QueryMetadata:
        return QueryMetadata.of(self.context)

    def _propose(self, value: object) -> None:
        self._proposed = FinalAnswer(value)

    def _llm_query(self, prompt: str) -> str:
        self.calls.append(ModelCall(prompt, "r", Usage(1, 100, 50), 0.1))
        return "r"


def block(code: str) -> str:
    return f"Thinking.\n```repl\n{code}\n```"


def run(*replies: Reply, repl: TinyREPL | None = None, task: str = "The task.", **options: Any) -> LoopResult:
    return LoopRunner(ScriptedModel(*replies), repl or TinyREPL(), **options).run(task)


def last_user_text(model: ScriptedModel, call: int) -> str:
    message = model.sent[call][-1]
    assert message["role"] == "user"
    return message["content"]


def test_a_run_asks_runs_shows_and_ends_with_the_answer_recorded_in_the_repl() -> None:
    model = ScriptedModel(block("x = len(context)\nprint('length', x)"), block("FINAL(x)"))
    result = LoopRunner(model, TinyREPL(), model_name="m").run("How long?")
    assert result.answer == FinalAnswer(12)
    assert result.stop_reason == "final"
    assert result.iterations == 2
    assert model.models == ["m", "m"]
    assert [message["role"] for message in model.sent[0]] == ["system", "user"]
    assert "<task>\nHow long?\n</task>" in model.sent[0][1]["content"]
    assert "of type str, 12 characters" in model.sent[0][1]["content"]
    shown = last_user_text(model, 1)
    assert "print('length', x)" in shown
    assert "Output:\nlength 12" in shown
    assert "Iteration 2 of 30." in shown
    assert "How long?" in shown
    assert [message["role"] for message in result.messages] == ["system", "user", "assistant", "user", "assistant"]


def test_every_block_runs_in_order_in_one_namespace_before_finalization_is_looked_at() -> None:
    repl = TinyREPL()
    text = "```repl\nx = 1\n```\n```bash\nrm -rf x\n```\n~~~python\nFINAL(x)\n~~~\n```PY\ny = x + 1\n```"
    result = run(text, repl=repl)
    assert repl.ran == ["x = 1", "FINAL(x)", "y = x + 1"]
    assert result.answer == FinalAnswer(1)


def test_a_failing_block_does_not_keep_the_next_from_running_and_its_error_is_shown() -> None:
    model = ScriptedModel("```repl\nx = 1\n1/0\n```\n```repl\nprint(x)\n```", block("FINAL(2)"))
    LoopRunner(model, TinyREPL()).run("t")
    shown = last_user_text(model, 1)
    assert "ERROR: ZeroDivisionError" in shown
    assert "Output:\n1" in shown


def test_a_finalization_in_code_that_then_raises_does_not_count() -> None:
    result = run(block("FINAL(1)\n1/0"), block("FINAL(2)"))
    assert result.answer == FinalAnswer(2)
    assert result.iterations == 2


@pytest.mark.parametrize("value", [0, "", False, None])
def test_falsy_answers_are_answers(value: object) -> None:
    result = run(block(f"FINAL({value!r})"))
    assert result.answer is not None
    assert result.answer.value == value
    assert result.stop_reason == "final"


def test_a_final_line_in_a_reply_without_code_is_the_answer() -> None:
    result = run("I am done.\nFINAL(forty (two)) bye")
    assert result.answer == FinalAnswer("forty (two)")
    assert result.stop_reason == "final_in_reply"
    assert run(block("v = [1]"), "FINAL_VAR(v)").answer == FinalAnswer([1])


def test_a_final_line_beside_code_does_not_count_and_the_model_is_told() -> None:
    model = ScriptedModel(block("print(1)") + "\nFINAL(guess)", block("FINAL(2)"))
    result = LoopRunner(model, TinyREPL()).run("t")
    assert result.answer == FinalAnswer(2)
    assert "It was not taken" in last_user_text(model, 1)


@pytest.mark.parametrize(
    "text",
    ["I will call FINAL(x) later.", "> FINAL(x)", "```\nFINAL(x)\n```", "<think>\nFINAL(x)\n</think>\nHm."],
)
def test_text_that_only_mentions_a_final_call_ends_nothing(text: str) -> None:
    result = run(text, block("FINAL('real')"))
    assert result.answer == FinalAnswer("real")
    assert result.iterations == 2


def test_an_unknown_variable_in_a_reply_goes_back_to_the_model_as_an_error() -> None:
    model = ScriptedModel("FINAL_VAR(nope)", block("FINAL(1)"))
    LoopRunner(model, TinyREPL()).run("t")
    assert "Your FINAL_VAR(nope) was not taken: no variable 'nope'; there are: context, answer" in last_user_text(
        model, 1
    )


def test_a_reply_without_a_block_gets_a_reminder_that_says_why() -> None:
    model = ScriptedModel("Let me think.", "```bash\nls\n```", block("FINAL(1)"))
    assert LoopRunner(model, TinyREPL()).run("t").answer == FinalAnswer(1)
    assert "Your reply held no code block" in last_user_text(model, 1)
    assert "tagged `bash`; only blocks tagged ```repl run" in last_user_text(model, 2)


def test_reminders_are_bounded_and_lead_to_the_last_chance() -> None:
    model = ScriptedModel("one", "two", "three", "four", "FINAL(five)")
    result = LoopRunner(model, TinyREPL(), max_iterations=30).run("t")
    assert result.answer == FinalAnswer("five")
    assert result.stop_reason == "exhausted"
    assert result.iterations == 4
    assert "Several replies in a row ran nothing" in last_user_text(model, 4)
    assert "Either write code" not in last_user_text(model, 4)


def test_a_block_starts_the_count_of_reminders_anew() -> None:
    prose = ["prose"] * 3
    result = run(*prose, block("x = 1"), *prose, block("FINAL(x)"))
    assert result.answer == FinalAnswer(1)
    assert result.iterations == 8


@pytest.mark.parametrize("nothing", ["", None, " \n\t", "<think>only thoughts</think>", "<think>cut off"])
def test_an_empty_reply_gets_one_reminder_and_the_second_in_a_row_leads_to_the_last_chance(nothing: str | None) -> None:
    model = ScriptedModel(nothing, block("FINAL(1)"))
    assert LoopRunner(model, TinyREPL()).run("t").answer == FinalAnswer(1)
    assert "Your reply was empty." in last_user_text(model, 1)
    assert all(message["content"].strip() for message in model.sent[1])

    model = ScriptedModel(nothing, nothing, nothing)
    result = LoopRunner(model, TinyREPL()).run("t")
    assert result.answer is None
    assert result.stop_reason == "no_answer"
    assert len(model.sent) == 3


def test_when_iterations_run_out_one_last_call_asks_for_the_answer() -> None:
    model = ScriptedModel(block("print('seen')"), block("y = 2"), "Well:\nFINAL(best (guess)) of mine")
    result = LoopRunner(model, TinyREPL(), max_iterations=2).run("t")
    assert result.answer == FinalAnswer("best (guess)")
    assert result.stop_reason == "exhausted"
    assert result.iterations == 2
    shown = last_user_text(model, 2)
    assert "y = 2" in shown
    assert "REPL iterations have run out" in shown
    assert "FINAL(" in shown
    assert "Iteration 3" not in shown


@pytest.mark.parametrize(
    ("last", "answer"),
    [
        ("FINAL_VAR(v)", "value"),
        ("```repl\nFINAL(v)\n```", "value"),
        ("```repl\nFINAL('text')\n```", "text"),
        ("```repl\nFINAL_VAR('v')\n```", "value"),
        ("```repl\nFINAL(v + 1)\n```", "v + 1"),
        ("So it is FINAL(f(x)).", "f(x)"),
    ],
)
def test_the_last_reply_is_read_generously(last: str, answer: str) -> None:
    """The model was asked for just this, and nothing can follow; its code is not run any more."""
    repl = TinyREPL()
    result = run(block("v = 'value'"), last, repl=repl, max_iterations=1)
    assert result.answer == FinalAnswer(answer)
    assert result.stop_reason == "exhausted"
    assert len(repl.ran) == 1


def test_without_a_final_call_the_whole_last_reply_is_the_answer() -> None:
    result = run(block("x = 1"), "  It is forty-two.\n", max_iterations=1)
    assert result.answer == FinalAnswer("It is forty-two.")
    assert result.stop_reason == "exhausted_fallback"


def test_an_empty_last_reply_falls_back_to_the_draft_in_answer_and_else_to_none() -> None:
    result = run(block("answer['content'] = 'draft'"), "", max_iterations=1)
    assert result.answer == FinalAnswer("draft")
    assert result.stop_reason == "exhausted_fallback"
    assert run(block("x = 1"), None, max_iterations=1).stop_reason == "no_answer"


def test_a_last_reply_that_only_names_an_unknown_variable_yields_to_the_draft() -> None:
    assert run(block("answer['content'] = 'draft'"), "FINAL_VAR(no)", max_iterations=1).answer == FinalAnswer("draft")
    assert run(block("x = 1"), "FINAL_VAR(no)", max_iterations=1).answer == FinalAnswer("FINAL_VAR(no)")


def test_an_unclosed_block_runs_and_the_model_is_told() -> None:
    model = ScriptedModel("```repl\nprint('ran')", block("FINAL(1)"))
    LoopRunner(model, TinyREPL()).run("t")
    assert "Output:\nran" in last_user_text(model, 1)
    assert "was not closed" in last_user_text(model, 1)


def test_a_model_error_passes_through_after_it_was_written_down(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    seen: list[IterationRecord] = []
    with pytest.raises(ModelCallError, match="401"):
        run(
            block("x = 1"),
            ModelCallError("401 Unauthorized"),
            trajectory=TrajectoryWriter(path),
            events=RunEvents(on_iteration=seen.append),
        )
    metadata, first, second, end = read_trajectory(path)
    assert metadata["type"] == "metadata"
    assert first["code_blocks"][0]["code"] == "x = 1"
    assert first["error"] is None
    assert second["iteration"] == 2
    assert second["response"] == ""
    assert second["error"] == end["error"] == "ModelCallError: 401 Unauthorized"
    assert len(second["prompt"]) == 4
    assert end["stop_reason"] == "error"
    assert end["iterations"] == 1
    assert end["usage"] == {"calls": 1, "prompt_tokens": 10, "completion_tokens": 3}
    assert [record.error is None for record in seen] == [True, False]


def test_an_interrupt_passes_through_with_everything_so_far_written_down(tmp_path: Path) -> None:
    class InterruptedREPL(TinyREPL):
        def execute(self, code: str) -> CodeResult:
            if code == "stop":
                raise KeyboardInterrupt
            return super().execute(code)

    path = tmp_path / "t.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(
            block("x = 1"),
            "```repl\ny = 2\n```\n```repl\nstop\n```",
            repl=InterruptedREPL(),
            trajectory=TrajectoryWriter(path),
        )
    _, first, second, end = read_trajectory(path)
    assert [b["code"] for b in first["code_blocks"]] == ["x = 1"]
    assert [b["code"] for b in second["code_blocks"]] == ["y = 2"]
    assert "stop" in second["response"]
    assert second["error"] == end["error"] == "KeyboardInterrupt"


def test_the_trajectory_of_a_whole_run_has_one_line_per_model_call(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    result = run(block("x = 1"), "FINAL(done)", max_iterations=1, trajectory=TrajectoryWriter(path))
    _, first, last, end = read_trajectory(path)
    assert (first["iteration"], first["last_chance"], first["final_answer"]) == (1, False, None)
    assert (last["iteration"], last["last_chance"], last["final_answer"]) == (2, True, "done")
    assert first["prompt"] == result.messages[:2]
    assert last["prompt"] == result.messages[:-1]
    assert (end["stop_reason"], end["final_answer"], end["iterations"]) == ("exhausted", "done", 1)


def test_token_totals_add_up_over_turns_code_and_the_last_chance() -> None:
    result = run(block("llm_query('a')\nllm_query('b')"), block("llm_query('c')"), "FINAL(x)", max_iterations=2)
    assert result.turn_usage == Usage(3, 30, 9)
    assert result.usage == Usage(6, 330, 159)
    assert [record.usage.calls for record in result.records] == [3, 2, 1]


def test_events_come_in_order() -> None:
    heard: list[tuple[Any, ...]] = []
    events = RunEvents(
        on_model_call_start=lambda iteration: heard.append(("call", iteration)),
        on_model_call_end=lambda iteration, completion, seconds: heard.append(
            ("called", iteration, completion.text[:8], seconds >= 0)
        ),
        on_block_start=lambda iteration, index, code: heard.append(("block", iteration, index, code)),
        on_block_end=lambda iteration, index, code, result: heard.append(("ran", iteration, index, result.stdout)),
        on_iteration=lambda record: heard.append(("iteration", record.iteration, record.final)),
    )
    run("```repl\nprint(1)\n```\n```repl\nprint(2)\n```", "FINAL(x)", events=events)
    assert heard == [
        ("call", 1),
        ("called", 1, "```repl\n", True),
        ("block", 1, 0, "print(1)"),
        ("ran", 1, 0, "1\n"),
        ("block", 1, 1, "print(2)"),
        ("ran", 1, 1, "2\n"),
        ("iteration", 1, None),
        ("call", 2),
        ("called", 2, "FINAL(x)", True),
        ("iteration", 2, FinalAnswer("x")),
    ]


def test_messages_appended_before_a_model_call_are_sent_and_stay() -> None:
    steering = iter([[], [{"role": "user", "content": "Hurry."}], []])
    model = ScriptedModel(block("x = 1"), block("x = 2"), block("FINAL(x)"))
    events = RunEvents(before_model_call=lambda messages: messages + next(steering))
    result = LoopRunner(model, TinyREPL(), events=events).run("t")
    assert [any(m["content"] == "Hurry." for m in sent) for sent in model.sent] == [False, True, True]
    assert {"role": "user", "content": "Hurry."} in result.messages
    assert {"role": "user", "content": "Hurry."} in result.records[1].prompt


def test_past_the_cooperative_deadline_no_iteration_starts() -> None:
    model = ScriptedModel()
    result = LoopRunner(model, TinyREPL(), cooperative_deadline=time.monotonic() - 1).run("t")
    assert (result.answer, result.stop_reason, result.iterations, model.sent) == (None, "deadline", 0, [])


def test_the_deadline_is_looked_at_before_the_last_chance_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("rlm_kernel.loop.runner.time.monotonic", lambda: now)

    def slow(messages: list[Message]) -> str:
        nonlocal now
        now = 20.0
        return block("x = 1")

    result = run(slow, max_iterations=1, cooperative_deadline=10.0)
    assert (result.answer, result.stop_reason, result.iterations) == (None, "deadline", 1)


def test_features_and_system_prompt_reach_the_model() -> None:
    model = ScriptedModel("FINAL(1)", "FINAL(1)")
    LoopRunner(model, TinyREPL(), features=PromptFeatures(background=True)).run("t")
    LoopRunner(model, TinyREPL(), system_prompt="My own.").run("t")
    assert "rlm_wait" in model.sent[0][0]["content"]
    assert model.sent[1][0]["content"].startswith("My own.\n")


def test_a_runner_can_run_again_without_a_trace_of_the_run_before() -> None:
    runner = LoopRunner(ScriptedModel("FINAL(1)", "FINAL(2)"), TinyREPL())
    first, second = runner.run("one"), runner.run("two")
    assert (first.answer, second.answer) == (FinalAnswer("1"), FinalAnswer("2"))
    assert second.iterations == len(second.records) == second.usage.calls == 1
    assert len(first.messages) == 3


def test_a_huge_task_never_goes_whole_into_the_messages() -> None:
    model = ScriptedModel(block("x = 1"), block("x = 1"), "FINAL(1)")
    LoopRunner(model, TinyREPL(), max_iterations=2).run("t" * 1_000_000)
    assert max(len(message["content"]) for message in model.sent[-1]) < 10_000


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_a_bad_iteration_limit_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_iterations"):
        LoopRunner(ScriptedModel(), TinyREPL(), max_iterations=value)


reply_parts = st.lists(
    st.sampled_from(
        [
            "```repl\n", "```python\n", "~~~repl\n", "````\n", "```\n", "\n", "x = 1\n", "1 / 0\n", "FINAL(", "FINAL(x)\n",
            "FINAL_VAR(x)\n", "FINAL_VAR(nope)\n", ")", "'''", "<think>", "</think>", "print('FINAL(1)')\n", "> ", "I say ",
            "answer['content'] = 1\n",
        ]
    )
    | st.text(max_size=6),
    max_size=12,
).map("".join)  # fmt: skip


@given(st.lists(reply_parts | st.none(), min_size=12, max_size=12), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_whatever_a_model_replies_the_run_ends_within_its_turns(replies: list[str | None], turns: int) -> None:
    """And only with an answer that is in a reply, in a line of output, or in the REPL."""
    model = ScriptedModel(*replies)
    result = LoopRunner(model, TinyREPL(), max_iterations=turns).run("The task.")
    assert len(model.sent) <= turns + 1
    assert result.iterations <= turns
    assert (result.answer is None) == (result.stop_reason == "no_answer")
    if result.answer is not None and result.stop_reason in ("final", "final_in_reply"):
        assert any("FINAL" in str(reply) for reply in replies)


prose = st.lists(
    st.sampled_from(
        ["I will call FINAL(x) later. ", "As in `FINAL_VAR(x)`, ", "# FINAL(1)\n", "> FINAL(2)\n", "so ", "\n- "]
    ),
    max_size=8,
).map("".join)


@given(prose)
@settings(max_examples=40, deadline=None)
def test_prose_about_final_calls_ends_no_run(text: str) -> None:
    assert run(text, text, block("FINAL('the answer')"), max_iterations=5).answer == FinalAnswer("the answer")


@pytest.mark.parametrize("nothing", [None, "", " \n", "<think>only thoughts</think>"])
def test_a_refused_answer_at_the_last_chance_is_none(nothing: str | None) -> None:
    """A REPL may refuse what has not the form that was asked for; then there is no answer rather than a wrong one."""

    class Refusing(TinyREPL):
        def resolve_final(self, call: FinalCall) -> FinalAnswer:
            raise UsageMistake("not of the form")

    repl = Refusing()
    repl.namespace["answer"]["content"] = "draft"
    result = run("FINAL(no)", nothing or "FINAL(no)", repl=repl, max_iterations=1, answer_form="THE FORM")
    assert (result.answer, result.stop_reason) == (None, "no_answer")
    told = [message["content"] for message in result.messages if message["role"] == "user"]
    assert ["THE FORM" in text for text in told] == [True, True]
