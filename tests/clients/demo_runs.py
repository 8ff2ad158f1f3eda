"""Run the demo model as the runner does, with its code really executed and children that are runs in this process."""

from __future__ import annotations

import contextlib
import io
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlm_kernel.clients.demo import DemoClient
from rlm_kernel.errors import ChildFailedError, ChildLimitError
from rlm_kernel.final_text import find_final_in_reply
from rlm_kernel.loop.parsing import runnable_blocks
from rlm_kernel.loop.prompts import (
    PromptFeatures,
    QueryMetadata,
    build_last_chance_prompt,
    build_rlm_system_prompt,
    build_user_prompt,
    format_observations,
)
from rlm_kernel.values import ChildState, ChildStatus, CodeResult, Message

NOTHING = object()
"""Stands for: the namespace has no `context`."""


@dataclass
class Run:
    """What one run did: its replies, what its code printed, its answer, and the runs of its children."""

    task: str
    context: Any
    replies: list[str] = field(default_factory=list)
    results: list[CodeResult] = field(default_factory=list)
    answer: Any = NOTHING
    children: list[Run] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    @property
    def number(self) -> int:
        match = re.search(r"(?:occurs |^)(\d+) ", str(self.answer))
        assert match, f"no number in {self.answer!r}"
        return int(match[1])

    @property
    def output(self) -> str:
        return "".join(result.stdout for result in self.results)


ChildEnd = Callable[[int, Any], tuple[ChildState, Any]]
"""Number of a child (from 1) and its answer → how it ends, and with which answer."""


def completes(number: int, answer: Any) -> tuple[ChildState, Any]:
    return ChildState.COMPLETED, answer


class Helpers:
    """The fake helpers of one run's namespace."""

    def __init__(self, run: Run, child_end: ChildEnd, child_limit: int) -> None:
        self.run, self.child_end, self.child_limit = run, child_end, child_limit
        self.statuses: dict[str, ChildStatus] = {}

    def namespace(self, *, background: bool) -> dict[str, Any]:
        names = {"FINAL": self.final}
        if background:
            names |= {name: getattr(self, name) for name in ("rlm_query", "rlm_status", "rlm_wait", "rlm_result")}
        return names | ({} if self.run.context is NOTHING else {"context": self.run.context})

    def final(self, value: Any) -> str:
        self.run.answer = value
        return f"FINAL({value})"

    def rlm_query(
        self, prompt: str, model: str | None = None, *, blocking: bool = True, context: Any = None, **more: Any
    ):
        assert blocking is False, "the demo model never blocks the parent"
        assert set(more) <= {"name"}
        number = len(self.run.children) + 1
        if number > self.child_limit:
            raise ChildLimitError("max_children_total", self.child_limit)
        child = drive(prompt, prompt if context is None else context, background=False)
        self.run.children.append(child)
        self.run.events.append("start")
        state, answer = self.child_end(number, child.answer)
        status = ChildStatus(f"c{number}", more["name"], 1, None, state, result=str(answer), error="FINAL(no)\nat all")
        self.statuses[status.id] = status
        return status.id

    def rlm_status(self, handle: str) -> ChildStatus:
        self.run.events.append("status")
        return self.statuses[handle]

    def rlm_wait(self, handles: list[str], timeout_s: float | None = None) -> list[ChildStatus]:
        self.run.events.append("wait")
        return [self.statuses[handle] for handle in handles]

    def rlm_result(self, handle: str) -> str:
        status = self.statuses[handle]
        if status.state is not ChildState.COMPLETED:
            raise ChildFailedError("it has no answer", status)
        assert status.result is not None
        return status.result


def execute(code: str, namespace: dict[str, Any]) -> CodeResult:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(code, "<cell>", "exec"), namespace)
        except Exception as error:
            return CodeResult(out.getvalue(), traceback.format_exc(), success=False, exception=repr(error))
    return CodeResult(out.getvalue())


def opening(task: str, context: Any, *, background: bool) -> list[Message]:
    metadata = QueryMetadata.of(None if context is NOTHING else context)
    features = PromptFeatures(background=background, max_depth=2 if background else 1)
    return [*build_rlm_system_prompt(None, metadata, features), build_user_prompt(task, query_metadata=metadata)]


def drive(
    task: str,
    context: Any = NOTHING,
    *,
    background: bool = True,
    child_end: ChildEnd = completes,
    child_limit: int = 100,
    names: dict[str, Any] | None = None,
    max_iterations: int = 6,
) -> Run:
    """Run the demo model on a task, as the runner does. A new client makes every reply: it must be stateless."""
    run = Run(task, context)
    namespace = Helpers(run, child_end, child_limit).namespace(background=background) | (names or {})
    messages = opening(task, context, background=background)
    for iteration in range(1, max_iterations + 1):
        reply = DemoClient().complete(list(messages)).text
        run.replies.append(reply)
        blocks = runnable_blocks(reply)
        if not blocks:
            call = find_final_in_reply(reply)
            assert call, f"neither code nor an answer: {reply}"
            run.answer = call.argument
            return run
        assert all(block.closed for block in blocks)
        codes = [block.code for block in blocks]
        results = [execute(code, namespace) for code in codes]
        run.results += results
        if run.answer is not NOTHING and all(result.success for result in results):
            return run
        messages.append({"role": "assistant", "content": reply})
        observed = f"{format_observations(results, codes)}\n\n"
        if iteration == max_iterations:
            observed += build_last_chance_prompt(task)
        else:
            observed += build_user_prompt(task, iteration, max_iterations=max_iterations)["content"]
        messages.append({"role": "user", "content": observed})
    run.replies.append(DemoClient().complete(messages).text)
    call = find_final_in_reply(run.replies[-1])
    run.answer = call.argument if call else run.replies[-1]
    return run
