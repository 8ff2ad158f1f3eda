"""The tree of children of one episode: lineage, limits, the queue and the waiters. No I/O, no threads, no clock but
``monotonic``.

The registry decides, the supervisor acts: every method changes records and leaves behind *effects*, which the
supervisor takes and carries out after it has released its lock (a launch, a stop, a callback to run).

Slots. ``max_concurrent_children`` bounds children that hold a slot: those whose process runs. A child that waits for
its own children gives its slot back. When its wait is over it is *woken*: it gets the next free slot, before any queued
child; a wait that ran into its timeout is answered at once, above the limit if need be, so a timeout is never late. If
every slot is held by ancestors of queued or woken children, nothing could ever move; then one of those goes on above
the limit, woken ones first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rlm_kernel.children.records import ChildRecord, ChildSpec, Limits
from rlm_kernel.children.states import DECIDES, Action, Event, Outcome, Phase, advance
from rlm_kernel.errors import ChildLimitError, StaleHandleError, UnknownHandleError
from rlm_kernel.values import Graces, Usage

_IDS_IN_MESSAGE = 20
"""Ids that an error message lists at most."""

Callback = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Launch:
    """Start the child's process."""

    record: ChildRecord


@dataclass(frozen=True, slots=True)
class StopProcesses:
    """Begin, or hasten, the stop of processes."""

    records: tuple[ChildRecord, ...]
    graces: Graces


@dataclass(frozen=True, slots=True)
class Finished:
    """The child has ended; release what belongs to its process."""

    record: ChildRecord


@dataclass(frozen=True, slots=True)
class Call:
    """Run a callback, outside of every lock."""

    callback: Callback


Effect = Launch | StopProcesses | Finished | Call


@dataclass(slots=True, eq=False)
class Waiter:
    """Somebody who waits for children. ``fire`` is called once, when the wait is over.

    Attributes:
        who: the child that waits, None for anybody else. It is woken by the same change that ends its wait, so that nobody
            from the queue can take the slot in between.
    """

    missing: set[str]
    any: bool
    fire: Callback
    over: bool = False
    who: ChildRecord | None = None


@dataclass(slots=True)
class Registry:
    """All children of the episodes of one supervisor. Not thread-safe: its owner brings the lock."""

    limits: Limits = Limits()
    episode_id: str = ""
    records: dict[str, ChildRecord] = field(default_factory=dict)
    _live: dict[str, ChildRecord] = field(default_factory=dict)
    _stale_up_to: int = 0
    _queue: deque[ChildRecord] = field(default_factory=deque)
    _woken: deque[tuple[ChildRecord, Callback]] = field(default_factory=deque)
    _waiters: dict[str, list[Waiter]] = field(default_factory=dict)
    _effects: list[Effect] = field(default_factory=list)
    _last_number: int = 0
    _started_in_episode: int = 0
    _stopping: int = 0

    # -- effects

    def take_effects(self) -> list[Effect]:
        """Hand over what is to be done, in order."""
        effects, self._effects = self._effects, []
        return effects

    # -- episodes

    def begin_episode(self, episode_id: str) -> None:
        """Forget the children of the episode before, whose ids become stale. All of them must have ended."""
        self._stale_up_to = self._last_number
        self.records.clear()
        self._started_in_episode = 0
        self.episode_id = episode_id

    @property
    def started_in_episode(self) -> int:
        return self._started_in_episode

    # -- looking up

    def find(self, child_id: str, caller: ChildRecord | None, episode_id: str | None = None) -> ChildRecord:
        """Return the child that an id or handle names.

        Args:
            child_id: the id.
            caller: who asks; it reaches its own descendants only. None for the root.
            episode_id: the episode of a handle, None for a bare id.

        Raises:
            StaleHandleError: the child belongs to an episode that a reset has ended.
            UnknownHandleError: there is no such child for this caller; the message lists those that there are.
        """
        record = self.records.get(child_id)
        stale = self._is_stale(child_id) if episode_id is None else episode_id != self.episode_id
        if stale and (record is None or episode_id is not None):
            raise StaleHandleError(f"child {child_id!r} belongs to an episode that a reset has ended; start a new one")
        if record is None or not record.is_reachable_from(caller):
            ids = [r.id for r in self.visible_to(caller)]
            shown = ", ".join(ids[-_IDS_IN_MESSAGE:]) or "none"
            more = f" (and {len(ids) - _IDS_IN_MESSAGE} earlier ones)" if len(ids) > _IDS_IN_MESSAGE else ""
            raise UnknownHandleError(f"no child {child_id!r} here. Children that exist: {shown}{more}")
        return record

    def _is_stale(self, child_id: str) -> bool:
        """Tell whether an id was given in an earlier episode: numbers go on over resets, so its number says it."""
        number = child_id.removeprefix("c")
        return number != child_id and number.isdecimal() and len(number) < 20 and 0 < int(number) <= self._stale_up_to

    def visible_to(self, caller: ChildRecord | None) -> list[ChildRecord]:
        """Return all descendants of ``caller`` (None: of the root), in start order."""
        return list(self.records.values()) if caller is None else caller.descendants()

    def live(self) -> list[ChildRecord]:
        """Return the children that have not ended."""
        return list(self._live.values())

    # -- admission

    def admit(
        self, specs: Sequence[ChildSpec], caller: ChildRecord | None, paths: Callable[[str], tuple[str, str]]
    ) -> list[ChildRecord]:
        """Take children in, all or none. They are queued; call `dispatch` next.

        Args:
            specs: what is asked for.
            caller: the parent, None for the root.
            paths: gives log path and trajectory path for an id.

        Raises:
            ChildLimitError: a limit would be exceeded; nothing was taken in.
        """
        self._check_limits(len(specs), caller)
        admitted = []
        for spec in specs:
            self._last_number += 1
            child_id = f"c{self._last_number}"
            log_path, trajectory_path = paths(child_id)
            record = ChildRecord(
                child_id, self._last_number, self.episode_id, caller, spec, self.limits, log_path, trajectory_path
            )
            if not spec.name:
                spec.name = child_id
            self.records[child_id] = self._live[child_id] = record
            if caller is not None:
                caller.children.append(record)
            self._queue.append(record)
            admitted.append(record)
        self._started_in_episode += len(admitted)
        return admitted

    def _check_limits(self, count: int, caller: ChildRecord | None) -> None:
        limits = self.limits
        depth = 1 if caller is None else caller.depth + 1
        if depth >= limits.max_depth:
            raise ChildLimitError(
                "max_depth",
                limits.max_depth,
                f"max_depth exceeded: a child here would be at depth {depth}, and max_depth={limits.max_depth} allows "
                f"depths 1 to {limits.max_depth - 1}",
            )
        if limits.max_children_per_batch is not None and count > limits.max_children_per_batch:
            raise ChildLimitError("max_children_per_batch", limits.max_children_per_batch)
        if self._started_in_episode + count > limits.max_children_total:
            raise ChildLimitError("max_children_total", limits.max_children_total)

    # -- what happens to a child

    def apply(
        self, record: ChildRecord, event: Event, *, graces: Graces | None = None, error: str | None = None
    ) -> None:
        """Let an event happen to a child: change its phase, decide its outcome, leave the effects.

        Raises:
            IllegalTransition: the event cannot happen now; nothing was changed.
        """
        phase, action = advance(record.phase, event)
        was_ended = record.ended
        record.phase = phase
        if not was_ended and record.outcome is None and event in DECIDES:
            record.outcome = DECIDES[event]
            if error is not None:
                record.error = error
        record.note_state(record.started_mono if event is Event.STARTED else None)
        match action:
            case Action.SPAWN:
                self._effects.append(Launch(record))
            case Action.STOP_PROCESS:
                self._effects.append(StopProcesses((record,), graces or record.limits.graces))
                self._stop_descendants(record, graces)
            case Action.DECIDE:
                self._stop_descendants(record, graces)
            case Action.FINISH:
                self._finish(record)
            case Action.KEEP_ANSWER | Action.NOTHING:
                pass

    def _stop_descendants(self, record: ChildRecord, graces: Graces | None) -> None:
        self.stop(record.children, graces)

    def stop(self, records: Iterable[ChildRecord], graces: Graces | None) -> None:
        """Ask children and all their descendants to stop. No slot is given away before each of them has been told."""
        self._stopping += 1
        try:
            for record in records:
                if not record.ended:
                    self.apply(record, Event.STOP, graces=graces)
        finally:
            self._stopping -= 1
        self.dispatch()

    def never_started(self, record: ChildRecord, error: str) -> None:
        """No process came to be for this child, and none will."""
        if record.pid is not None or record.exit_seen:
            return
        self.apply(record, Event.SPAWN_FAILED, error=error)
        record.confirm_exit()

    def exited(self, record: ChildRecord, code: int | None, error: str | None = None) -> None:
        """The child's process is confirmed gone. The child has ended once its descendants have ended, too."""
        if record.exit_seen:
            return
        record.confirm_exit()
        record.exit_code = code
        if record.ended:
            return
        if record.outcome is None:
            record.outcome = Outcome.FAILED
            record.error = error
        self._stop_descendants(record, None)
        self._end_if_alone(record)

    def give_up(self, record: ChildRecord) -> None:
        """The child's exit could not be confirmed in time: it counts as ended, though not as exited."""
        if record.ended:
            return
        record.given_up = True
        self.apply(record, Event.GIVEN_UP)

    def _end_if_alone(self, record: ChildRecord) -> None:
        if record.exit_seen and not record.ended and all(child.ended for child in record.children):
            self.apply(record, Event.EXITED)

    def _finish(self, record: ChildRecord) -> None:
        record.ended_mono = record.history.since
        if record.pid is None and not record.given_up:
            record.confirm_exit()
        self._live.pop(record.id, None)
        if record in self._queue:
            self._queue.remove(record)
        self._woken = deque((who, answer) for who, answer in self._woken if who is not record)
        self._effects.append(Finished(record))
        for waiter in self._waiters.pop(record.id, []):
            waiter.missing.discard(record.id)
            if not waiter.over and (waiter.any or not waiter.missing):
                self.remove_waiter(waiter)  # a wait for any is registered with those that run on, too
                self._wake(waiter)
        if record.parent is not None:
            self._end_if_alone(record.parent)
        self.dispatch()

    def _wake(self, waiter: Waiter) -> None:
        if waiter.who is None:
            self._effects.append(Call(waiter.fire))
        elif waiter.who.phase is Phase.WAITING:
            self._woken.append((waiter.who, waiter.fire))
        else:
            self._resume(waiter.who, waiter.fire)

    # -- the queue

    def dispatch(self) -> None:
        """Give free slots away: first to woken waiters, then to the queue, first in, first out."""
        if self._stopping:
            return
        self._answer_those_without_need()
        while (self._woken or self._queue) and (self._has_free_slot() or self._is_stuck()):
            if self._woken:
                self._resume(*self._woken.popleft())
                self._answer_those_without_need()
            else:
                self.apply(self._queue.popleft(), Event.SLOT)

    def _answer_those_without_need(self) -> None:
        """Answer woken waits of children that run (another thread of theirs had waited, too) or are being stopped."""
        for entry in [entry for entry in self._woken if entry[0].phase is not Phase.WAITING]:
            self._woken.remove(entry)
            self._resume(*entry)

    def _has_free_slot(self) -> bool:
        return sum(record.holds_slot for record in self._live.values()) < self.limits.max_concurrent_children

    def _is_stuck(self) -> bool:
        blocking = {id(a) for record in (*self._queue, *(who for who, _ in self._woken)) for a in record.ancestors()}
        return all(id(record) in blocking for record in self._live.values() if record.holds_slot)

    # -- waiting

    def add_waiter(self, records: Sequence[ChildRecord], any_: bool, fire: Callback) -> Waiter | None:
        """Register a wait.

        Returns:
            the waiter, or None if the wait is over already.
        """
        missing = {record.id for record in records if not record.ended}
        if not missing or (any_ and any(record.ended for record in records)):
            return None
        waiter = Waiter(missing, any_, fire)
        for child_id in missing:
            self._waiters.setdefault(child_id, []).append(waiter)
        return waiter

    def remove_waiter(self, waiter: Waiter) -> None:
        """Unregister a wait that ended some other way. It will not fire any more."""
        waiter.over = True
        for child_id in waiter.missing:
            waiters = self._waiters.get(child_id)
            if waiters is not None and waiter in waiters:
                waiters.remove(waiter)
                if not waiters:
                    del self._waiters[child_id]

    def begin_wait(self, record: ChildRecord, on: Sequence[ChildRecord], any_: bool, answer: Callback) -> Waiter | None:
        """A child begins to wait for its own children, and gives its slot back.

        Args:
            record: the child that waits.
            on: for whom.
            any_: whether the first that ends is enough.
            answer: tells the child that it may go on; called once, when the wait is over and there is a slot.

        Returns:
            the waiter, or None if the wait is over already: the child goes on, and ``answer`` is not called.
        """
        waiter = self.add_waiter(on, any_, answer)
        if waiter is not None:
            waiter.who = record
            self.apply(record, Event.WAIT_BEGAN)
            self.dispatch()
        return waiter

    def wait_timed_out(self, waiter: Waiter) -> None:
        """A child's wait has run into its timeout: the child goes on at once, above the limit if need be."""
        who = waiter.who
        if who is None:
            return
        if not waiter.over:
            self.remove_waiter(waiter)
        elif (who, waiter.fire) in self._woken:
            self._woken.remove((who, waiter.fire))
        else:
            return
        self._resume(who, waiter.fire)
        self.dispatch()

    def _resume(self, record: ChildRecord, answer: Callback) -> None:
        self.apply(record, Event.WAIT_ENDED)
        self._effects.append(Call(answer))

    # -- totals

    def total_usage(self) -> Usage:
        """Return the usage of all children of the episode, ended ones included."""
        return sum((record.usage for record in self.records.values()), Usage())
