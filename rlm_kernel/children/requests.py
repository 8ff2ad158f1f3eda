"""Serve what children ask for over their channels: to start, look at, wait for, cancel and steer their own children, and to make calls.

Who runs it: the reactor's thread. Nothing here waits: a wait is answered when it is over, a cancel is carried out on a thread of its own.
A child reaches its own descendants only; what it inherits for them (the entry point, the factory, the secrets) comes from its record, never
from its message.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlm_kernel.children.callgate import Permission
from rlm_kernel.children.core import Core, Ref
from rlm_kernel.children.observers import hide_from_debugger
from rlm_kernel.children.records import ChildRecord, ChildSpec
from rlm_kernel.children.registry import Waiter
from rlm_kernel.children.timers import Timer
from rlm_kernel.errors import ChildCleanupError, ChildLimitError, NurseryError, RLMError
from rlm_kernel.values import ChildStatus, CleanupReport
from rlm_kernel.wire import messages as m
from rlm_kernel.wire.channel import close_fds


class Port(Protocol):
    """What the supervisor does on behalf of a caller."""

    def start(self, specs: Sequence[ChildSpec], caller: ChildRecord | None = None) -> list[ChildStatus]: ...
    def status(self, refs: Sequence[Ref] | None = None, caller: ChildRecord | None = None) -> list[ChildStatus]: ...
    def send(self, ref: Ref, text: str, caller: ChildRecord | None = None) -> ChildStatus: ...
    def cancel(self, ref: Ref, grace_s: float | None = None, caller: ChildRecord | None = None) -> CleanupReport: ...


class Requests:
    """See the module's docstring."""

    def __init__(self, core: Core, port: Port) -> None:
        self._core = core
        self._port = port

    def serve(self, child_id: str, message: Any, fds: tuple[int, ...]) -> bool:
        """Serve a message if it is a request. Takes its descriptors over then.

        Returns:
            whether it was one.
        """
        match message:
            case m.AskSpawn():
                self._serve_spawn(child_id, message, fds)
                return True
            case m.AskStatus():
                self._serve_status(child_id, message)
            case m.AskWait():
                self._serve_wait(child_id, message)
            case m.AskCancel():
                self._serve_cancel(child_id, message)
            case m.AskSend():
                self._serve_send(child_id, message)
            case m.AskCall():
                self._serve_call(child_id, message)
            case _:
                return False
        close_fds(fds)
        return True

    def _serve_send(self, child_id: str, ask: m.AskSend) -> None:
        caller = self._core.record_of(child_id)
        self._answer(child_id, ask.request, lambda: [self._port.send((ask.id, None), ask.text, caller)])

    def _serve_spawn(self, child_id: str, ask: m.AskSpawn, fds: tuple[int, ...]) -> None:
        caller = self._core.record_of(child_id)
        if caller is None:
            close_fds(fds)
            return
        specs, rest = [], list(fds)
        for wanted in ask.specs:
            attachments, rest = tuple(rest[: wanted.attachments]), rest[wanted.attachments :]
            specs.append(
                ChildSpec(
                    entry=caller.spec.entry,
                    task=wanted.task,
                    inherited=caller.spec.inherited,
                    attachments=attachments,
                    environ=ask.environ,
                    secret_environ=caller.spec.secret_environ,
                    cwd=ask.cwd,
                    sys_path=ask.sys_path,
                    name=wanted.name,
                    prompt_preview=wanted.prompt_preview,
                    model=wanted.model,
                    timeout_s=wanted.timeout_s,
                )
            )
        close_fds(rest)
        self._answer(child_id, ask.request, lambda: self._port.start(specs, caller))

    def _serve_status(self, child_id: str, ask: m.AskStatus) -> None:
        caller = self._core.record_of(child_id)
        refs = None if ask.ids is None else [(i, None) for i in ask.ids]
        if caller is not None:
            self._answer(child_id, ask.request, lambda: self._port.status(refs, caller))

    def _answer(self, child_id: str, request: int, produce: Callable[[], list[ChildStatus]]) -> None:
        self._core.reactor.tell_child(child_id, self._reply(request, produce))

    @staticmethod
    def _reply(request: int, produce: Callable[[], list[ChildStatus]]) -> m.Reply:
        try:
            return m.Reply(request, statuses=tuple(produce()))
        except RLMError as error:
            return error_reply(request, error)

    def _serve_cancel(self, child_id: str, ask: m.AskCancel) -> None:
        """Carry out a child's cancel on a thread of its own: it waits for exits that this thread must report."""
        caller = self._core.record_of(child_id)
        if caller is None:
            return
        ref = (ask.id, None)

        def cancel() -> None:
            def produce() -> list[ChildStatus]:
                report = self._port.cancel(ref, ask.grace_s, caller)
                if not report.ok:
                    raise ChildCleanupError(report.summary(), report.survivors, report)
                return self._port.status([ref], caller)

            reply = self._reply(ask.request, produce)
            self._core.reactor.post(lambda: self._core.reactor.tell_child(child_id, reply))

        thread = threading.Thread(target=cancel, name="rlm-cancel", daemon=True)
        hide_from_debugger(thread)
        try:
            thread.start()
        except RuntimeError as error:
            refused = NurseryError(f"cannot cancel {ask.id}: there is no thread for it: {error}")
            self._core.reactor.tell_child(child_id, error_reply(ask.request, refused))

    def _serve_call(self, child_id: str, ask: m.AskCall) -> None:
        def answer(reply: m.Reply) -> None:
            self._core.reactor.post(lambda: self._core.reactor.tell_child(child_id, reply))

        with self._core.lock:
            limit = self._core.gate.max_tokens
            granted, refused = m.Reply(ask.request), error_reply(ask.request, budget_error(limit))
            record = self._core.registry.records.get(child_id)
            if record is None or record.ended:
                return
            permission = self._core.gate.ask(child_id, lambda: answer(granted), lambda: answer(refused))
        if permission is not Permission.QUEUED:
            self._core.reactor.tell_child(child_id, granted if permission is Permission.GRANTED else refused)

    def _serve_wait(self, child_id: str, ask: m.AskWait) -> None:
        caller = self._core.record_of(child_id)
        if caller is None:
            return
        refs = [(i, None) for i in ask.ids]

        timer: Timer | None = None

        def reply() -> None:
            self._core.reactor.cancel_timer(timer)
            self._answer(child_id, ask.request, lambda: self._port.status(refs, caller))

        def resumed() -> None:
            self._core.publish(caller)
            self._core.reactor.post(reply)

        waiter = None
        try:
            with self._core.lock:
                records = self._core.find(refs, caller)
                if ask.timeout_s != 0:
                    waiter = self._core.registry.begin_wait(caller, records, ask.any, resumed)
                effects = self._core.registry.take_effects()
        except RLMError as error:
            self._core.reactor.tell_child(child_id, error_reply(ask.request, error))
            return
        if waiter is None:
            reply()
            return
        self._core.publish(caller)
        self._core.carry_out(effects)
        if ask.timeout_s is not None:
            timer = self._core.reactor.call_at(time.monotonic() + ask.timeout_s, lambda: self._wait_timed_out(waiter))

    def _wait_timed_out(self, waiter: Waiter) -> None:
        with self._core.lock:
            self._core.registry.wait_timed_out(waiter)
            effects = self._core.registry.take_effects()
        self._core.carry_out(effects)


def budget_error(limit: int | None) -> ChildLimitError:
    """Say that the token budget is spent."""
    return ChildLimitError(
        "max_total_tokens", limit, f"max_total_tokens exceeded: the episode's budget of {limit} tokens is spent"
    )


def error_reply(request: int, error: RLMError) -> m.Reply:
    """Put an error into a reply, so that the child can raise the same one."""
    limit = error.limit if isinstance(error, ChildLimitError) else ""
    value = error.value if isinstance(error, ChildLimitError) and isinstance(error.value, int | float) else None
    return m.Reply(request, error=str(error), error_class=type(error).__name__, limit=limit, limit_value=value)
