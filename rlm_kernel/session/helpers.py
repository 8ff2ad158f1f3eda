"""The functions that code finds in its namespace. The same ones serve the notebook and every child.

What differs between the two comes in through `HelperEnvironment`: how to reach the supervisor, how to call a model, and
what the episode allows right now.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlm_kernel.children.core import Ref
from rlm_kernel.environment.finalization import Finalization
from rlm_kernel.errors import (
    ChildFailedError,
    ChildLimitError,
    PayloadError,
    PeerFailed,
    RLMError,
    UsageMistake,
    WaitTimedOut,
)
from rlm_kernel.session.contexts import SharedContext
from rlm_kernel.session.handles import ChildHandle, answer_of, check_message, check_timeout
from rlm_kernel.session.models import ModelAccess
from rlm_kernel.session.ports import ChildrenPort, ChildRequest
from rlm_kernel.session.structured import AnswerForm, answer_form, ask_directly
from rlm_kernel.session.tasks import sendable_text
from rlm_kernel.values import ChildStatus

HELPER_NAMES = (
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
    "FINAL",
    "FINAL_VAR",
    "SHOW_VARS",
)
"""The functions that are injected. ``answer`` and ``context`` come beside them."""

HIDDEN_NAMES = frozenset((*HELPER_NAMES, "context", "answer", "In", "Out", "exit", "quit", "open", "get_ipython"))
"""Names in a namespace that are not the user's own variables."""

HandleLike = ChildHandle | str


def _plainly(helper: Callable[..., Any]) -> Callable[..., Any]:
    """Let errors of ours come out of a helper without our frames: what is wrong stands in the message, and who called it above."""

    @functools.wraps(helper)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return helper(*args, **options)
        except RLMError as error:
            raise error.with_traceback(None) from None

    return call


class AnswerForms:
    """Which answers are to become objects, by child, for whoever asks with an id instead of a handle. One episode's."""

    def __init__(self) -> None:
        self._episode_id = ""
        self._forms: dict[str, AnswerForm] = {}

    def keep(self, handle: ChildHandle, form: AnswerForm) -> None:
        if handle.episode_id != self._episode_id:
            self._episode_id, self._forms = handle.episode_id, {}
        self._forms[handle.id] = form

    def of(self, child_id: str) -> AnswerForm | None:
        return self._forms.get(child_id)


@dataclass(frozen=True, slots=True)
class HelperEnvironment:
    """Where the helpers run.

    Attributes:
        children: gives the port to the supervisor; raises `ManagedModeRequired` where there is none.
        models: gives access to the model; raises `ModelNotConfigured` where there is none.
        depth: 0 in the root.
        max_depth: gives the depth limit: children exist at depths 1 … ``max_depth - 1``.
        episode_id: gives the id of the running episode.
        may_start: called before a nonblocking start; raises if the episode does not allow it.
        may_block: called before a blocking query; raises if the episode does not allow it.
        on_share: told of each shared context.
        batch_limit: gives how many children one batch may start, None for no limit.
        forms: what answers that were asked for with a schema become.
    """

    children: Callable[[], ChildrenPort]
    models: Callable[[], ModelAccess]
    depth: int
    max_depth: Callable[[], int]
    episode_id: Callable[[], str]
    may_start: Callable[[], None] = lambda: None
    may_block: Callable[[], None] = lambda: None
    on_share: Callable[[SharedContext], None] = lambda _shared: None
    batch_limit: Callable[[], int | None] = lambda: None
    forms: AnswerForms = field(default_factory=AnswerForms)


class Helpers:
    """The injected functions, as methods."""

    def __init__(self, environment: HelperEnvironment, finalization: Finalization) -> None:
        self._env = environment
        self._finalization = finalization

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return what is put into the namespace."""
        final = self._finalization
        own: dict[str, Callable[..., Any]] = {
            "FINAL": final.FINAL,
            "FINAL_VAR": final.FINAL_VAR,
            "SHOW_VARS": final.SHOW_VARS,
        }
        return {name: own[name] if name in own else _plainly(getattr(self, name)) for name in HELPER_NAMES}

    # -- direct calls

    def llm_query(self, prompt: str, model: str | None = None) -> str:
        """Ask a model one question and return its answer. No REPL, no recursion.

        Args:
            prompt: the whole message.
            model: another model of the same client, None for the configured one.

        Raises:
            ModelNotConfigured: no model is configured; the message shows the line to type.
            ModelCallError: the call failed after the client's own retries.
        """
        self._env.may_block()
        return self._env.models().ask(_check_prompt(prompt), _check_model(model))

    def llm_query_batched(self, prompts: Sequence[str], model: str | None = None) -> list[str]:
        """Ask a model several questions at once. Answers come in the order of the prompts; a failed one is ``Error: …``."""
        self._env.may_block()
        checked = [_check_prompt(prompt, f"prompts[{i}]") for i, prompt in enumerate(_check_batch(prompts))]
        return self._env.models().ask_batch(checked, _check_model(model))

    # -- recursive calls

    def rlm_query(
        self,
        prompt: str,
        model: str | None = None,
        *,
        blocking: bool = True,
        context: Any = None,
        schema: Any = None,
        timeout_s: float | None = None,
        name: str | None = None,
    ) -> Any:
        """Give a task to a recursive run of its own: a child with its own REPL, in its own process.

        Args:
            prompt: the task.
            model: model for the child, None for the configured one.
            blocking: wait and return the answer; with False return a `ChildHandle` at once.
            context: what the child finds in its ``context``; the prompt if None.
            schema: what the answer must look like: a pydantic model or any type that pydantic can check (``list[int]``, a
                dataclass, …), or a JSON schema as a dict. The child's answer is checked against it, and the child told
                what is wrong while it has iterations left; what is returned here is the built object.
            timeout_s: wall-clock seconds that the child may take, None for the configured limit.
            name: a readable name for displays.

        Returns:
            the answer (its text, or the object that ``schema`` describes), or a handle.

        Raises:
            ManagedModeRequired, ModelNotConfigured: no model is configured; the message shows the line to type.
            UsageMistake: an argument is wrong; the message names it.
            ChildFailedError: the child ended without an answer, or without one that fits ``schema`` (blocking only).
            ChildLimitError: a limit is reached (nonblocking; a blocking call returns ``Error: … exceeded``).
        """
        request = self._request(prompt, model, context, answer_form(schema), timeout_s, name)
        if not blocking:
            return self._start([request])[0]
        self._env.may_block()
        if self._at_depth_limit():
            return self._ask_directly(request)
        try:
            handle = self._begin([request])[0]
        except ChildLimitError as error:
            return f"Error: {error.limit} exceeded"
        return answer_of(handle.wait(), request.form)

    def rlm_query_batched(
        self,
        prompts: Sequence[str],
        model: str | None = None,
        *,
        blocking: bool = True,
        context: Any = None,
        schema: Any = None,
        timeout_s: float | None = None,
        name: str | None = None,
    ) -> Any:
        """Give several tasks to children that run side by side.

        Args:
            prompts: one task per child.
            context: the same context for all, or a list with one entry per prompt.
            schema: the same schema for all, or a list with one entry per prompt.

        The other arguments are those of `rlm_query`; ``name`` gets the position appended.

        Returns:
            the answers in order, where a failed or surplus entry is ``Error: …``; or handles. A nonblocking batch
            starts all of its children or none.
        """
        forms = _forms_for(_check_batch(prompts), schema)
        with contextlib.ExitStack() as stack:
            is_one = not (context is None or isinstance(context, list | SharedContext))
            if is_one and len(prompts) > 1 and not self._at_depth_limit():
                # One snapshot for all, rather than a copy for each. Let go when every child has its own descriptor of it.
                context = stack.enter_context(contextlib.closing(SharedContext(context)))
            contexts = _contexts_for(prompts, context)
            return self._batch(prompts, model, contexts, blocking, forms, timeout_s, name)

    def _batch(
        self,
        prompts: Sequence[str],
        model: str | None,
        contexts: list[Any],
        blocking: bool,
        forms: Sequence[AnswerForm | None],
        timeout_s: float | None,
        name: str | None,
    ) -> Any:
        requests = [
            self._request(p, model, c, form, timeout_s, None if name is None else f"{name}-{i + 1}", f"prompts[{i}]")
            for i, (p, c, form) in enumerate(zip(prompts, contexts, forms, strict=True))
        ]
        if not blocking:
            return self._start(requests)
        self._env.may_block()
        if self._at_depth_limit():
            return self._ask_batch_directly(requests, model)
        return self._run_batch(requests)

    def _ask_directly(self, request: ChildRequest) -> Any:
        """At the depth limit, ask the model itself."""
        models = self._env.models()
        if request.form is None:
            return models.ask(_with_context(request), request.model)
        [outcome] = ask_directly(
            lambda prompts: [models.ask(prompt, request.model) for prompt in prompts],
            [_with_context(request)],
            [request.form],
        )
        if isinstance(outcome, ChildFailedError):
            raise outcome
        return outcome

    def _ask_batch_directly(self, requests: Sequence[ChildRequest], model: str | None) -> list[Any]:
        models = self._env.models()
        outcomes = ask_directly(
            lambda prompts: models.try_batch(prompts, model),
            [_with_context(request) for request in requests],
            [request.form for request in requests],
        )
        return [f"Error: {outcome}" if isinstance(outcome, Exception) else outcome for outcome in outcomes]

    def _run_batch(self, requests: list[ChildRequest]) -> list[Any]:
        """Start what the limits allow, one by one, and wait for all of it: one failed or surplus entry never loses the others."""
        started: list[ChildHandle | str] = []
        limit = self._env.batch_limit()
        for position, request in enumerate(requests):
            try:
                if limit is not None and position >= limit:
                    raise ChildLimitError("max_children_per_batch", limit)
                started += self._begin([request])
            except ChildLimitError as error:
                started.append(f"Error: {error.limit} exceeded")
            except (PayloadError, PeerFailed) as error:
                started.append(f"Error: {error}")
        handles = [entry for entry in started if isinstance(entry, ChildHandle)]
        statuses = iter(self._env.children().wait([h.ref for h in handles], None, False) if handles else [])
        return [
            _answer_or_error(next(statuses), request.form) if isinstance(entry, ChildHandle) else entry
            for entry, request in zip(started, requests, strict=True)
        ]

    # -- looking at children

    def rlm_status(self, handle: HandleLike | None = None) -> ChildStatus | list[ChildStatus]:
        """Return a snapshot of one child, or of all descendants in start order. Never blocks."""
        if handle is None:
            return self._env.children().status(None)
        return self._env.children().status([_ref(handle)])[0]

    def rlm_wait(
        self,
        handle_or_handles: HandleLike | Iterable[HandleLike],
        timeout_s: float | None = None,
        *,
        return_when: str = "all",
    ) -> ChildStatus | list[ChildStatus]:
        """Wait for children. A timeout never cancels anything: the status is then simply not done.

        Args:
            handle_or_handles: one handle (or id), or several.
            timeout_s: seconds to wait, None for as long as it takes.
            return_when: ``"all"`` or ``"any"``.

        Returns:
            the status, or the statuses in the order of the handles.
        """
        if return_when not in ("all", "any"):
            raise UsageMistake(f'return_when={return_when!r}: must be "all" or "any"')
        timeout = check_timeout(timeout_s)
        several: Any = handle_or_handles
        single = isinstance(several, ChildHandle | str) or not isinstance(several, Iterable)
        refs = [_ref(handle) for handle in ([several] if single else several)]
        if not refs:
            return []
        distinct = list(dict.fromkeys(refs))
        statuses = dict(zip(distinct, self._env.children().wait(distinct, timeout, return_when == "any"), strict=True))
        return statuses[refs[0]] if single else [statuses[ref] for ref in refs]

    def rlm_result(self, handle: HandleLike) -> Any:
        """Return a child's answer: its text, or the object that it builds where a schema was given.

        Raises:
            ResultNotReady: it has not ended yet.
            ChildFailedError: it ended without an answer.
        """
        ref = _ref(handle)
        return answer_of(self._env.children().status([ref])[0], self._env.forms.of(ref[0]))

    def rlm_as_completed(self, handles: Iterable[HandleLike], timeout_s: float | None = None) -> Iterator[ChildStatus]:
        """Give the statuses of children as they end.

        Args:
            handles: handles or ids.
            timeout_s: seconds from this call that the whole may take, None for as long as it takes.

        Raises:
            WaitTimedOut: the time was up before all had ended (raised by the iterator; nothing is cancelled by it).
        """
        timeout = check_timeout(timeout_s)
        if isinstance(handles, ChildHandle | str):
            handles = [handles]
        refs = list(dict.fromkeys(_ref(handle) for handle in handles))
        if refs:
            self._env.children().status(refs)  # an unknown handle is an error here and now
        return self._as_completed(refs, None if timeout is None else time.monotonic() + timeout)

    def _as_completed(self, pending: list[Ref], deadline: float | None) -> Iterator[ChildStatus]:
        port = self._env.children
        while pending:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            statuses = port().wait(pending, left, True)
            ended = [(ref, status) for ref, status in zip(pending, statuses, strict=True) if status.done]
            if not ended:
                ids = ", ".join(status.id for status in statuses)
                raise WaitTimedOut(f"not ended in time: {ids}. What has not ended runs on")
            gone = {ref for ref, _ in ended}
            pending = [ref for ref in pending if ref not in gone]
            yield from sorted((status for _, status in ended), key=lambda s: (s.started_at or 0.0) + s.elapsed_s)

    def rlm_cancel(self, handle: HandleLike, *, grace_s: float | None = None) -> ChildStatus:
        """Stop one child and its descendants; returns when their exits are confirmed. Others are left alone.

        Args:
            grace_s: seconds for the cooperative request, None for the configured grace.

        Raises:
            ChildCleanupError: an exit could not be confirmed in time.
        """
        return self._env.children().cancel(_ref(handle), check_timeout(grace_s, "grace_s"))

    def rlm_send(self, handle: HandleLike, message: str) -> None:
        """Send a child's model a message, which it sees before its next call. The status counts what was seen.

        Raises:
            UsageMistake: the child has ended.
        """
        self._env.children().send(_ref(handle), check_message(message))

    def rlm_share(self, obj: Any) -> SharedContext:
        """Snapshot an object once, to pass it to many children as ``context=``.

        Raises:
            PayloadError: it cannot be pickled.
        """
        if isinstance(obj, SharedContext):
            return obj
        shared = SharedContext(obj)
        self._env.on_share(shared)
        return shared

    # -- starting

    def _request(
        self,
        prompt: object,
        model: str | None,
        context: Any,
        form: AnswerForm | None,
        timeout_s: object,
        name: str | None,
        argument: str = "prompt",
    ) -> ChildRequest:
        if name is not None and not isinstance(name, str):
            raise UsageMistake(f"name={name!r}: must be a string")
        timeout = check_timeout(timeout_s)
        if timeout == 0:
            raise UsageMistake("timeout_s=0: a child needs some time; give a positive number of seconds, or None")
        shown_name = sendable_text(name or "")
        return ChildRequest(_check_prompt(prompt, argument), _check_model(model), context, timeout, shown_name, form)

    def _at_depth_limit(self) -> bool:
        return self._env.depth + 1 >= self._env.max_depth()

    def _start(self, requests: Sequence[ChildRequest]) -> list[ChildHandle]:
        self._env.may_start()
        return self._begin(requests)

    def _begin(self, requests: Sequence[ChildRequest]) -> list[ChildHandle]:
        if not requests:
            return []
        port = self._env.children()
        episode_id = self._env.episode_id()
        handles = [
            ChildHandle(port, status, episode_id, request.form)
            for status, request in zip(port.start(requests), requests, strict=True)
        ]
        for handle, request in zip(handles, requests, strict=True):
            if request.form is not None:
                self._env.forms.keep(handle, request.form)
        return handles


def _answer_or_error(status: ChildStatus, form: AnswerForm | None) -> Any:
    try:
        return answer_of(status, form)
    except ChildFailedError as error:
        return f"Error: {error}"


def _ref(handle: object) -> Ref:
    if isinstance(handle, ChildHandle):
        return handle.ref
    if isinstance(handle, str):
        return (handle, None)
    raise UsageMistake(f"expected a handle or an id such as 'c1', got {type(handle).__name__}: {handle!r}")


def _check_prompt(prompt: object, argument: str = "prompt") -> str:
    if not isinstance(prompt, str):
        raise UsageMistake(f"{argument} must be a string, got {type(prompt).__name__}")
    if not prompt.strip():
        raise UsageMistake(f"{argument} is empty")
    return prompt


def _check_model(model: object) -> str | None:
    if model is not None and (not isinstance(model, str) or not model.strip()):
        raise UsageMistake(f"model={model!r}: must be the name of a model, or None for the configured one")
    return model


def _check_batch(prompts: object) -> Sequence[str]:
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise UsageMistake(f"prompts must be a list of strings, got {type(prompts).__name__}")
    return prompts


def _contexts_for(prompts: Sequence[str], context: Any) -> list[Any]:
    if not isinstance(context, list):
        return [context] * len(prompts)
    if len(context) != len(prompts):
        raise UsageMistake(
            f"context has {len(context)} entries for {len(prompts)} prompts; give one per prompt, or a single object"
        )
    return context


def _forms_for(prompts: Sequence[str], schema: Any) -> list[AnswerForm | None]:
    if not isinstance(schema, list):
        return [answer_form(schema)] * len(prompts)
    if len(schema) != len(prompts):
        raise UsageMistake(
            f"schema has {len(schema)} entries for {len(prompts)} prompts; give one per prompt, or a single schema"
        )
    return [answer_form(each, f"schema[{i}]") for i, each in enumerate(schema)]


def _with_context(request: ChildRequest) -> str:
    """At the depth limit there is no REPL to put the context into: it goes into the one direct call."""
    if request.context is None:
        return request.prompt
    shared = isinstance(request.context, SharedContext)
    return f"{request.prompt}\n\nContext:\n{request.context.restore() if shared else request.context}"
