"""What the supervisor knows about one child, and what somebody who wants a child must say."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlm_kernel.children.history import ChildHistory, History
from rlm_kernel.children.states import Outcome, Phase, public_state
from rlm_kernel.values import ChildState, ChildStatus, Graces, Usage, count_by_model
from rlm_kernel.wire.channel import close_fds

PREVIEW_LENGTH = 120
"""Characters of a prompt that a status shows."""


@dataclass(slots=True)
class ChildSpec:
    """One child that is asked for. The payloads are opaque here.

    Attributes:
        entry: ``"module:callable"`` that the child runs.
        task: what this child is to do, for the entry point.
        inherited: what every descendant gets unchanged, for the entry point.
        attachments: descriptors that travel with the task; owned by whoever holds the spec.
        environ: environment of the call, without secrets.
        secret_environ: the variables of it that look like secrets; passed on to descendants.
    """

    entry: str
    task: bytes
    inherited: bytes
    environ: Mapping[str, str]
    secret_environ: Mapping[str, str]
    cwd: str
    sys_path: tuple[str, ...]
    name: str = ""
    prompt_preview: str = ""
    model: str | None = None
    timeout_s: float | None = None
    attachments: tuple[int, ...] = ()

    def close(self) -> None:
        """Close the descriptors that have not been sent."""
        close_fds(self.attachments)
        self.attachments = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds over the whole tree; see `rlm_kernel.values.ManagedChildConfig` for their meaning."""

    max_depth: int = 2
    max_children_total: int = 256
    max_children_per_batch: int | None = None
    max_concurrent_children: int = 8
    per_child_timeout_s: float = 3600.0
    result_truncation_limit: int | None = None
    memory_limit_bytes: int | None = None
    max_concurrent_model_calls: int | None = None
    max_total_tokens: int | None = None
    graces: Graces = Graces()


@dataclass(slots=True, eq=False)
class ChildRecord:
    """One child. Mutable; every change happens under the supervisor's lock.

    Attributes:
        parent: the child that started it, None for the root.
        outcome: how it ends, once something has decided that.
        exit_seen: its process is confirmed gone, though descendants may still be ending.
        undelivered: messages sent to it before it could be told.
        pidfd: open while the exit is not confirmed, where the platform has pidfds.
        usage_by_model: parts of ``usage``, by the name of the model.
        history: its states, as the registry notes them.
    """

    id: str
    number: int
    episode_id: str
    parent: ChildRecord | None
    spec: ChildSpec
    limits: Limits
    log_path: str
    trajectory_path: str
    phase: Phase = Phase.QUEUED
    outcome: Outcome | None = None
    children: list[ChildRecord] = field(default_factory=list)
    pid: int | None = None
    pidfd: int | None = None
    exit_code: int | None = None
    exit_seen: bool = False
    given_up: bool = False
    result: str | None = None
    error: str | None = None
    usage: Usage = Usage()
    iterations: int = 0
    started_wall: float | None = None
    started_mono: float | None = None
    ended_mono: float | None = None
    active_mono: float | None = None
    log_tail: str = ""
    undelivered: list[str] = field(default_factory=list)
    messages_sent: int = 0
    messages_seen: int = 0
    usage_by_model: dict[str, Usage] = field(default_factory=dict)
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        self.history.enter(ChildState.QUEUED, time.monotonic())

    @property
    def depth(self) -> int:
        return 1 if self.parent is None else self.parent.depth + 1

    @property
    def ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def holds_slot(self) -> bool:
        return self.phase in (Phase.STARTING, Phase.RUNNING, Phase.ENDING, Phase.STOPPING)

    @property
    def state(self) -> ChildState:
        return public_state(self.phase, self.outcome, has_process=self.pid is not None)

    @property
    def timeout_s(self) -> float:
        """Wall-clock seconds that it may take from its start."""
        return self.limits.per_child_timeout_s if self.spec.timeout_s is None else self.spec.timeout_s

    def ancestors(self) -> list[ChildRecord]:
        """Return the chain of parents, nearest first."""
        chain, at = [], self.parent
        while at is not None:
            chain.append(at)
            at = at.parent
        return chain

    def descendants(self) -> list[ChildRecord]:
        """Return all records below this one, in start order."""
        found = []
        for child in self.children:
            found.append(child)
            found.extend(child.descendants())
        return sorted(found, key=lambda record: record.number)

    def is_reachable_from(self, caller: ChildRecord | None) -> bool:
        """Tell whether ``caller`` (None: the root) may see this child."""
        return caller is None or caller in self.ancestors()

    def note_state(self, at: float | None = None) -> None:
        """Write down the state that it is in now.

        Args:
            at: since when, by ``time.monotonic()``; None for now.
        """
        self.history.enter(self.state, time.monotonic() if at is None else at)

    def confirm_exit(self) -> None:
        """Its process is known to be gone, or never to come to be."""
        if not self.exit_seen:
            self.exit_seen = True
            self.history.exited = time.monotonic()

    def add_usage(self, usage: Usage, model: str) -> None:
        """Count a model call."""
        self.usage += usage
        count_by_model(self.usage_by_model, model, usage)

    def look_back(self, now: float, wall_offset: float) -> ChildHistory:
        """Take a snapshot of its past."""
        return self.history.snapshot(self.status(), self.usage_by_model, now, wall_offset)

    def status(self) -> ChildStatus:
        """Take a snapshot."""
        now = time.monotonic()
        until = self.ended_mono if self.ended_mono is not None else now
        return ChildStatus(
            id=self.id,
            name=self.spec.name,
            depth=self.depth,
            parent_id=None if self.parent is None else self.parent.id,
            state=self.state,
            exited=self.exit_seen,
            pid=self.pid,
            exit_code=self.exit_code,
            started_at=self.started_wall,
            elapsed_s=0.0 if self.started_mono is None else until - self.started_mono,
            last_activity_s=None if self.active_mono is None else now - self.active_mono,
            iterations=self.iterations,
            model=self.spec.model,
            prompt_preview=self.spec.prompt_preview[:PREVIEW_LENGTH],
            result=self.result,
            error=self.error,
            usage=self.usage,
            log_tail=self.log_tail,
            trajectory_path=self.trajectory_path or None,
            messages_sent=self.messages_sent,
            messages_seen=self.messages_seen,
        )

    def release_payload(self) -> None:
        """Drop what only a start needs. What descendants inherit stays."""
        self.spec.close()
        self.spec = replace(self.spec, task=b"", attachments=())
