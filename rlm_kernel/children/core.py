"""What the parts of the supervisor share: the lock, the registry that it guards, the reactor, and how effects are carried out.

Any thread may use it. The lock is held for dictionary work only: never across a fork, a callback, a wait or I/O that could block. What is
to be done after a decision (*effects*) is taken out under the lock and carried out after it is released.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlm_kernel.children.callgate import CallGate
from rlm_kernel.children.observers import ObserverThread
from rlm_kernel.children.reactor import Reactor
from rlm_kernel.children.records import ChildRecord
from rlm_kernel.children.registry import Call, Effect, Finished, Launch, Registry, StopProcesses
from rlm_kernel.errors import ForkedProcessError
from rlm_kernel.values import ChildState, ChildStatus
from rlm_kernel.wire.channel import close_fds

_log = logging.getLogger(__name__)

Ref = tuple[str, str | None]
"""Child id and, from a handle, its episode."""

ChildListener = Callable[[ChildStatus], None]


@dataclass(slots=True, eq=False)
class StopTally:
    """What the nursery reported about the children that one stop covers. Two that have counted the same are still two."""

    ids: frozenset[str] = frozenset()
    asked: int = 0
    terminated: int = 0
    killed: int = 0
    leftover: set[int] = field(default_factory=set)


class Core:
    """See the module's docstring.

    Args:
        on_change: called on the observer thread with a status whenever a child changes its state.
        on_warning: called on the observer thread with one line for the user.
    """

    reactor: Reactor

    def __init__(self, on_change: ChildListener | None, on_warning: Callable[[str], None] | None) -> None:
        self.on_change = on_change
        self.on_warning = on_warning
        self.on_stir: tuple[Callable[[], None], ...] = ()
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.registry = Registry()
        self.gate = CallGate()
        self.observers = ObserverThread()
        self.tallies: list[StopTally] = []
        self.published: dict[str, ChildState] = {}

    def check_process(self) -> None:
        """Raise in a process that user code forked from the root."""
        if os.getpid() != self.pid:
            raise ForkedProcessError(
                "this process was forked by user code; children can only be used from the process that the session runs in"
            )

    def carry_out(self, effects: Sequence[Effect]) -> None:
        """Do what decisions have left to do. Call it without the lock."""
        # A batch in one post: a nursery that is lost while it starts the first has then been asked for all of them.
        launches = [
            functools.partial(self.reactor.launch, effect.record) for effect in effects if isinstance(effect, Launch)
        ]
        for effect in effects:
            match effect:
                case Launch() if launches:
                    self.reactor.post(*launches)
                    launches.clear()
                case StopProcesses(records, graces):
                    ids = tuple(record.id for record in records)
                    self.reactor.post(lambda ids=ids, graces=graces: self.reactor.stop(ids, graces))  # type: ignore[misc]
                case Finished(record):
                    self.finish(record)
                case Call(callback):
                    try:
                        callback()
                    except Exception:
                        _log.error("a callback at the end of a wait raised", exc_info=True)

    def finish(self, record: ChildRecord) -> None:
        """Release what belongs to a process that has ended."""
        with self.lock:
            if record.exit_seen:
                self.close_pidfd(record)
            record.release_payload()
            answers = self.gate.gone(record.id)
        for answer in answers:
            answer()
        self.publish(record)

    @staticmethod
    def close_pidfd(record: ChildRecord) -> None:
        """Close a child's pidfd, if it is open. Under the lock."""
        if record.pidfd is not None:
            pidfd, record.pidfd = record.pidfd, None
            close_fds([pidfd])

    def publish(self, record: ChildRecord) -> None:
        """Tell the listener of a child's new state, if it has one."""
        for stirred in self.on_stir:
            stirred()
        if self.on_change is None:
            return
        with self.lock:
            status = record.status()
            if self.published.get(record.id) is status.state:
                return
            self.published[record.id] = status.state
            # Under the lock, for the order: what is published last must be the newest. It only appends to a queue.
            on_change = self.on_change
            self.observers.publish(lambda: on_change(status))

    def find(self, refs: Sequence[Ref] | None, caller: ChildRecord | None) -> list[ChildRecord]:
        """Return the records that references name, or all that the caller can see. Under the lock."""
        if refs is None:
            return self.registry.visible_to(caller)
        return [self.registry.find(child_id, caller, episode) for child_id, episode in refs]

    def apply(self, child_id: str, change: Callable[[ChildRecord], None]) -> None:
        """Let something happen to a child, and carry out what follows."""
        with self.lock:
            record = self.registry.records.get(child_id)
            if record is None:
                return
            change(record)
            effects = self.registry.take_effects()
        self.publish(record)
        self.carry_out(effects)

    def record_of(self, child_id: str) -> ChildRecord | None:
        """Return the record of a child of this episode, None if there is none."""
        with self.lock:
            return self.registry.records.get(child_id)
