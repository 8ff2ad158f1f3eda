"""The iterating loop: ask the model, run the blocks of its reply, show it what came of them, until there is an answer.

The runner knows a model and a REPL only through two small Protocols, does no I/O of its own, and runs in the thread
that calls it. Each model call is one iteration and becomes one line of the trajectory, whatever happens during it.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rlm_kernel.errors import ConfigurationError, UsageMistake
from rlm_kernel.final_text import FinalCall, find_final, find_final_in_reply
from rlm_kernel.loop.parsing import CodeBlock, explain_unrun, runnable_blocks, strip_reasoning
from rlm_kernel.loop.prompts import (
    ContextMetadata,
    PromptFeatures,
    build_last_chance_prompt,
    build_reminder,
    build_rlm_system_prompt,
    build_user_prompt,
    format_observations,
)
from rlm_kernel.loop.trajectory import BlockRecord, IterationRecord, TrajectoryWriter
from rlm_kernel.values import CodeResult, Completion, FinalAnswer, Message, Usage

StopReason = Literal["final", "final_in_reply", "exhausted", "exhausted_fallback", "no_answer", "deadline"]

MAX_REMINDERS = 3
"""Replies in a row that run nothing; after so many reminders the next such reply leads to the last chance."""

_MAX_EMPTY_REMINDERS = 1
_NOTHING_SAID = "(no text)"  # several chat templates refuse an assistant message without content
_FINAL_BESIDE_CODE = (
    "Your reply also had a FINAL line outside its code. It was not taken, because a reply with code is judged by what "
    "the code does. If the output bears it out, send that line again without code."
)
_UNCLOSED = "The last code block was not closed; it was run up to the end of your reply."


class Model(Protocol):
    """Something that completes chat messages."""

    def complete(self, messages: list[Message], model: str | None = None) -> Completion: ...


class REPL(Protocol):
    """Something that runs code in one namespace and records final answers."""

    @property
    def final_answer(self) -> FinalAnswer | None:
        """The answer that code has recorded, if any; not one from a cell that then raised."""

    def execute(self, code: str) -> CodeResult:
        """Run one block; an exception of the code is part of the result."""

    def resolve_final(self, call: FinalCall) -> FinalAnswer:
        """Turn a final call of the reply's text into the answer; raises `UsageMistake` for an unknown variable."""

    def partial_answer(self) -> str | None:
        """Return the non-empty ``answer["content"]`` that was not marked ready, if any."""

    def context_metadata(self) -> ContextMetadata:
        """Return type and size of the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvents:
    """What a caller wants to be told, each optional. They run in the loop's thread; what they raise ends the run.

    Attributes:
        before_model_call: given the messages so far, returns those to send; it may append to them. What it appends
            stays in the conversation.
        on_model_call_start: called as ``(iteration)``.
        on_model_call_end: called as ``(iteration, completion, duration_s)``; not if the call failed.
        on_block_start: called as ``(iteration, index, code)``.
        on_block_end: called as ``(iteration, index, code, result)``.
        on_iteration: called with the finished record, after it was written down; also if the iteration broke off.
    """

    before_model_call: Callable[[list[Message]], list[Message]] | None = None
    on_model_call_start: Callable[[int], None] | None = None
    on_model_call_end: Callable[[int, Completion, float], None] | None = None
    on_block_start: Callable[[int, int, str], None] | None = None
    on_block_end: Callable[[int, int, str, CodeResult], None] | None = None
    on_iteration: Callable[[IterationRecord], None] | None = None


@dataclass(frozen=True, slots=True)
class LoopResult:
    """How a run ended.

    Attributes:
        answer: None if there is none.
        messages: the whole conversation, the last reply included.
        iterations: turns made, the last chance not counted.
        stop_reason: ``final``: recorded in the REPL. ``final_in_reply``: in a reply without code. ``exhausted``: given
            as ``FINAL(...)`` at the last chance. ``exhausted_fallback``: the whole last reply, if there is no code in it, or
            the draft in ``answer["content"]``. ``no_answer``: not even that. ``deadline``: the cooperative deadline passed.
        usage: the loop's model calls and those that code made (as far as `CodeResult.model_calls` lists them).
        turn_usage: the loop's model calls alone.
        records: one per iteration, the last chance included.
    """

    answer: FinalAnswer | None
    messages: list[Message]
    iterations: int
    stop_reason: StopReason
    usage: Usage = field(default_factory=Usage)
    turn_usage: Usage = field(default_factory=Usage)
    records: tuple[IterationRecord, ...] = ()


class _Draft:
    """An iteration in the making; what is known of it can be written down at any moment."""

    def __init__(self, iteration: int, *, last_chance: bool) -> None:
        self.iteration = iteration
        self.last_chance = last_chance
        self.prompt: list[Message] = []
        self.response = ""
        self.reply = ""
        self.blocks: list[BlockRecord] = []
        self.final: FinalAnswer | None = None
        self.usage = Usage()
        self.error: str | None = None
        self._started_at = time.time()
        self._started = time.monotonic()

    def freeze(self) -> IterationRecord:
        return IterationRecord(
            iteration=self.iteration,
            prompt=tuple(self.prompt),
            response=self.response,
            blocks=tuple(self.blocks),
            final=self.final,
            usage=sum((call.usage for block in self.blocks for call in block.result.model_calls), self.usage),
            error=self.error,
            started_at=self._started_at,
            duration_s=time.monotonic() - self._started,
            last_chance=self.last_chance,
        )


class LoopRunner:
    """Run one task to its answer. One instance serves one run at a time, in the calling thread.

    Args:
        model: makes the completions.
        repl: runs the code.
        model_name: passed to each model call.
        max_iterations: turns in which code may run.
        features: what the namespace has, for the system prompt; None for the plain blocking set.
        system_prompt: None for the default; see `build_rlm_system_prompt`.
        trajectory: where iterations are written down.
        events: what the caller wants to be told.
        cooperative_deadline: `time.monotonic` value after which no further iteration starts.
        max_reminders: see `MAX_REMINDERS`.
        task_variable: the expression under which a task too long to show is whole in the REPL.
        answer_form: what the answer must look like, in words; told with the task and at the last chance.
        ended_by_others: exceptions by which others end the run. They know why, so the end line is left to them.

    Raises:
        ConfigurationError: ``max_iterations`` is not a whole number of at least 1.
    """

    def __init__(
        self,
        model: Model,
        repl: REPL,
        *,
        model_name: str | None = None,
        max_iterations: int = 30,
        features: PromptFeatures | None = None,
        system_prompt: str | None = None,
        trajectory: TrajectoryWriter | None = None,
        events: RunEvents | None = None,
        cooperative_deadline: float | None = None,
        max_reminders: int = MAX_REMINDERS,
        task_variable: str = "context",
        answer_form: str = "",
        ended_by_others: tuple[type[BaseException], ...] = (),
    ) -> None:
        if isinstance(max_iterations, bool) or not isinstance(max_iterations, int) or max_iterations < 1:
            raise ConfigurationError("max_iterations", max_iterations, "must be a whole number of at least 1")
        self._model = model
        self._repl = repl
        self._model_name = model_name
        self._max_iterations = max_iterations
        self._features = features
        self._system_prompt = system_prompt
        self._trajectory = trajectory
        self._events = events or RunEvents()
        self._deadline = cooperative_deadline
        self._max_reminders = max_reminders
        self._task_variable = task_variable
        self._ended_by_others = ended_by_others
        self._answer_form = f"\n\n{answer_form}" if answer_form else ""
        self._messages: list[Message] = []
        self._records: list[IterationRecord] = []
        self._turn_usage = Usage()
        self._iterations = 0

    def run(self, task: str) -> LoopResult:
        """Run the loop until there is an answer, the iterations run out, or something breaks.

        Args:
            task: what the model is to do.

        Returns:
            The answer, the conversation, and how it came about.

        Raises:
            ModelCallError: a model call failed. The trajectory then holds the iteration with the error, and its end
                line. The same is true of anything else that passes through, `KeyboardInterrupt` included.
        """
        self._messages, self._records, self._turn_usage, self._iterations = [], [], Usage(), 0
        try:
            answer, reason = self._loop(task)
        except BaseException as error:
            if not isinstance(error, self._ended_by_others):
                self._write_end("error", None, _describe(error))
            raise
        self._write_end(reason, answer, None)
        return LoopResult(
            answer, list(self._messages), self._iterations, reason, self._usage, self._turn_usage, tuple(self._records)
        )

    @property
    def _usage(self) -> Usage:
        return sum((record.usage for record in self._records), Usage())

    def _loop(self, task: str) -> tuple[FinalAnswer | None, StopReason]:
        metadata = self._repl.context_metadata()
        self._messages = build_rlm_system_prompt(self._system_prompt, metadata, self._features)
        first = build_user_prompt(
            task,
            0,
            query_metadata=metadata,
            max_iterations=self._max_iterations,
            task_variable=self._task_variable,
        )
        self._messages.append({**first, "content": first["content"] + self._answer_form})
        fruitless = empty = 0
        while True:
            if self._past_deadline():
                return None, "deadline"
            draft, note, blocks = self._turn()
            if draft.final is not None:
                return draft.final, "final" if blocks else "final_in_reply"
            fruitless = 0 if blocks else fruitless + 1
            empty = 0 if draft.reply.strip() else empty + 1
            stalled = fruitless > self._max_reminders or empty > _MAX_EMPTY_REMINDERS
            if stalled or self._iterations >= self._max_iterations:
                return self._last_chance(task, note, "stalled" if stalled else "iterations")
            feedback = note if blocks else build_reminder(note, empty=not draft.reply.strip())
            following = build_user_prompt(task, self._iterations, max_iterations=self._max_iterations)
            self._messages.append({"role": "user", "content": f"{feedback}\n\n{following['content']}"})

    def _past_deadline(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _turn(self) -> tuple[_Draft, str | None, bool]:
        """Make one iteration; return it, what the model should be told about it, and whether code ran."""
        with _Iteration(self, last_chance=False) as draft:
            self._call_model(draft)
            self._iterations += 1
            blocks = runnable_blocks(draft.reply)
            for index, block in enumerate(blocks):
                self._run_block(draft, index, block.code)
            # Only now: every block of the reply has run.
            draft.final = self._repl.final_answer
            note = self._observe(draft, blocks) if blocks else self._finish_without_code(draft)
            return draft, note, bool(blocks)

    def _call_model(self, draft: _Draft) -> None:
        events = self._events
        if events.before_model_call is not None:
            self._messages = list(events.before_model_call(list(self._messages)))
        draft.prompt = list(self._messages)
        if events.on_model_call_start is not None:
            events.on_model_call_start(draft.iteration)
        started = time.monotonic()
        completion = self._model.complete(list(self._messages), model=self._model_name)
        duration_s = time.monotonic() - started
        self._turn_usage += completion.usage
        draft.usage = completion.usage
        text: Any = completion.text  # a provider may give None where there was only reasoning or a refusal
        draft.response = text if isinstance(text, str) else ""
        draft.reply = strip_reasoning(draft.response)
        self._messages.append({"role": "assistant", "content": draft.reply if draft.reply.strip() else _NOTHING_SAID})
        if events.on_model_call_end is not None:
            events.on_model_call_end(draft.iteration, completion, duration_s)

    def _run_block(self, draft: _Draft, index: int, code: str) -> None:
        if self._events.on_block_start is not None:
            self._events.on_block_start(draft.iteration, index, code)
        result = self._repl.execute(code)
        draft.blocks.append(BlockRecord(code, result))
        if self._events.on_block_end is not None:
            self._events.on_block_end(draft.iteration, index, code, result)

    def _observe(self, draft: _Draft, blocks: list[CodeBlock]) -> str:
        notes = [
            format_observations([block.result for block in draft.blocks], [block.code for block in draft.blocks]),
            None if blocks[-1].closed else _UNCLOSED,
            explain_unrun(draft.reply),
            _FINAL_BESIDE_CODE if find_final_in_reply(draft.reply) is not None else None,
        ]
        return "\n\n".join(note for note in notes if note)

    def _finish_without_code(self, draft: _Draft) -> str | None:
        """Take the final call of a reply without code, or say what is wrong with the reply, if that is known."""
        explanation = explain_unrun(draft.reply)
        call = find_final_in_reply(draft.reply)
        if call is not None and draft.final is None:
            try:
                draft.final = self._repl.resolve_final(call)
            except (UsageMistake, NameError) as error:
                explanation = f"Your {call.kind}({call.argument}) was not taken: {error}"
        return explanation

    def _last_chance(
        self, task: str, note: str | None, why: Literal["iterations", "stalled"]
    ) -> tuple[FinalAnswer | None, StopReason]:
        if self._past_deadline():
            return None, "deadline"
        prompt = build_last_chance_prompt(task, why) + self._answer_form
        self._messages.append({"role": "user", "content": f"{note}\n\n{prompt}" if note else prompt})
        with _Iteration(self, last_chance=True) as draft:
            self._call_model(draft)
            draft.final = self._answer_in_last_reply(draft.reply)
            if draft.final is not None:
                return draft.final, "exhausted"
            # Code that nobody runs any more is no answer.
            draft.final = self._fallback("" if runnable_blocks(draft.reply) else draft.reply.strip())
            return draft.final, "no_answer" if draft.final is None else "exhausted_fallback"

    def _fallback(self, whole: str) -> FinalAnswer | None:
        """Take the whole last reply, or the draft in ``answer``, if the REPL takes it for an answer.

        A reply that only names an unknown variable is no answer, if there is a draft of one.
        """
        partial = self._repl.partial_answer()
        for text in (partial, whole) if partial and find_final_in_reply(whole) else (whole, partial):
            if text:
                try:
                    return self._repl.resolve_final(FinalCall("FINAL", text))
                except UsageMistake:  # it does not have the form that was asked for
                    continue
        return None

    def _answer_in_last_reply(self, reply: str) -> FinalAnswer | None:
        """Read the answer out of the last reply: a line, else a call in a block, else a call in the middle of a line.

        More than during the run is accepted, since the model was asked for just this and nothing can follow.
        """
        for call in (find_final_in_reply(reply), *_calls_in_code(reply), find_final_in_reply(reply, anywhere=True)):
            if call is not None:
                try:
                    return self._repl.resolve_final(call)
                except (UsageMistake, NameError):
                    continue
        return None

    def _write_end(self, reason: str, answer: FinalAnswer | None, error: str | None) -> None:
        if self._trajectory is not None:
            self._trajectory.write_end(
                stop_reason=reason, final=answer, iterations=self._iterations, usage=self._usage, error=error
            )

    def _record(self, draft: _Draft) -> None:
        record = draft.freeze()
        self._records.append(record)
        if self._trajectory is not None:
            self._trajectory.write_iteration(record)
        if self._events.on_iteration is not None:
            self._events.on_iteration(record)


class _Iteration:
    """The scope of one iteration: however it is left, it is written down, with what is known of it."""

    def __init__(self, runner: LoopRunner, *, last_chance: bool) -> None:
        self._runner = runner
        self._draft = _Draft(runner._iterations + 1, last_chance=last_chance)

    def __enter__(self) -> _Draft:
        return self._draft

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._draft.error = _describe(error)
        self._runner._record(self._draft)


def _calls_in_code(reply: str) -> list[FinalCall]:
    """Read ``FINAL(...)`` lines of blocks that will not run any more: a literal is its value, a name a variable."""
    calls = []
    for block in runnable_blocks(reply):
        call = find_final(block.code)
        if call is None:
            continue
        if call.kind == "FINAL" and call.argument.isidentifier() and call.argument not in {"True", "False", "None"}:
            calls.append(FinalCall("FINAL_VAR", call.argument))
        elif call.kind == "FINAL":
            calls.append(FinalCall("FINAL", _literal(call.argument)))
        else:
            calls.append(call)
    return calls


def _literal(source: str) -> str:
    try:
        return str(ast.literal_eval(source))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return source


def _describe(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
