"""The registry decides who runs: first in, first out, no deadlock however children wait, all or nothing at the door."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlm_kernel.children.records import ChildRecord, ChildSpec, Limits
from rlm_kernel.children.registry import Call, Finished, Launch, Registry, StopProcesses
from rlm_kernel.children.states import Event, Phase
from rlm_kernel.errors import ChildLimitError, StaleHandleError, UnknownHandleError
from rlm_kernel.values import ChildState, Graces, Usage


def spec() -> ChildSpec:
    return ChildSpec("m:f", b"", b"", {}, {}, "/", ())


class Driver:
    """Plays the supervisor: carries effects out at once, and remembers them."""

    def __init__(self, registry: Registry | None = None, **limits: object) -> None:
        self.registry = registry or Registry()
        self.registry.limits = Limits(**{"max_depth": 9, **limits})  # type: ignore[arg-type]
        self.registry.begin_episode("e1")
        self.launched: list[str] = []
        self.stopped: list[str] = []
        self.finished: list[str] = []
        self.answered: list[str] = []
        self.next_pid = 100

    def settle(self) -> None:
        for effect in self.registry.take_effects():
            match effect:
                case Launch(record):
                    self.launched.append(record.id)
                case StopProcesses(records, _):
                    self.stopped += [record.id for record in records]
                case Finished(record):
                    self.finished.append(record.id)
                case Call(callback):
                    callback()
                    self.settle()

    def start(self, count: int, parent: ChildRecord | None = None) -> list[ChildRecord]:
        records = self.registry.admit([spec() for _ in range(count)], parent, lambda _id: ("", ""))
        self.registry.dispatch()
        self.settle()
        return records

    def run(self, record: ChildRecord) -> None:
        """Its process exists now."""
        assert record.id in self.launched
        self.next_pid += 1
        record.pid = self.next_pid
        self.registry.apply(record, Event.STARTED)
        self.settle()

    def answer(self, record: ChildRecord) -> None:
        self.registry.apply(record, Event.ANSWER)
        self.settle()

    def exit(self, record: ChildRecord, code: int = 0) -> None:
        self.registry.exited(record, code, f"exited with {code}")
        self.settle()

    def complete(self, record: ChildRecord) -> None:
        self.run(record)
        self.answer(record)
        self.exit(record)

    def wait(self, record: ChildRecord, on: Sequence[ChildRecord]) -> Callable[[], None]:
        """Let a child wait. Returns what its timeout would do."""
        waiter = self.registry.begin_wait(record, on, False, lambda: self.answered.append(record.id))
        assert waiter is not None
        self.settle()

        def time_is_up() -> None:
            self.registry.wait_timed_out(waiter)
            self.settle()

        return time_is_up


def phases(records: Sequence[ChildRecord]) -> list[Phase]:
    return [record.phase for record in records]


# ---------------------------------------------------------------------------------------------------------- the queue


def test_children_start_first_in_first_out() -> None:
    driver = Driver(max_concurrent_children=2)
    children = driver.start(5)
    assert driver.launched == ["c1", "c2"]
    driver.complete(children[1])
    assert driver.launched == ["c1", "c2", "c3"]
    driver.complete(children[0])
    driver.complete(children[2])
    assert driver.launched == ["c1", "c2", "c3", "c4", "c5"]


def test_four_parents_that_each_wait_for_two_children_finish_with_two_slots() -> None:
    driver = Driver(max_concurrent_children=2)
    parents = driver.start(4)
    for parent in parents:
        assert parent.id in driver.launched
        driver.run(parent)
        below = driver.start(2, parent)
        driver.wait(parent, below)
    assert phases(parents) == [Phase.WAITING] * 4
    while pending := [r for r in driver.registry.live() if r.phase is Phase.STARTING]:
        assert len(pending) <= 2
        driver.complete(pending[0])
        for parent in parents:
            if parent.phase is Phase.RUNNING:
                driver.answer(parent)
                driver.exit(parent)
    assert [parent.state for parent in parents] == [ChildState.COMPLETED] * 4
    assert sorted(driver.answered) == sorted(parent.id for parent in parents)


def test_a_parent_that_polls_instead_of_waiting_gets_its_child_started_above_the_limit() -> None:
    driver = Driver(max_concurrent_children=1)
    [parent] = driver.start(1)
    driver.run(parent)
    children = driver.start(3, parent)
    assert driver.launched == ["c1", "c2"], "one, and not all of them"
    driver.complete(children[0])
    assert driver.launched == ["c1", "c2", "c3"]


def test_nobody_starts_above_the_limit_while_somebody_else_could_finish() -> None:
    driver = Driver(max_concurrent_children=2)
    parent, stranger = driver.start(2)
    driver.run(parent)
    driver.run(stranger)
    driver.start(1, parent)
    assert driver.launched == ["c1", "c2"]
    driver.answer(stranger)
    driver.exit(stranger)
    assert driver.launched == ["c1", "c2", "c3"]


def test_a_woken_waiter_gets_a_slot_before_the_queue() -> None:
    driver = Driver(max_concurrent_children=1)
    parent, queued = driver.start(2)
    driver.run(parent)
    [child] = driver.start(1, parent)
    driver.wait(parent, [child])
    assert queued.phase is Phase.STARTING, "the parent's slot went to the first in the queue"
    driver.complete(queued)
    [late] = driver.start(1)
    driver.complete(child)
    assert driver.answered == ["c1"]
    assert phases([late]) == [Phase.QUEUED]
    driver.answer(parent)
    driver.exit(parent)
    assert phases([late]) == [Phase.STARTING]


def test_a_wait_whose_time_is_up_is_answered_at_once_above_the_limit() -> None:
    driver = Driver(max_concurrent_children=1)
    parent, other = driver.start(2)
    driver.run(parent)
    [child] = driver.start(1, parent)
    time_is_up = driver.wait(parent, [child])
    assert other.phase is Phase.STARTING
    time_is_up()
    assert driver.answered == ["c1"]
    assert parent.phase is Phase.RUNNING


def test_a_timeout_is_not_late_when_the_wait_is_over_and_only_a_slot_is_missing() -> None:
    driver = Driver(max_concurrent_children=1)
    parent, other = driver.start(2)
    driver.run(parent)
    [child] = driver.start(1, parent)
    time_is_up = driver.wait(parent, [child])
    driver.run(other)
    driver.registry.apply(child, Event.STOP)
    driver.settle()
    assert child.ended
    assert driver.answered == [], "the other one holds the only slot"
    time_is_up()
    assert driver.answered == ["c1"]
    time_is_up()
    assert driver.answered == ["c1"], "once only"


def test_a_woken_waiter_whose_ancestor_polls_for_it_goes_on_above_the_limit() -> None:
    driver = Driver(max_concurrent_children=1)
    [top] = driver.start(1)
    driver.run(top)
    [middle] = driver.start(1, top)
    driver.run(middle)
    [leaf] = driver.start(1, middle)
    driver.wait(middle, [leaf])
    driver.complete(leaf)
    assert driver.answered == [middle.id], "the top polls for it and keeps its slot: nothing else could ever move"


def test_a_child_that_waits_in_two_threads_gets_both_answers_for_its_one_slot() -> None:
    driver = Driver(max_concurrent_children=1)
    [parent] = driver.start(1)
    driver.run(parent)
    first, second = driver.start(2, parent)
    driver.wait(parent, [first])
    driver.wait(parent, [second])
    [other] = driver.start(1)
    driver.complete(first)
    if second.phase is Phase.STARTING:
        driver.complete(second)
    assert driver.answered == [parent.id] * 2
    assert parent.phase is Phase.RUNNING
    assert other.phase is Phase.QUEUED


def test_a_stop_of_everything_starts_nothing_from_the_queue() -> None:
    driver = Driver(max_concurrent_children=1)
    [parent] = driver.start(1)
    driver.run(parent)
    driver.start(4, parent)
    driver.start(4)
    launched = list(driver.launched)
    driver.registry.stop(driver.registry.live(), Graces())
    driver.settle()
    assert driver.launched == launched
    assert {r.phase for r in driver.registry.live()} == {Phase.STOPPING}


def test_a_stop_of_everything_starts_nothing_though_there_are_slots_by_now() -> None:
    driver = Driver(max_concurrent_children=1)
    driver.start(4)
    driver.registry.limits = Limits(max_concurrent_children=4)
    driver.registry.stop(driver.registry.live(), Graces())
    driver.settle()
    assert driver.launched == ["c1"]


def test_stopping_a_parent_starts_none_of_its_queued_children() -> None:
    driver = Driver(max_concurrent_children=1)
    [parent] = driver.start(1)
    driver.run(parent)
    children = driver.start(4, parent)
    launched = list(driver.launched)
    driver.answer(parent)
    assert driver.launched == launched
    assert [c.state for c in children[1:]] == [ChildState.CANCELLED] * 3


# ------------------------------------------------------------------------------------------------------------ the end


def test_a_parent_has_ended_only_when_all_its_descendants_have() -> None:
    driver = Driver()
    [parent] = driver.start(1)
    driver.run(parent)
    [child] = driver.start(1, parent)
    driver.run(child)
    [grandchild] = driver.start(1, child)
    driver.run(grandchild)
    driver.answer(parent)
    driver.exit(parent)
    assert parent.exit_seen
    assert not parent.ended
    driver.exit(child)
    assert not parent.ended
    driver.exit(grandchild)
    assert [r.state for r in (parent, child, grandchild)] == [
        ChildState.COMPLETED,
        ChildState.CANCELLED,
        ChildState.CANCELLED,
    ]
    assert driver.finished == ["c3", "c2", "c1"]


def test_a_parent_that_dies_takes_its_descendants_along() -> None:
    driver = Driver()
    [parent] = driver.start(1)
    driver.run(parent)
    [child] = driver.start(1, parent)
    driver.run(child)
    driver.wait(parent, [child])
    driver.exit(parent, -9)
    assert driver.stopped == ["c2"]
    driver.exit(child, 130)
    assert (parent.state, parent.error) == (ChildState.FAILED, "exited with -9")
    assert child.state is ChildState.CANCELLED


def test_the_first_event_that_decides_the_outcome_decides_it() -> None:
    driver = Driver()
    answered, stopped = driver.start(2)
    for record in (answered, stopped):
        driver.run(record)
    driver.answer(answered)
    driver.registry.stop([answered, stopped], Graces())
    driver.answer(stopped)
    for record in (answered, stopped):
        driver.exit(record)
    assert [answered.state, stopped.state] == [ChildState.COMPLETED, ChildState.CANCELLED]


def test_one_that_never_started_has_ended_and_is_known_to_be_gone() -> None:
    driver = Driver()
    [child] = driver.start(1)
    driver.registry.stop([child], Graces())
    driver.registry.never_started(child, "stopped first")
    driver.settle()
    assert (child.state, child.exit_seen) == (ChildState.CANCELLED, True)


def test_never_started_changes_nothing_for_a_child_that_has_a_process() -> None:
    driver = Driver()
    [child] = driver.start(1)
    driver.run(child)
    driver.registry.never_started(child, "late")
    assert child.phase is Phase.RUNNING


def test_a_child_that_was_given_up_is_confirmed_later_without_a_second_end() -> None:
    driver = Driver()
    [child] = driver.start(1)
    driver.run(child)
    driver.registry.stop([child], Graces())
    driver.registry.give_up(child)
    driver.settle()
    assert (child.state, child.exit_seen) == (ChildState.CANCELLED, False)
    driver.exit(child, -9)
    assert (child.exit_seen, child.exit_code, driver.finished) == (True, -9, ["c1"])


# --------------------------------------------------------------------------------------------------------------- waits


def test_a_wait_for_all_ends_with_the_last_and_a_wait_for_any_with_the_first() -> None:
    driver = Driver()
    children = driver.start(2)
    fired: list[str] = []
    driver.registry.add_waiter(children, False, lambda: fired.append("all"))
    driver.registry.add_waiter(children, True, lambda: fired.append("any"))
    driver.complete(children[1])
    assert fired == ["any"]
    driver.complete(children[0])
    assert fired == ["any", "all"]


def test_a_wait_for_what_has_ended_or_for_nothing_is_over_at_once() -> None:
    driver = Driver()
    done, running = driver.start(2)
    driver.complete(done)
    add = driver.registry.add_waiter
    assert add([done], False, pytest.fail) is None
    assert add([], False, pytest.fail) is None
    assert add([done, running], True, pytest.fail) is None


def test_a_removed_wait_never_fires_and_leaves_nothing() -> None:
    driver = Driver()
    children = driver.start(2)
    waiter = driver.registry.add_waiter(children, False, lambda: pytest.fail("fired"))
    assert waiter is not None
    driver.registry.remove_waiter(waiter)
    for child in children:
        driver.complete(child)
    assert driver.registry._waiters == {}


# -------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("limits", "count", "name", "value"),
    [
        ({"max_depth": 1}, 1, "max_depth", 1),
        ({"max_children_total": 2}, 3, "max_children_total", 2),
        ({"max_children_total": 0}, 1, "max_children_total", 0),
        ({"max_children_per_batch": 2}, 3, "max_children_per_batch", 2),
    ],
)
def test_a_limit_admits_all_or_none_and_says_which_it_is(
    limits: dict[str, int], count: int, name: str, value: int
) -> None:
    driver = Driver(None, **limits)
    with pytest.raises(ChildLimitError, match=name) as caught:
        driver.start(count)
    assert (caught.value.limit, caught.value.value) == (name, value)
    assert driver.registry.records == {}
    assert driver.launched == []
    assert driver.registry.started_in_episode == 0


def test_children_exist_at_depths_one_to_max_depth_minus_one() -> None:
    driver = Driver(max_depth=3)
    [child] = driver.start(1)
    driver.run(child)
    [grandchild] = driver.start(1, child)
    driver.run(grandchild)
    assert (child.depth, grandchild.depth) == (1, 2)
    with pytest.raises(ChildLimitError, match="would be at depth 3, and max_depth=3 allows depths 1 to 2"):
        driver.start(1, grandchild)


def test_the_total_counts_over_the_whole_tree_and_anew_in_each_episode() -> None:
    driver = Driver(max_children_total=2)
    [child] = driver.start(1)
    driver.run(child)
    [below] = driver.start(1, child)
    with pytest.raises(ChildLimitError):
        driver.start(1, child)
    driver.complete(below)
    driver.answer(child)
    driver.exit(child)
    with pytest.raises(ChildLimitError):
        driver.start(1)
    driver.registry.begin_episode("e2")
    assert driver.start(1)[0].id == "c3", "the numbering goes on"


# ------------------------------------------------------------------------------------------------------------- lookups


def test_an_unknown_id_names_those_that_exist() -> None:
    driver = Driver()
    driver.start(2)
    with pytest.raises(UnknownHandleError, match=r"'c9'.*c1, c2"):
        driver.registry.find("c9", None)
    driver = Driver(max_concurrent_children=99)
    driver.start(25)
    with pytest.raises(UnknownHandleError, match=r"c6, .*c25 \(and 5 earlier ones\)"):
        driver.registry.find("nope", None)


def test_an_id_of_the_episode_before_is_stale_not_unknown() -> None:
    driver = Driver()
    [child] = driver.start(1)
    driver.complete(child)
    driver.registry.begin_episode("e2")
    driver.start(1)
    with pytest.raises(StaleHandleError, match="c1"):
        driver.registry.find("c1", None)
    with pytest.raises(StaleHandleError):
        driver.registry.find("c2", None, "e1")
    with pytest.raises(UnknownHandleError):
        driver.registry.find("c3", None)
    assert driver.registry.find("c2", None, "e2").id == "c2"


def test_a_child_reaches_its_own_descendants_only() -> None:
    driver = Driver()
    one, two = driver.start(2)
    driver.run(one)
    [below] = driver.start(1, one)
    assert driver.registry.find("c3", one) is below
    assert driver.registry.visible_to(one) == [below]
    for hidden in ("c1", "c2"):
        with pytest.raises(UnknownHandleError):
            driver.registry.find(hidden, one)
    with pytest.raises(UnknownHandleError, match="none"):
        driver.registry.find("c3", two)


def test_usage_adds_up_over_ended_and_running_children() -> None:
    driver = Driver()
    one, two = driver.start(2)
    one.usage = Usage(1, 10, 100)
    driver.complete(one)
    two.usage = Usage(2, 20, 200)
    assert driver.registry.total_usage() == Usage(3, 30, 300)


# -------------------------------------------------------------------------------------- any order in which things happen


class CheckedRegistry(Registry):
    """Checks each slot at the moment at which it is given."""

    at_once = False

    def apply(self, record: ChildRecord, event: Event, **rest: object) -> None:
        takes = event is Event.SLOT or (event is Event.WAIT_ENDED and record.phase is Phase.WAITING)
        if takes and not self.at_once:
            holders = [r for r in self._live.values() if r.holds_slot]
            pending = [record, *self._queue, *(who for who, _ in self._woken)]
            blocked_on = {id(a) for p in pending for a in p.ancestors()}
            stuck = all(id(holder) in blocked_on for holder in holders)
            assert len(holders) < self.limits.max_concurrent_children or stuck
            if event is Event.SLOT:
                assert not [who for who, _ in self._woken], "the queue overtook a woken waiter"
                assert record.number < min((r.number for r in self._queue), default=10**9), "not first in, first out"
        super().apply(record, event, **rest)  # type: ignore[arg-type]


class RegistryMachine(RuleBasedStateMachine):
    """Children start, wait, answer, die and are stopped in any order that processes could bring about."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = CheckedRegistry()
        self.driver = Driver(self.registry, max_concurrent_children=2, max_depth=5, max_children_total=10**6)
        self.waits: list[tuple[ChildRecord, Callable[[], None], list[int]]] = []
        self.root_waits: list[tuple[list[ChildRecord], bool, list[int]]] = []

    def pick(self, data: st.DataObject, *phases_: Phase) -> ChildRecord | None:
        found = [r for r in self.registry.live() if r.phase in phases_ and not r.exit_seen]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(count=st.integers(1, 3))
    def start_from_root(self, count: int) -> None:
        self.driver.start(count)

    @rule(data=st.data(), count=st.integers(1, 2))
    def start_from_child(self, data: st.DataObject, count: int) -> None:
        parent = self.pick(data, Phase.RUNNING, Phase.WAITING)
        if parent is not None and parent.depth < 4:
            self.driver.start(count, parent)

    @rule(data=st.data())
    def process_comes_to_be(self, data: st.DataObject) -> None:
        found = [r for r in self.registry.live() if r.id in self.driver.launched and r.pid is None]
        if found:
            self.driver.run(data.draw(st.sampled_from(found)))

    @rule(data=st.data())
    def spawn_fails(self, data: st.DataObject) -> None:
        record = self.pick(data, Phase.STARTING)
        if record is not None:
            self.registry.never_started(record, "no memory")
            self.driver.settle()

    @rule(data=st.data(), event=st.sampled_from([Event.ANSWER, Event.FAILURE, Event.TIMEOUT, Event.LIMIT]))
    def something_decides(self, data: st.DataObject, event: Event) -> None:
        record = self.pick(data, Phase.RUNNING, Phase.WAITING)
        if record is not None:
            self.registry.apply(record, event)
            self.driver.settle()

    @rule(data=st.data())
    def process_exits(self, data: st.DataObject) -> None:
        found = [r for r in self.registry.live() if r.pid is not None and not r.exit_seen]
        if found:
            self.driver.exit(data.draw(st.sampled_from(found)), -9)

    @rule(data=st.data())
    def stop_some(self, data: st.DataObject) -> None:
        record = self.pick(data, Phase.QUEUED, Phase.STARTING, Phase.RUNNING, Phase.WAITING, Phase.ENDING)
        if record is not None:
            self.registry.stop([record], Graces())
            self.driver.settle()

    @rule(data=st.data())
    def child_waits(self, data: st.DataObject) -> None:
        record = self.pick(data, Phase.RUNNING, Phase.WAITING)
        below = [] if record is None else [r for r in record.descendants() if not r.ended]
        if record is not None and below:
            answered = [0]
            on = data.draw(st.lists(st.sampled_from(below), min_size=1, unique_by=id))

            def answer() -> None:
                answered[0] += 1

            waiter = self.registry.begin_wait(record, on, False, answer)
            assert waiter is not None
            self.driver.settle()

            def time_is_up() -> None:
                self.registry.at_once = True
                self.registry.wait_timed_out(waiter)
                self.registry.at_once = False
                self.driver.settle()

            self.waits.append((record, time_is_up, answered))

    @precondition(lambda self: self.waits)
    @rule(data=st.data())
    def time_is_up(self, data: st.DataObject) -> None:
        record, time_is_up, answered = data.draw(st.sampled_from(self.waits))
        time_is_up()
        assert answered[0] == 1 or record.ended

    @rule(data=st.data(), any_=st.booleans())
    def root_waits_for(self, data: st.DataObject, any_: bool) -> None:
        live = self.registry.live()
        if live:
            on = data.draw(st.lists(st.sampled_from(live), min_size=1, unique_by=id))
            fired = [0]

            def fire() -> None:
                fired[0] += 1

            assert self.registry.add_waiter(on, any_, fire) is not None
            self.root_waits.append((on, any_, fired))

    @invariant()
    def nobody_is_lost(self) -> None:
        for record in self.registry.records.values():
            assert (record.id in self.registry._live) == (not record.ended)
            assert (record in self.registry._queue) == (record.phase is Phase.QUEUED)
            assert self.driver.finished.count(record.id) == record.ended
            assert self.driver.launched.count(record.id) == (
                record.pid is not None or record.phase is Phase.STARTING
            ) or (record.pid is None and self.driver.launched.count(record.id) <= 1)
            if record.phase is Phase.STOPPING:
                assert record.id in self.driver.stopped

    @invariant()
    def nothing_that_could_move_stands_still(self) -> None:
        if self.registry._queue or self.registry._woken:
            assert not self.registry._has_free_slot()
            assert not self.registry._is_stuck()

    @invariant()
    def every_wait_is_answered_once_and_when_it_is_over(self) -> None:
        assert all(answered[0] <= 1 for _, _, answered in self.waits)
        for on, any_, fired in self.root_waits:
            ended = [record.ended for record in on]
            assert fired[0] == (any(ended) if any_ else all(ended))

    def teardown(self) -> None:
        """A stop ends everything, whatever was going on."""
        self.registry.stop(self.registry.live(), Graces())
        self.driver.settle()
        for record in self.registry.live():
            self.driver.exit(record, -9)
        assert self.registry.live() == []
        assert not self.registry._queue
        assert not self.registry._woken
        assert all(fired == [1] for _, _, fired in self.root_waits)
        assert all(record.state.done and record.exit_seen for record in self.registry.records.values())


RegistryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = RegistryMachine.TestCase
