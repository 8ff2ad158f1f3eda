"""Direct model calls of one run: ``llm_query`` and the loop's own. Builds the client once per process, counts, and
records.

Thread-safe. Calls made while a block of code runs are kept for the trajectory until `take_calls`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rlm_kernel.errors import ForkedProcessError, ModelCallError
from rlm_kernel.values import Completion, Message, ModelCall, Usage, count_by_model

if TYPE_CHECKING:
    from rlm_kernel.clients.base import ModelClient

_PROMPT_KEPT = 20_000
"""Characters of a prompt or response that the record of a call keeps."""

_NAME_KEPT = 200
"""Characters of a model's name that are kept where usage is counted."""

BATCH_WORKERS = 8
"""Model calls of one ``llm_query_batched`` that are under way at once."""


class CallMeter(Protocol):
    """Counts model calls, and may bound them. Used from several threads."""

    def begin_call(self) -> None:
        """Wait until a call may be made; raises `ChildLimitError` if none may be made any more."""

    def end_call(self, usage: Usage, model: str = "", duration_s: float = 0.0) -> None:
        """A call has ended (with no usage, if it failed).

        Args:
            usage: what it cost.
            model: the name under which the model was called.
            duration_s: wall-clock seconds that the call took.
        """


class ModelAccess:
    """The models that one run may call.

    Args:
        build: builds the client, at the first call.
        model: the model that calls without ``model=`` use, None for the client's default.
        name_of: gives the name under which usage of a model is counted, None for the default model.
        meter: is asked before each call, and told what it cost.
        run: carries out what blocks, so that it can be interrupted where this process knows how.
        batch_workers: calls of one batch that are under way at once.
    """

    def __init__(
        self,
        build: Callable[[], ModelClient],
        *,
        model: str | None = None,
        name_of: Callable[[str | None], str] = lambda model: model or "",
        meter: CallMeter | None = None,
        run: Callable[[Callable[[], Any]], Any] = lambda work: work(),
        batch_workers: int = BATCH_WORKERS,
    ) -> None:
        self._batch_workers = batch_workers
        self._build = build
        self._model = model
        self._name_of = name_of
        self._meter = meter
        self._run = run
        self._client: ModelClient | None = None
        self._lock = threading.Lock()
        self._calls: list[ModelCall] = []
        self._pid = os.getpid()
        self._usage = Usage()
        self._usage_by_model: dict[str, Usage] = {}

    @property
    def client(self) -> ModelClient:
        """The client, built when first asked for."""
        if os.getpid() != self._pid:
            raise ForkedProcessError("model calls do not work in a process that user code forked")
        client = self._client
        if client is None:
            client = self._client = self._build()
        return client

    @property
    def usage(self) -> Usage:
        """Everything that was counted so far."""
        with self._lock:
            return self._usage

    @property
    def usage_by_model(self) -> dict[str, Usage]:
        """The same, by the names under which models were called."""
        with self._lock:
            return dict(self._usage_by_model)

    def complete(self, messages: list[Message], model: str | None = None) -> Completion:
        """Make one call of the loop's own (it is not recorded as a call of code).

        Raises:
            ModelCallError: it failed.
            ChildLimitError: the token budget of the tree is spent.
        """
        completion: Completion = self._run(lambda: self._counted(self.client, messages, model))
        return completion

    def _counted(self, client: ModelClient, messages: list[Message], model: str | None) -> Completion:
        """Make one call when it may be made, and count what it cost."""
        usage = Usage()
        if self._meter is not None:
            self._meter.begin_call()
        model = self._model if model is None else model
        began = time.monotonic()
        try:
            completion = client.complete(messages, model)
            usage = completion.usage
        finally:
            self._count(usage, self._name_of(model), time.monotonic() - began)
        return completion

    def ask(self, prompt: str, model: str | None = None) -> str:
        """Make one call for code: a single user message.

        Raises:
            ModelCallError: it failed.
        """
        began = time.monotonic()
        try:
            completion = self.complete([{"role": "user", "content": prompt}], model)
        except Exception as error:
            self._record(prompt, Completion("", Usage()), began, f"{type(error).__name__}: {error}")
            raise
        self._record(prompt, completion, began, None)
        return completion.text

    def ask_batch(self, prompts: Sequence[str], model: str | None = None) -> list[str]:
        """Make several calls at once. A failed one gives ``Error: …`` in its place."""
        return [reply if isinstance(reply, str) else f"Error: {reply}" for reply in self.try_batch(prompts, model)]

    def try_batch(self, prompts: Sequence[str], model: str | None = None) -> list[str | Exception]:
        """Make several calls at once. A failed one gives a `ModelCallError` in its place."""
        from rlm_kernel.clients.base import complete_batch

        began = time.monotonic()
        chats: list[list[Message]] = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outcomes = self._run(
            lambda: complete_batch(_Counted(self._counted, self.client), chats, model, max_workers=self._batch_workers)
        )
        answers: list[str | Exception] = []
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            if isinstance(outcome, Completion):
                self._record(prompt, outcome, began, None)
                answers.append(outcome.text)
            else:
                text = str(outcome) if isinstance(outcome, ModelCallError) else f"{type(outcome).__name__}: {outcome}"
                self._record(prompt, Completion("", Usage()), began, text)
                answers.append(ModelCallError(text))
        return answers

    def take_calls(self) -> tuple[ModelCall, ...]:
        """Return the recorded calls, and forget them."""
        with self._lock:
            calls, self._calls = tuple(self._calls), []
        return calls

    def _count(self, usage: Usage, model: str, duration_s: float) -> None:
        name = model[:_NAME_KEPT].encode("utf-8", "replace").decode()  # as a message can carry it
        with self._lock:
            self._usage += usage
            count_by_model(self._usage_by_model, name, usage)
        if self._meter is not None:
            self._meter.end_call(usage, name, duration_s)

    def _record(self, prompt: str, completion: Completion, began: float, error: str | None) -> None:
        call = ModelCall(
            prompt[:_PROMPT_KEPT], completion.text[:_PROMPT_KEPT], completion.usage, time.monotonic() - began, error
        )
        with self._lock:
            self._calls.append(call)


class _Counted:
    """A client whose calls are counted one by one, for a batch of them."""

    def __init__(
        self, counted: Callable[[ModelClient, list[Message], str | None], Completion], client: ModelClient
    ) -> None:
        self._call = counted
        self._client = client

    def complete(self, messages: list[Message], model: str | None = None) -> Completion:
        return self._call(self._client, messages, model)


def describe_model(factory: Any, model: str | None) -> str:
    """Say in a word which model a configuration uses."""
    spec = getattr(factory, "spec", None)
    if model is not None:
        return model
    if isinstance(spec, str):
        return spec
    return factory if isinstance(factory, str) else getattr(factory, "__qualname__", type(factory).__name__)


def name_for_usage(factory: Any, model: str | None) -> str:
    """Return the name under which usage of a model is counted: with its provider, where a spec says which that is.

    Args:
        factory: builds the client.
        model: as it is passed to the client, None for the client's default.
    """
    spec = getattr(factory, "spec", None)
    if not isinstance(spec, str):
        return describe_model(factory, model)
    if model is None or "/" not in spec:
        return spec  # the demo model is the same by any name
    from rlm_kernel.clients.specs import wire_name

    provider = spec.partition("/")[0]
    return f"{provider}/{wire_name(provider, str(model))}"
