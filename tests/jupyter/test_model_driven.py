"""Promises of `rlm_kernel.jupyter.model_driven`, with ipykernel's own streams. What a kernel makes of it is in end_to_end/test_harness."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from ipykernel.iostream import IOPubThread, OutStream
from jupyter_client.session import Session

from rlm_kernel.environment.finalization import Finalization, UnknownVariable
from rlm_kernel.jupyter.model_driven import ModelDrivenCell, is_model_driven
from rlm_kernel.values import FinalAnswer


class Rig:
    """A session's finalization, and the stream to which its cells write."""

    def __init__(self, stream: OutStream, use_stream: Callable[[], None]) -> None:
        self.stream = stream
        self._use_stream = use_stream  # in the test itself: pytest sets its own stream after the fixtures
        self.namespace: dict[str, Any] = {"x": 9}
        self.finalization = Finalization(lambda: self.namespace, frozenset)

    def begin(self, message: str = "m1") -> ModelDrivenCell:
        """Begin a cell as the kernel does, in this thread."""
        self._use_stream()
        self.stream.set_parent({"header": {"msg_id": message}})
        self.finalization.begin_cell()
        return ModelDrivenCell(SimpleNamespace(finalization=self.finalization), SimpleNamespace())  # type: ignore[arg-type]

    def run(self, cell: Callable[[], object], *, success: bool = True) -> FinalAnswer | None:
        with self.begin() as driven:
            cell()
        return driven.finish(success)


@pytest.fixture(scope="module")
def stream() -> Iterator[OutStream]:
    """A stream as the kernel has it. Its publishing thread is not started: what is sent is not looked at here."""
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        thread = IOPubThread(socket, session=Session(key=b"test"))
        yield OutStream(thread.session, thread, "stdout", watchfd=False)
        thread._event_puller.close()
        thread.io_loop.close()


@pytest.fixture
def rig(stream: OutStream, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    yield Rig(stream, lambda: monkeypatch.setattr(sys, "stdout", stream))
    assert "write" not in vars(stream), "a tap is left"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the stream itself is given."""
    found: list[str] = []

    def write(_stream: OutStream, text: str) -> int:
        found.append(text)
        return len(text)

    monkeypatch.setattr(OutStream, "write", write)
    return found


@pytest.mark.parametrize(
    ("metadata", "driven"),
    [
        ({"rlm": {"model_driven": True}}, True),
        ({"rlm": {"model_driven": 1}}, False),
        ({"rlm": {"model_driven": "true"}}, False),
        ({"rlm": True}, False),
        ({"rlm": None}, False),
        ({}, False),
        (None, False),
        ([], False),
    ],
)
def test_only_the_exact_word_makes_a_cell_model_driven(metadata: Any, driven: bool) -> None:
    assert is_model_driven(metadata) is driven


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ("FINAL(42)\n", "42"),
        ("work\n  FINAL(a (b)\nc) and more\n", "a (b)\nc"),
        ("FINAL_VAR(x)", 9),
        ("FINAL_VAR('x')\n", 9),
        ("the call FINAL(42) in a line\n    FINAL(quoted)\n", None),
        ("FINAL(never closed\n", None),
        ("", None),
    ],
)
@pytest.mark.parametrize("pieces", [1, 3, 1000])
def test_a_line_of_output_is_the_answer_however_it_is_cut_into_pieces(
    rig: Rig, output: str, answer: Any, pieces: int
) -> None:
    size = max(1, len(output) // pieces)

    def cell() -> None:
        for i in range(0, len(output), size):
            sys.stdout.write(output[i : i + size])

    assert rig.run(cell) == (None if answer is None else FinalAnswer(answer))


def test_output_is_shown_as_if_it_were_not_scanned(rig: Rig, shown: list[str]) -> None:
    rig.run(lambda: print("one", "FINAL(2)", sep="\n"))
    assert "".join(shown) == "one\nFINAL(2)\n"


def test_of_a_cell_that_raised_nothing_counts(rig: Rig) -> None:
    assert rig.run(lambda: print("FINAL(1)"), success=False) is None
    assert rig.run(lambda: rig.finalization.FINAL(1), success=False) is None
    assert rig.finalization.final is None


def test_a_call_goes_before_a_line_and_the_first_line_before_the_second(rig: Rig) -> None:
    assert rig.run(lambda: print("FINAL(first)\nFINAL(second)")) == FinalAnswer("first")
    rig.finalization.reset()
    assert rig.run(lambda: print(rig.finalization.FINAL("called") and "FINAL(written)")) == FinalAnswer("called")


def test_a_line_that_names_no_variable_is_an_error_that_names_those_that_exist(rig: Rig) -> None:
    with pytest.raises(UnknownVariable, match=r"'y'.*exist: x"):
        rig.run(lambda: print("FINAL_VAR(y)"))
    assert rig.run(lambda: print("FINAL_VAR(x)")) == FinalAnswer(9), "the next cell is a cell as any"


def test_an_interrupted_cell_leaves_no_tap_and_no_answer(rig: Rig) -> None:
    driven = rig.begin()
    with contextlib.suppress(KeyboardInterrupt), driven:
        print("FINAL(1)")
        raise KeyboardInterrupt
    assert driven.finish(False) is None


@pytest.mark.parametrize("at", ["first", "middle", "last"])
def test_in_fifty_megabytes_of_output_a_line_is_found_and_hardly_any_memory_is_used(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    monkeypatch.setattr(OutStream, "write", lambda _self, text: len(text))
    noise = "x FINAL(no) y\n" * 36_000  # half a megabyte

    def cell() -> None:
        for i in range(100):
            if i == {"first": 0, "middle": 50, "last": 99}[at]:
                print("FINAL(here)")
            print(noise)

    tracemalloc.start()
    try:
        assert rig.run(cell) == FinalAnswer("here")
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


def test_what_other_threads_of_the_cell_write_counts(rig: Rig) -> None:
    def cell() -> None:
        threads = [threading.Thread(target=lambda: [print("noise") for _ in range(500)]) for _ in range(3)]
        threads.append(threading.Thread(target=sys.stdout.write, args=("\nFINAL(from a thread)\n",)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert rig.run(cell) == FinalAnswer("from a thread")


def test_cells_of_two_threads_at_once_do_not_mix(rig: Rig) -> None:
    """As subshells have them. They end in the order in which they began, which a stack of replaced streams would not survive."""
    began, ended = threading.Event(), threading.Event()
    found: list[FinalAnswer | None] = []

    def other() -> None:
        with rig.begin("m2") as driven:
            began.set()
            print("FINAL(other)")
            assert ended.wait(5)
            print("more")
        found.append(driven.finish(True))

    first = rig.begin("m1")
    with first:
        thread = threading.Thread(target=other)
        thread.start()
        assert began.wait(5)
        print("mine")
    assert first.finish(True) is None
    ended.set()
    thread.join(5)
    assert found == [FinalAnswer("other")]


def test_a_persons_cell_beside_a_model_driven_one_is_not_scanned(rig: Rig) -> None:
    def person() -> None:
        rig.stream.set_thread_parent({"header": {"msg_id": "m2"}})
        print("FINAL(a person's)")

    def cell() -> None:
        thread = threading.Thread(target=person)
        thread.start()
        thread.join()

    assert rig.run(cell) is None


def test_what_the_code_redirects_is_not_shown_and_does_not_count(rig: Rig) -> None:
    def cell() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            print("FINAL(kept to itself)")
        print("FINAL(stderr)", file=sys.stderr)

    assert rig.run(cell) is None


def test_a_write_that_the_code_put_in_place_of_ours_stays(rig: Rig) -> None:
    """A library may patch the stream, too; after the cell its patch works, and ours only passes on."""
    seen: list[str] = []

    def cell() -> None:
        inner = sys.stdout.write

        def write(text: str) -> int:
            seen.append(text)
            return inner(text)

        vars(sys.stdout)["write"] = write
        print("FINAL(1)")

    assert rig.run(cell) == FinalAnswer("1")
    assert rig.run(lambda: print("FINAL(2)")) is None, "there is an answer"
    assert "".join(seen) == "FINAL(1)\nFINAL(2)\n"
    del vars(rig.stream)["write"]


def test_without_a_stream_a_call_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``pythonw``, where there is no standard output at all."""
    monkeypatch.setattr(sys, "stdout", None)
    finalization = Finalization(dict, frozenset)
    finalization.begin_cell()
    with ModelDrivenCell(SimpleNamespace(finalization=finalization), None) as driven:  # type: ignore[arg-type]
        finalization.FINAL(os.name)
    assert driven.finish(True) == FinalAnswer(os.name)
