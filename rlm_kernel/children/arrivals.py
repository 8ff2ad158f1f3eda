"""Take in what the reactor tells: what happened to processes, and what children report. Everything becomes an event of the registry.

Who runs it: the reactor's thread. Nothing here waits.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import time
from collections.abc import Callable
from typing import Any

from rlm_kernel.children.core import Core
from rlm_kernel.children.records import ChildRecord
from rlm_kernel.children.requests import Requests
from rlm_kernel.children.states import Event
from rlm_kernel.wire import messages as m
from rlm_kernel.wire.channel import close_fds

_log = logging.getLogger(__name__)


class Arrivals:
    """See the module's docstring. It is the reactor's `rlm_kernel.children.reactor.Owner`."""

    def __init__(self, core: Core, requests: Requests) -> None:
        self._core = core
        self._requests = requests

    def on_nursery_ready(self, warnings: tuple[str, ...]) -> None:
        for warning in warnings:
            _log.warning("nursery: %s", warning)
            if self._core.on_warning is not None:
                self._core.observers.publish(functools.partial(self._core.on_warning, warning))

    def on_started(self, child_id: str, pid: int, pidfd: int | None, at: float) -> None:
        kept = False

        def change(record: ChildRecord) -> None:
            nonlocal kept
            if not record.exit_seen:
                record.pidfd, kept = pidfd, True
            record.pid = pid
            record.started_wall = time.time() - (time.monotonic() - at)
            record.started_mono = record.active_mono = at
            self._core.registry.apply(record, Event.STARTED)
            waiting.extend(record.undelivered)
            record.undelivered.clear()

        waiting: list[str] = []
        try:
            self._core.apply(child_id, change)
        finally:
            if not kept and pidfd is not None:
                close_fds([pidfd])
        for text in waiting:
            self._core.reactor.tell_child(child_id, m.Steer(text))

    def on_spawn_failed(self, child_id: str, error: str) -> None:
        self._core.apply(child_id, lambda record: self._core.registry.apply(record, Event.SPAWN_FAILED, error=error))

    def on_never_started(self, child_id: str, error: str) -> None:
        self._core.apply(child_id, lambda record: self._core.registry.never_started(record, error))

    def on_timed_out(self, child_id: str) -> None:
        def change(record: ChildRecord) -> None:
            self._core.registry.apply(record, Event.TIMEOUT, error=f"timed out after {record.timeout_s:g} s")

        self._core.apply(child_id, change)

    def on_over_limit(self, child_id: str, private_bytes: int) -> None:
        def change(record: ChildRecord) -> None:
            limit = record.limits.memory_limit_bytes or 0
            text = f"memory limit: it used {private_bytes >> 20} MiB of its own, memory_limit_bytes={limit}"
            self._core.registry.apply(record, Event.LIMIT, graces=record.limits.graces.from_kill(), error=text)

        self._core.apply(child_id, change)

    def on_exited(self, message: m.Exited, error: str | None = None) -> None:
        def change(record: ChildRecord) -> None:
            for tally in self._core.tallies:
                if message.id in tally.ids:
                    tally.asked += message.asked
                    tally.terminated += message.terminated
                    tally.killed += message.killed
                    tally.leftover.update(message.leftover)
            self._core.registry.exited(record, message.code, error or _exit_text(message.code))
            if record.ended and record.exit_seen:
                self._core.close_pidfd(record)

        self._core.apply(message.id, change)

    def on_unconfirmed(self, child_id: str, error: str) -> None:
        def change(record: ChildRecord) -> None:
            self._core.registry.apply(record, Event.LIMIT, error=error)
            self._core.registry.give_up(record)

        self._core.apply(child_id, change)

    def on_broken(self, child_id: str, error: str) -> None:
        self._core.apply(child_id, lambda record: self._core.registry.apply(record, Event.LIMIT, error=error))

    def on_output(self, child_id: str, tail: str) -> None:
        def change(record: ChildRecord) -> None:
            record.log_tail = tail
            record.active_mono = time.monotonic()

        self._core.apply(child_id, change)

    def on_message(self, child_id: str, message: Any, fds: tuple[int, ...]) -> None:
        if self._requests.serve(child_id, message, fds):
            return
        close_fds(fds)
        if isinstance(message, m.CallEnded):
            self._call_ended(child_id, message)
        else:
            self._core.apply(child_id, lambda record: self._note(record, message))

    def _note(self, record: ChildRecord, message: Any) -> None:
        record.active_mono = time.monotonic()
        match message:
            case m.Iteration(number):
                record.iterations = number
            case m.SteerSeen(total):
                record.messages_seen = total
            case m.Failure(error):
                self._core.registry.apply(record, Event.FAILURE, error=error)
            case m.Answer(result):
                if not record.ended and record.result is None:
                    record.result = _truncated(result, record.limits.result_truncation_limit)
                self._core.registry.apply(record, Event.ANSWER)

    def _call_ended(self, child_id: str, message: m.CallEnded) -> None:
        answers: list[Callable[[], None]] = []

        def change(record: ChildRecord) -> None:
            record.active_mono = time.monotonic()
            record.add_usage(message.usage, message.model)
            record.history.note_call(record.active_mono - message.duration_s, record.active_mono)
            if message.permitted:
                answers.extend(self._core.gate.ended(child_id, message.usage))
            else:
                self._core.gate.spent += message.usage.total_tokens

        self._core.apply(child_id, change)
        for answer in answers:
            answer()


def _exit_text(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"the child was killed by signal {-code} ({signal.Signals(-code).name}) before it had an answer"
        return f"the child was killed by signal {-code} before it had an answer"
    return f"the child exited with code {code} before it had an answer"


def _truncated(text: str, limit: int | None) -> str:
    if limit is None or len(text) <= limit:
        return text
    return f"{text[:limit]}\n[... cut: the answer has {len(text)} characters, result_truncation_limit={limit}]"
