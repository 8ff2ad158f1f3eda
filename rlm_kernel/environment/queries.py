"""The functions with which code asks models, built from plain functions of the caller's.

Who runs them: whichever thread runs the code. Where there is only a function for one recursive query, a batch of them runs on
daemon threads "rlm-batch", in the caller's context, which end with the batch.
"""

from __future__ import annotations

import contextvars
import inspect
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rlm_kernel.errors import ConfigurationError, ManagedModeRequired

MAX_WORKERS = 8
"""Calls of one batch that are under way at once."""

Call = Callable[[Any, "str | None"], Any]


def query_helpers(
    llm_query_fn: Callable[..., Any] | None = None,
    llm_batch_fn: Callable[..., Any] | None = None,
    subcall_fn: Callable[..., Any] | None = None,
    subcall_batch_fn: Callable[..., Any] | None = None,
    *,
    model: str | None = None,
) -> dict[str, Callable[..., Any]]:
    """Build the helpers for what is configured, and only those.

    Args:
        llm_query_fn: called as ``(prompt, model)``, or ``(prompt)`` if it takes no model.
        llm_batch_fn: the same with a list of prompts.
        subcall_fn, subcall_batch_fn: the same for recursive queries. Without them those are direct ones.
        model: passed on where code names none.

    Raises:
        ConfigurationError: one of them is not callable.
    """
    ask = _checked("llm_query_fn", llm_query_fn, model)
    ask_many = _checked("llm_batch_fn", llm_batch_fn, model)
    recurse = _checked("subcall_fn", subcall_fn, model)
    recurse_many = _checked("subcall_batch_fn", subcall_batch_fn, model)
    helpers: dict[str, Callable[..., Any]] = {}
    if ask is not None:
        helpers["llm_query"] = _single("llm_query", ask)
    if ask_many is not None:
        helpers["llm_query_batched"] = helpers["llm_batch"] = _batched("llm_query_batched", ask_many)
    single = recurse or ask
    if single is not None:
        helpers["rlm_query"] = _blocking_only(_single("rlm_query", single), _with_context(subcall_fn, model))
    many = recurse_many or (_one_by_one(recurse) if recurse is not None else ask_many)
    if many is not None:
        helpers["rlm_query_batched"] = _blocking_only(
            _batched("rlm_query_batched", many), _with_context(subcall_batch_fn, model)
        )
    return helpers


def _checked(name: str, function: Callable[..., Any] | None, model: str | None) -> Call | None:
    if function is None:
        return None
    if not callable(function):
        raise ConfigurationError(name, function, "must be callable, or None")
    call = with_model(function)
    return lambda prompt, given: call(prompt, model if given is None else given)


def with_model(function: Callable[..., Any]) -> Call:
    """Make a function callable as ``(prompt, model)``, whether it takes a model or not.

    That is read from its signature, never found out by trying, so that a `TypeError` from inside it stays one.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have none
        return lambda prompt, _model: function(prompt)
    by_name = {p.name: p for p in parameters}
    if "model" in by_name and by_name["model"].kind in (
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        return lambda prompt, model: function(prompt, model=model)
    positional = [
        p for p in parameters if p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return lambda prompt, model: function(prompt, model)
    if len(positional) < 2:
        return lambda prompt, _model: function(prompt)
    if positional[1].default is inspect.Parameter.empty:
        return lambda prompt, model: function(prompt, model)
    # Its second parameter may be anything that has a default; a model goes there only if there is one.
    return lambda prompt, model: function(prompt) if model is None else function(prompt, model)


def _single(name: str, call: Call) -> Callable[..., Any]:
    def query(prompt: str, model: str | None = None) -> Any:
        return call(prompt, model)

    query.__name__ = query.__qualname__ = name
    query.__doc__ = "Ask about one prompt and return the answer."
    return query


def _batched(name: str, call: Call) -> Callable[..., Any]:
    def query_batched(prompts: list[str], model: str | None = None) -> Any:
        if isinstance(prompts, str):
            raise TypeError(f"{name}(prompts): must be a list of prompts, not one text; use {name[: -len('_batched')]}")
        listed = list(prompts)
        return call(listed, model) if listed else []

    query_batched.__name__ = query_batched.__qualname__ = name
    query_batched.__doc__ = "Ask about several prompts and return the answers in their order."
    return query_batched


def _with_context(function: Callable[..., Any] | None, model: str | None) -> Callable[..., Any] | None:
    """Return what passes a ``context=`` on, None if the function takes none."""
    try:
        if function is None or "context" not in inspect.signature(function).parameters:
            return None
    except (TypeError, ValueError):
        return None
    return lambda prompt, given, context: function(prompt, model if given is None else given, context=context)


def _blocking_only(query: Callable[..., Any], with_context: Callable[..., Any] | None) -> Callable[..., Any]:
    def rlm_query(
        prompt: Any, model: str | None = None, *, blocking: bool = True, context: Any = None, **others: Any
    ) -> Any:
        asked = [f"{name}=" for name in others] if blocking else ["blocking=False"]
        if context is not None and with_context is None:
            asked.append("context=")
        if asked:
            raise ManagedModeRequired(
                f"{query.__name__}: {', '.join(asked)} needs managed children; give the environment a "
                "recursive_controller from create_server_recursive_controller(..., managed=ManagedChildConfig(...))"
            )
        if context is not None and with_context is not None:
            return with_context(prompt, model, context)
        return query(prompt, model)

    rlm_query.__name__ = rlm_query.__qualname__ = query.__name__
    rlm_query.__doc__ = query.__doc__
    return rlm_query


def _one_by_one(call: Call) -> Call:
    """Make a call for one prompt serve a list of them, side by side. One that fails gives ``Error: …`` in its place."""

    def one(prompt: str, model: str | None) -> Any:
        try:
            return call(prompt, model)
        except Exception as error:
            return f"Error: {error}"

    def many(prompts: list[str], model: str | None) -> list[Any]:
        return side_by_side([lambda prompt=prompt: one(prompt, model) for prompt in prompts])  # type: ignore[misc]

    return many


def side_by_side(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Make calls that raise nothing on up to `MAX_WORKERS` threads, in this context, and return what they gave in order.

    An interrupt of the waiting thread leaves the calls under way to themselves and starts no more.
    """
    left = list(enumerate(calls))[::-1]
    results: list[Any] = [None] * len(calls)
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def work() -> None:
        while True:
            try:
                index, call = left.pop()
            except IndexError:
                return
            try:
                results[index] = call()
            finally:
                ended.put(None)

    try:
        for _ in range(min(len(calls), MAX_WORKERS)):
            thread = threading.Thread(
                target=contextvars.copy_context().run, args=(work,), name="rlm-batch", daemon=True
            )
            # A breakpoint must not suspend it.
            thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
            thread.start()
        for _ in calls:
            ended.get()
    finally:
        left.clear()
    return results
