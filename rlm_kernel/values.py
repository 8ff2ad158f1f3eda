"""Immutable values that several layers share. Each validates itself when built; an illegal one cannot exist."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from rlm_kernel.errors import ConfigurationError

Message = dict[str, str]
"""One chat message: ``{"role": "system" | "user" | "assistant", "content": str}``."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Finished model calls and their tokens. Adds up with ``+``.

    Attributes:
        calls: how many calls.
        prompt_tokens: tokens that were sent.
        completion_tokens: tokens that came back.
    """

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Tokens of prompts and replies together."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
        )


MAX_MODELS = 100
"""Names of models that are counted one by one; code may make them up."""

OTHER_MODELS = "(other models)"


def count_by_model(totals: dict[str, Usage], model: str, usage: Usage) -> None:
    """Add a call's usage to that of its model. A call that cost nothing at all is not worth a name."""
    if usage == Usage():
        return
    if model not in totals and len(totals) >= MAX_MODELS:
        model = OTHER_MODELS
    totals[model] = totals.get(model, Usage()) + usage


@dataclass(frozen=True, slots=True)
class Completion:
    """What a model client returns for one call.

    Attributes:
        text: the model's reply.
        usage: what the call used; one call without tokens if nothing is said.
    """

    text: str
    usage: Usage = Usage(calls=1)


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One finished model call made by code in a cell, for the trajectory.

    Attributes:
        duration_s: wall-clock seconds.
        error: readable error if the call failed; ``response`` is then empty.
    """

    prompt: str
    response: str
    usage: Usage
    duration_s: float
    error: str | None = None


@dataclass(frozen=True, slots=True)
class CodeResult:
    """What running one block of code in a REPL gave.

    Attributes:
        stdout: captured standard output, including the repr of a trailing expression as IPython shows it.
        stderr: captured standard error; a traceback of a failed block is here, without ANSI codes.
        new_locals: names that the block newly bound (no leading underscore) → their repr, cut at 500 characters.
        duration_s: wall-clock seconds.
        success: whether the block ran to its end.
        exception: ``"NameError: name 'x' is not defined"``, or None.
        model_calls: the calls that the block made through ``llm_query`` and friends.
        stdout_length, stderr_length: characters that were written in all, if what is kept may be less; else None.
    """

    stdout: str = ""
    stderr: str = ""
    new_locals: Mapping[str, str] = field(default_factory=dict)
    duration_s: float = 0.0
    success: bool = True
    exception: str | None = None
    model_calls: tuple[ModelCall, ...] = ()
    stdout_length: int | None = field(default=None, compare=False)
    stderr_length: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """A recorded final answer. Falsy values are answers too.

    Attributes:
        text: the answer as text, as it was when it was given: a string as it is, anything else by ``str``.
    """

    value: Any
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            text = self.value if isinstance(self.value, str) else str(self.value)
        except Exception as error:
            text = f"<{type(self.value).__name__}; its text raised {type(error).__name__}: {error}>"
        object.__setattr__(self, "text", text)


class ChildState(StrEnum):
    """The public states of a child; the last four are terminal.

    Attributes:
        QUEUED: there is no free slot for it yet, or the nursery is still starting.
        RUNNING: its process exists.
        WAITING: it is blocked on its own children.
        COMPLETED: it has ended with an answer.
        FAILED: it has ended without one, by a fault of its own, of its model or of its surroundings.
        TIMED_OUT: its time was up.
        CANCELLED: it was stopped.
    """

    QUEUED = "queued"
    RUNNING = "running"
    WAITING = "waiting"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"

    @property
    def done(self) -> bool:
        """Whether it is one of the terminal states."""
        return self in _DONE


_DONE = frozenset({ChildState.COMPLETED, ChildState.FAILED, ChildState.TIMED_OUT, ChildState.CANCELLED})


@dataclass(frozen=True, slots=True)
class ChildStatus:
    """A snapshot of one child. Its truth value is `done`.

    Attributes:
        id: short, readable, unique in the kernel process, such as ``c3``.
        name: the name it was given, else its id.
        depth: 1 for a child of the notebook, 2 for its children, …
        parent_id: the child that started it; None for the root.
        state: where it stands.
        exited: true only after the exit of the process was confirmed (reaped, or reported by its pidfd).
        pid: its process id; None before it has a process.
        exit_code: exit code, or minus the signal number that killed it; None while unknown.
        started_at: Unix time in seconds at which the process came to be; None before.
        elapsed_s: seconds since the start (until the end, once it has ended).
        last_activity_s: seconds since the last model call, output or iteration.
        iterations: turns that it has made.
        model: the model that it uses.
        prompt_preview: the beginning of its task.
        result: the answer, once there is one.
        error: why there is no answer, readable.
        usage: its own finished model calls; those of its children are in theirs.
        log_tail: the last part of what the child wrote to its stdout and stderr.
        trajectory_path: the JSONL file with one line per finished iteration.
        messages_sent, messages_seen: messages sent to it with ``rlm_send``, and how many of them its model has seen.
    """

    id: str
    name: str
    depth: int
    parent_id: str | None
    state: ChildState
    exited: bool = False
    pid: int | None = None
    exit_code: int | None = None
    started_at: float | None = None
    elapsed_s: float = 0.0
    last_activity_s: float | None = None
    iterations: int = 0
    model: str | None = None
    prompt_preview: str = ""
    result: str | None = None
    error: str | None = None
    usage: Usage = Usage()
    log_tail: str = ""
    trajectory_path: str | None = None
    messages_sent: int = 0
    messages_seen: int = 0

    @property
    def done(self) -> bool:
        """Whether the child has ended, in whatever way."""
        return self.state.done

    def __bool__(self) -> bool:
        return self.done


@dataclass(frozen=True, slots=True)
class Graces:
    """Seconds that each step of a stop is given: the cooperative request, SIGTERM, SIGKILL."""

    shutdown_s: float = 0.5
    terminate_s: float = 0.5
    kill_s: float = 1.0

    def __post_init__(self) -> None:
        for f in fields(self):
            _check_seconds(f.name.replace("_s", "_grace_s"), getattr(self, f.name), minimum=0.0)

    @property
    def total_s(self) -> float:
        return self.shutdown_s + self.terminate_s + self.kill_s

    def from_kill(self) -> Graces:
        """The same, starting at SIGKILL: for a verb that follows a stop which has already run its graces."""
        return Graces(0.0, 0.0, self.kill_s)


@dataclass(frozen=True, slots=True)
class CleanupReport:
    """What one lifecycle verb did.

    Attributes:
        verb: its name, such as ``close``.
        duration_s: wall-clock seconds.
        stopped: ids of the children whose stop this verb caused and confirmed.
        asked, terminated, killed: how many children got the cooperative request, SIGTERM, SIGKILL.
        survivors: pids whose exit could not be confirmed.
    """

    verb: str
    duration_s: float = 0.0
    stopped: tuple[str, ...] = ()
    asked: int = 0
    terminated: int = 0
    killed: int = 0
    survivors: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every exit was confirmed."""
        return not self.survivors

    def summary(self) -> str:
        """One line: what, how long, how many asked, terminated, killed."""
        ids = ", ".join(self.stopped) or "no child"
        text = (
            f"{self.verb}: {ids} stopped in {self.duration_s:.2f} s "
            f"(asked {self.asked}, terminated {self.terminated}, killed {self.killed})"
        )
        if self.survivors:
            text += f"; NOT confirmed gone: pid {', '.join(map(str, self.survivors))}"
        return text


def _check_seconds(name: str, value: object, *, minimum: float, exclusive: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigurationError(name, value, "must be a finite number of seconds")
    if value < minimum or (exclusive and value == minimum):
        raise ConfigurationError(name, value, f"must be {'more than' if exclusive else 'at least'} {minimum:g} seconds")


def _check_count(name: str, value: object, *, minimum: int, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        suffix = ", or None for no limit" if optional else ""
        raise ConfigurationError(name, value, f"must be a whole number of at least {minimum}{suffix}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedChildConfig:
    """How children are started and bounded. Immutable; bad values raise at construction.

    Args:
        client_factory: a callable that returns a model client or a chat function, or ``"module:callable"``. Each child
            calls it in its own process.
        model: the model name passed to the client's calls, or None for the client's default.
        max_depth: children exist at depths 1 … ``max_depth - 1``.
        max_iterations: model turns that each run may take.
        max_total_tokens: token budget of the whole tree, None for none.
        max_concurrent_model_calls: bound on model calls under way in the whole tree, None for none.
        child_env_keep: names of environment variables that are kept although they look like secrets.
        max_children_total: children that one episode may start.
        max_children_per_batch: children that one batch may start, None for no limit of its own.
        max_concurrent_children: children that run at once; more are queued.
        per_child_timeout_s: wall-clock seconds that a child may take from its start.
        result_truncation_limit: characters after which an answer is cut, None for never.
        shutdown_grace_s, terminate_grace_s, kill_grace_s: seconds for each step of a stop.
        memory_limit_bytes: private memory that a child may use beyond what it inherited, None for no limit.
        preload: names of modules that the nursery imports before it forks.
        on_subcall_start: called as ``(depth, model, prompt_preview)``.
        on_subcall_complete: called as ``(depth, model, duration_s, error)``.

    Raises:
        ConfigurationError: names the field and the value.
    """

    client_factory: Callable[[], Any] | str
    model: str | None = None
    max_depth: int = 2
    max_iterations: int = 30
    max_total_tokens: int | None = None
    max_concurrent_model_calls: int | None = None
    child_env_keep: tuple[str, ...] = ()
    max_children_total: int = 256
    max_children_per_batch: int | None = None
    max_concurrent_children: int = 8
    per_child_timeout_s: float = 3600.0
    result_truncation_limit: int | None = None
    shutdown_grace_s: float = 0.5
    terminate_grace_s: float = 0.5
    kill_grace_s: float = 1.0
    memory_limit_bytes: int | None = None
    preload: tuple[str, ...] = ()
    on_subcall_start: Callable[..., None] | None = None
    on_subcall_complete: Callable[..., None] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.client_factory, str):
            module, colon, name = self.client_factory.partition(":")
            if not (module and colon and name):
                raise ConfigurationError(
                    "client_factory", self.client_factory, 'must be "module:callable" or a callable'
                )
        elif not callable(self.client_factory):
            raise ConfigurationError("client_factory", self.client_factory, 'must be a callable or "module:callable"')
        if self.model is not None and (not isinstance(self.model, str) or not self.model.strip()):
            raise ConfigurationError("model", self.model, "must be a non-empty string, or None")
        _check_count("max_depth", self.max_depth, minimum=1)
        _check_count("max_iterations", self.max_iterations, minimum=1)
        _check_count("max_total_tokens", self.max_total_tokens, minimum=1, optional=True)
        _check_count("max_concurrent_model_calls", self.max_concurrent_model_calls, minimum=1, optional=True)
        _check_count("max_children_total", self.max_children_total, minimum=0)
        _check_count("max_children_per_batch", self.max_children_per_batch, minimum=1, optional=True)
        _check_count("max_concurrent_children", self.max_concurrent_children, minimum=1)
        _check_count("result_truncation_limit", self.result_truncation_limit, minimum=1, optional=True)
        _check_count("memory_limit_bytes", self.memory_limit_bytes, minimum=1, optional=True)
        _check_seconds("per_child_timeout_s", self.per_child_timeout_s, minimum=0.0, exclusive=True)
        for name in ("child_env_keep", "preload"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(item, str) and item for item in value):
                raise ConfigurationError(name, value, "must be a sequence of names")
            object.__setattr__(self, name, tuple(value))
        for name in ("on_subcall_start", "on_subcall_complete"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ConfigurationError(name, value, "must be callable, or None")
        _ = self.graces  # validates the three of them

    @property
    def graces(self) -> Graces:
        """The three grace periods of a stop."""
        return Graces(self.shutdown_grace_s, self.terminate_grace_s, self.kill_grace_s)
