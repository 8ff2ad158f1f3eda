"""The two ways to reach the supervisor: directly in the root process, over the channel in a child. Helpers see one Protocol."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from rlm_kernel import errors
from rlm_kernel.children.core import Ref
from rlm_kernel.children.records import ChildSpec
from rlm_kernel.children.supervisor import Supervisor
from rlm_kernel.children.worker import Link
from rlm_kernel.credentials import without_secrets
from rlm_kernel.session import contexts
from rlm_kernel.session.structured import AnswerForm
from rlm_kernel.session.tasks import CHILD_ENTRY, ChildTask, pack, preview
from rlm_kernel.values import ChildStatus
from rlm_kernel.wire import messages as m
from rlm_kernel.wire.channel import ChannelClosed, close_fds

_log = logging.getLogger(__name__)

MAX_ATTACHMENTS = 200
"""Descriptors that one request of a child may carry; a message takes a few more."""

WATCHED_FROM_S = 1.0
"""Seconds that a wait must be allowed to take for somebody to watch it: a shorter one is over before there is anything to see."""

Watch = Callable[[Sequence[Ref]], AbstractContextManager[object]]
"""Gives the block within which children are waited for, for somebody who looks on."""


@dataclass(frozen=True, slots=True)
class ChildRequest:
    """One child that a helper asks for."""

    prompt: str
    model: str | None = None
    context: Any = None
    timeout_s: float | None = None
    name: str = ""
    form: AnswerForm | None = None


def unwatched(_refs: Sequence[Ref]) -> AbstractContextManager[object]:
    """Nobody looks on."""
    return nullcontext()


class ChildrenPort(Protocol):
    """What helpers and handles need of the supervisor."""

    def start(self, requests: Sequence[ChildRequest]) -> list[ChildStatus]:
        """Start children, all or none."""

    def status(self, refs: Sequence[Ref] | None) -> list[ChildStatus]:
        """Take snapshots; None for all descendants in start order."""

    def wait(self, refs: Sequence[Ref], timeout_s: float | None, any_: bool) -> list[ChildStatus]:
        """Wait until all (or any) have ended, or the time is up."""

    def watching(self, refs: Sequence[Ref]) -> AbstractContextManager[object]:
        """Return a block for a wait that is not one of `wait`: whoever looks on sees it like one."""

    def cancel(self, ref: Ref, grace_s: float | None) -> ChildStatus:
        """Stop one child and its descendants; return when their exits are confirmed."""

    def send(self, ref: Ref, message: str) -> ChildStatus:
        """Hand a message to a child."""

    def call_when_done(self, ref: Ref, callback: Callable[[], None]) -> Callable[[], None] | None:
        """Have ``callback`` called once when the child has ended. Returns what withdraws it; None if it has ended already."""


def _encode_task(request: ChildRequest, hold: contexts.Hold) -> tuple[bytes, tuple[int, ...]]:
    encoded, fds = (None, ()) if request.context is None else contexts.encode(request.context, hold)
    schema_json = None if request.form is None else request.form.schema_json
    return pack(ChildTask.of(request.prompt, request.model, encoded, schema_json)), fds


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where a start is called: what the child takes over."""

    environ: Mapping[str, str]
    cwd: str
    sys_path: tuple[str, ...]

    @classmethod
    def now(cls) -> Surroundings:
        """Take those of this process.

        What is no valid UTF-8 cannot be sent. Variables and path entries of that kind are left out.

        Raises:
            PayloadError: the working directory is gone, or cannot be sent.
        """
        try:
            cwd = os.getcwd()
        except OSError as error:
            raise errors.PayloadError(
                f"the working directory is gone ({error.strerror}); change to another one"
            ) from error
        if not _is_sendable(cwd):
            raise errors.PayloadError(
                f"the name of the working directory is no valid UTF-8: {cwd!r}; change to another one"
            )
        environ = {name: value for name, value in os.environ.items() if _is_sendable(name) and _is_sendable(value)}
        if len(environ) < len(os.environ):
            _log.debug(
                "variables that are no valid UTF-8 are not passed on: %s", sorted(set(os.environ) - set(environ))
            )
        return cls(environ, cwd, tuple(entry for entry in sys.path if _is_sendable(entry)))


def _is_sendable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_all(
    requests: Sequence[ChildRequest], hold: contexts.Hold = contexts.inherited_reference
) -> list[tuple[ChildRequest, bytes, tuple[int, ...]]]:
    """Encode every request, or none: what was opened is closed again if one fails."""
    encoded: list[tuple[ChildRequest, bytes, tuple[int, ...]]] = []
    try:
        for request in requests:
            encoded.append((request, *_encode_task(request, hold)))
    except BaseException:
        for _, _, fds in encoded:
            close_fds(fds)
        raise
    return encoded


class RootPort:
    """The port of the root process.

    Args:
        supervisor: the supervisor.
        hold: knows which contexts children inherit, and hands over those that they shall.
        prepare: called before each start, for what must exist on disk.
        inherited: gives, for a request's model, what its tree inherits (packed); called at each start.
        keep_env: gives the secret-looking variables that code may see.
        model_label: gives the name under which a status shows the model.
        watch: gives the block within which the root waits.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        *,
        hold: contexts.Hold,
        prepare: Callable[[], None],
        inherited: Callable[[str | None], bytes],
        keep_env: Callable[[], tuple[str, ...]],
        model_label: Callable[[str | None], str],
        watch: Watch = unwatched,
    ) -> None:
        self._supervisor = supervisor
        self._hold = hold
        self._prepare = prepare
        self._inherited = inherited
        self._keep_env = keep_env
        self._model_label = model_label
        self._watch = watch

    def start(self, requests: Sequence[ChildRequest]) -> list[ChildStatus]:
        blobs = {model: self._inherited(model) for model in {request.model for request in requests}}
        here = Surroundings.now()
        environ = without_secrets(here.environ, self._keep_env())
        secret_environ = {name: value for name, value in here.environ.items() if name not in environ}
        self._prepare()
        specs = [
            ChildSpec(
                entry=CHILD_ENTRY,
                task=task,
                inherited=blobs[request.model],
                environ=environ,
                secret_environ=secret_environ,
                cwd=here.cwd,
                sys_path=here.sys_path,
                name=request.name,
                prompt_preview=preview(request.prompt),
                model=self._model_label(request.model),
                timeout_s=request.timeout_s,
                attachments=fds,
            )
            for request, task, fds in _encode_all(requests, self._hold)
        ]
        return self._supervisor.start(specs)

    def status(self, refs: Sequence[Ref] | None) -> list[ChildStatus]:
        return self._supervisor.status(refs)

    def wait(self, refs: Sequence[Ref], timeout_s: float | None, any_: bool) -> list[ChildStatus]:
        is_short = timeout_s is not None and timeout_s < WATCHED_FROM_S
        with nullcontext() if is_short else self._watch(refs):
            return self._supervisor.wait(refs, timeout_s, any_=any_)

    def watching(self, refs: Sequence[Ref]) -> AbstractContextManager[object]:
        return self._watch(refs)

    def cancel(self, ref: Ref, grace_s: float | None) -> ChildStatus:
        report = self._supervisor.cancel(ref, grace_s)
        if not report.ok:
            raise errors.ChildCleanupError(report.summary(), report.survivors, report)
        return self._supervisor.status([ref])[0]

    def send(self, ref: Ref, message: str) -> ChildStatus:
        return self._supervisor.send(ref, message)

    def call_when_done(self, ref: Ref, callback: Callable[[], None]) -> Callable[[], None] | None:
        return self._supervisor.call_when_done(ref, callback)


class LinkPort:
    """The port of a child: the same requests, over its channel.

    Args:
        link: the channel.
        model_label: the name under which a status shows the model where a request names none.
    """

    def __init__(self, link: Link, model_label: str | None = None) -> None:
        self._link = link
        self._model_label = model_label
        self._lock = threading.Lock()
        self._callbacks: dict[Ref, list[Callable[[], None]]] = {}

    def start(self, requests: Sequence[ChildRequest]) -> list[ChildStatus]:
        here = Surroundings.now()
        encoded = _encode_all(requests)
        specs = tuple(
            m.ChildRequestSpec(
                task=task,
                name=request.name,
                prompt_preview=preview(request.prompt),
                model=request.model or self._model_label,
                timeout_s=request.timeout_s,
                attachments=len(fds),
            )
            for request, task, fds in encoded
        )
        if sum(len(fds) for _, _, fds in encoded) > MAX_ATTACHMENTS:
            for _, _, fds in encoded:
                close_fds(fds)
            raise errors.PayloadError(
                f"a batch may carry at most {MAX_ATTACHMENTS} large contexts; start it in parts, or share what is the same"
            )
        reply = self._link.request(
            lambda number: m.AskSpawn(number, specs, dict(here.environ), here.cwd, here.sys_path),
            tuple(itertools.chain.from_iterable(fds for _, _, fds in encoded)),
        )
        return list(checked(reply).statuses)

    def status(self, refs: Sequence[Ref] | None) -> list[ChildStatus]:
        ids = None if refs is None else tuple(child_id for child_id, _ in refs)
        return list(checked(self._link.request(lambda number: m.AskStatus(number, ids))).statuses)

    def wait(self, refs: Sequence[Ref], timeout_s: float | None, any_: bool) -> list[ChildStatus]:
        ids = tuple(child_id for child_id, _ in refs)
        return list(checked(self._link.request(lambda number: m.AskWait(number, ids, timeout_s, any_))).statuses)

    def watching(self, refs: Sequence[Ref]) -> AbstractContextManager[object]:
        return unwatched(refs)

    def cancel(self, ref: Ref, grace_s: float | None) -> ChildStatus:
        return checked(self._link.request(lambda number: m.AskCancel(number, ref[0], grace_s))).statuses[0]

    def send(self, ref: Ref, message: str) -> ChildStatus:
        return checked(self._link.request(lambda number: m.AskSend(number, ref[0], message))).statuses[0]

    def call_when_done(self, ref: Ref, callback: Callable[[], None]) -> Callable[[], None] | None:
        with self._lock:
            callbacks = self._callbacks.get(ref)
            if callbacks is not None:
                callbacks.append(callback)
            else:
                callbacks = self._callbacks[ref] = [callback]
                threading.Thread(target=self._call_back, args=(ref,), name="rlm-await", daemon=True).start()

        def withdraw() -> None:
            with self._lock:
                if callback in callbacks:
                    callbacks.remove(callback)

        return withdraw

    def _call_back(self, ref: Ref) -> None:
        """Wait for a child, on a thread of its own, on behalf of all who await it."""
        try:
            self.wait([ref], None, False)
        except (errors.RLMError, ChannelClosed) as error:
            # Whoever is woken asks for the result, and meets the same error in the right place.
            _log.debug("waiting for %s: %s", ref[0], error)
        finally:
            with self._lock:
                callbacks = self._callbacks.pop(ref)
            for callback in callbacks:
                callback()


def checked(reply: m.Reply) -> m.Reply:
    if reply.error is not None:
        _raise_again(reply)
    return reply


def _raise_again(reply: m.Reply) -> NoReturn:
    """Raise in the child what the supervisor raised."""
    text = reply.error or "the request failed"
    if reply.error_class == errors.ChildLimitError.__name__:
        raise errors.ChildLimitError(reply.limit, reply.limit_value, text)
    kind = getattr(errors, reply.error_class, errors.RLMError)
    raise kind(text)
