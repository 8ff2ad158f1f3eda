"""What a model client is, and how anything that users call one becomes one.

A *client* has ``complete(messages, model=None) -> Completion``. A *chat function* takes the messages (and, if it wants
to, the model's name) and returns the reply as text. A *client factory* takes nothing and returns one of the two; it
is what travels to a child, which builds its own client in its own process.

Whether a chat function takes a model is decided once, from its signature, when it is wrapped. Trying a call and
catching the ``TypeError`` is not an option: the function's own ``TypeError`` would look the same.
"""

from __future__ import annotations

import contextvars
import importlib
import inspect
import queue
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from rlm_kernel.errors import ConfigurationError, ModelCallError, RLMError
from rlm_kernel.values import Completion, Message

T = TypeVar("T")
R = TypeVar("R")

_FIELD = "client_factory"
_MODEL_NAMES = frozenset({"model", "model_name", "model_id", "llm", "llm_model"})


@runtime_checkable
class ModelClient(Protocol):
    """Something that completes a chat. `complete` may be called from several threads at once.

    Classes that inherit from this protocol promise to return a `Completion`; whatever merely looks like a client is
    checked on every call (see `as_client`).
    """

    @abstractmethod
    def complete(self, messages: list[Message], model: str | None = None) -> Completion:
        """Send the messages to the model and return its reply.

        Args:
            messages: the chat so far; not to be modified.
            model: the model's name, or None for the client's default.

        Raises:
            ModelCallError: the call failed, after the client's own retries.
        """
        ...


class CheckedClient(ModelClient):
    """A chat function, or an object that looks like a client, whose arguments and replies are adapted and checked.

    Attributes:
        wrapped: what the user handed in.
    """

    def __init__(self, wrapped: object, function: Callable[..., Any], *, field: str = _FIELD) -> None:
        self.wrapped = wrapped
        self._function = function
        self._name = _name_of(wrapped)
        self._takes_messages, self._takes_model = _calling_style(function, self._name, field)

    def complete(self, messages: list[Message], model: str | None = None) -> Completion:
        args: list[Any] = [] if self._takes_messages else [messages]
        kwargs: dict[str, Any] = {self._takes_messages: messages} if self._takes_messages else {}
        if self._takes_model is not None:
            by_name, needed = self._takes_model
            if model is not None or needed:  # otherwise the function's own default for the model holds
                if by_name:
                    kwargs[by_name] = model
                else:
                    args.append(model)
        return self._checked(self._function(*args, **kwargs))

    def _checked(self, reply: object) -> Completion:
        if isinstance(reply, str):
            return Completion(reply)
        if isinstance(reply, Completion) and isinstance(reply.text, str):
            return reply
        if inspect.iscoroutine(reply):
            reply.close()  # otherwise Python warns, somewhere else, that it was never awaited
        got = _type_name(reply)
        if isinstance(reply, Completion):
            got = f"a Completion whose text is {_type_name(reply.text)}"
        raise ModelCallError(f"{self._name} returned {got}; a chat function must return str (or a Completion)")

    def __repr__(self) -> str:
        return f"CheckedClient({self._name})"


def as_client(obj: object, *, field: str = _FIELD) -> ModelClient:
    """Turn a client or a chat function into a client.

    A chat function may be ``f(messages)``, ``f(messages, model)``, ``f(messages, model=None)`` or take ``**kwargs``. An
    optional second argument counts as the model only if its name says so. If no model is asked for, the function's own
    default for it holds.

    Args:
        obj: the client or chat function.
        field: how error messages name the setting that it came from.

    Returns:
        ``obj`` itself if its class inherits from `ModelClient`, otherwise a `CheckedClient` around it.

    Raises:
        ConfigurationError: it is neither, or its signature does not fit.
    """
    if isinstance(obj, type):
        raise ConfigurationError(field, obj, "is a class; give an instance of it (a factory must call it)")
    if ModelClient in type(obj).__mro__:
        return obj  # type: ignore[return-value]
    complete = getattr(obj, "complete", None)
    if callable(complete):
        return CheckedClient(obj, complete, field=field)
    if callable(obj):
        return CheckedClient(obj, obj, field=field)
    raise ConfigurationError(
        field,
        obj,
        f"gives {_type_name(obj)}, which is neither a client (with a `complete` method) nor a chat function",
    )


def build_client(factory: Callable[[], Any] | str) -> ModelClient:
    """Call a client factory and make sure that a client comes out.

    Args:
        factory: a callable without arguments, or ``"module:callable"`` (the part after the colon may be dotted).

    Raises:
        ConfigurationError: the factory cannot be found or called, or gives neither a client nor a chat function.
        ModelCallError: the factory itself failed. (Errors of ours that it raises come through as they are.)
    """
    function = _resolve(factory) if isinstance(factory, str) else factory
    if not callable(function):
        raise ConfigurationError(_FIELD, factory, f"is {_type_name(function)}, which cannot be called")
    _require_no_arguments(function, factory)
    try:
        made = function()
    except RLMError:
        raise  # a missing key, an unknown model: already says what to do
    except Exception as exc:
        name = repr(factory) if isinstance(factory, str) else _name_of(factory)
        raise ModelCallError(f"client factory {name} failed: {type(exc).__name__}: {exc}") from exc
    if inspect.iscoroutine(made):
        made.close()
    return as_client(made)


def complete_batch(
    client: ModelClient, prompts_messages: Sequence[list[Message]], model: str | None = None, max_workers: int = 8
) -> list[Completion | Exception]:
    """Complete several chats at once; see `run_batch`.

    Args:
        client: used from several threads.
        prompts_messages: one chat per wanted completion.
        model: as for `ModelClient.complete`.
        max_workers: how many calls run at the same time, at least 1.

    Returns:
        For each chat, in order, its completion or the exception that its call raised.
    """
    return run_batch(lambda messages: client.complete(messages, model), prompts_messages, max_workers)


def run_batch(work: Callable[[T], R], items: Sequence[T], max_workers: int = 8) -> list[R | Exception]:
    """Do something that blocks for several items at once.

    Each call runs in a copy of the caller's context variables. An interrupt of the waiting caller comes through at
    once: calls under way are abandoned (their threads are daemons), and no further call is started.

    Args:
        work: called with each item, from several threads.
        items: what to do it for.
        max_workers: how many calls run at the same time, at least 1.

    Returns:
        For each item, in order, the outcome or the exception that its call raised.
    """
    if max_workers < 1:
        raise ValueError(f"max_workers={max_workers!r} must be at least 1")
    context = contextvars.copy_context()

    def call(item: T) -> R | BaseException:
        try:
            return context.copy().run(work, item)
        except BaseException as exc:  # an unwound worker would leave its caller waiting for ever
            return exc

    if min(max_workers, len(items)) <= 1:
        return [_raise_unless_ordinary(call(item)) for item in items]
    return _run_threads(call, items, max_workers)


def _run_threads(call: Callable[[T], R | BaseException], items: Sequence[T], max_workers: int) -> list[R | Exception]:
    """Run the calls in daemon threads. `concurrent.futures` joins its own at exit, which a hanging call would block."""
    pending = deque(enumerate(items))
    finished: queue.SimpleQueue[tuple[int, R | BaseException]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            try:
                index, item = pending.popleft()
            except IndexError:
                return
            finished.put((index, call(item)))

    outcomes: dict[int, R | Exception] = {}
    try:
        for number in range(min(max_workers, len(items))):
            try:
                threading.Thread(target=work, name=f"rlm-batch-{number}", daemon=True).start()
            except RuntimeError:  # no memory for one more thread: fewer do as well
                if number == 0:
                    raise
                break
        while len(outcomes) < len(items):
            index, outcome = finished.get()
            outcomes[index] = _raise_unless_ordinary(outcome)
    finally:
        pending.clear()
    return [outcomes[index] for index in range(len(items))]


def _raise_unless_ordinary(outcome: R | BaseException) -> R | Exception:
    if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
        raise outcome
    return outcome


def _resolve(path: str) -> object:
    module_name, colon, attribute = path.partition(":")
    if "/" in module_name:
        raise ConfigurationError(_FIELD, path, f"looks like a model, not a factory: type `%rlm model {path}`")
    if not (module_name and colon and attribute):
        raise ConfigurationError(_FIELD, path, 'must be "module:callable"')
    try:
        found: object = importlib.import_module(module_name)
    except Exception as exc:
        raise ConfigurationError(
            _FIELD, path, f"module {module_name!r} cannot be imported: {type(exc).__name__}: {exc}"
        ) from exc
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as exc:
            raise ConfigurationError(_FIELD, path, _no_such_name(found, part)) from exc
    return found


def _no_such_name(owner: object, name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, dir(owner), n=1)
    return f"{_name_of(owner)} has no {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")


def _require_no_arguments(function: Callable[..., Any], factory: object) -> None:
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return  # some builtins have no signature: the call will tell
    try:
        signature.bind()
    except TypeError as exc:
        raise ConfigurationError(
            _FIELD,
            factory,
            f"must take no arguments ({exc}). A chat function is what a factory returns: "
            "`def make_client(): return chat_fn`",
        ) from None


def _calling_style(function: Callable[..., Any], name: str, field: str) -> tuple[str | None, tuple[str, bool] | None]:
    """Decide how a chat function wants to be called.

    Returns:
        The keyword for the messages (None: first in place), and for the model None (not wanted) or its keyword ("":
        second in place) with whether it must be given.
    """
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        raise ConfigurationError(
            field, function, f"{name} is async; a chat function is called from ordinary code and must return the text"
        )
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # some builtins have no signature
        return None, ("", True)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    others = positional[1:] + [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    kinds = {p.kind for p in parameters}

    messages = next((p.name for p in others if p.name == "messages"), None)  # also f(model, messages)
    if messages is not None:
        rest = positional[:1] + [p for p in others if p.name != messages]
    elif positional or inspect.Parameter.VAR_POSITIONAL in kinds:
        rest = others
    else:
        raise ConfigurationError(field, function, f"{name} takes no messages: is it a factory? Call it first")

    second = positional[1] if messages is None and len(positional) > 1 else None
    model = next((p for p in rest if p.name in _MODEL_NAMES), None)
    if model is None and second is not None and _required(second):
        model = second
    missing = [p.name for p in rest if _required(p) and p is not model]
    if missing:
        reason = f"{name} must be callable as f(messages, model) or f(messages); it also wants {', '.join(missing)}"
        raise ConfigurationError(field, function, reason)
    if model is not None:
        return messages, ("" if model is second else model.name, _required(model))
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return messages, ("model", False)
    if inspect.Parameter.VAR_POSITIONAL in kinds and second is None and messages is None:
        return messages, ("", False)
    return messages, None


def _required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty


def _name_of(obj: object) -> str:
    name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
    return repr(name) if isinstance(name, str) else f"a {type(obj).__name__}"


def _type_name(obj: object) -> str:
    return "None" if obj is None else f"{type(obj).__module__}.{type(obj).__qualname__}".removeprefix("builtins.")
