"""Promises of `rlm_kernel.environment.capture`."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from rlm_kernel.environment.capture import BoundedText, CapturingStream


def test_text_within_the_limit_is_kept_whole() -> None:
    text = BoundedText(10)
    for part in ("abc", "", "defg", "hij"):
        text.add(part)
    assert text.value() == "abcdefghij"


def test_text_beyond_the_limit_keeps_head_and_tail_and_says_how_much_is_missing() -> None:
    text = BoundedText(10)
    for character in "abcdefghijklmnopqrstuvwxyz":
        text.add(character)
    assert text.value() == "abcde\n[... 16 of 26 characters left out ...]\nvwxyz"


@pytest.mark.parametrize("size", [1, 3, 7, 26])
def test_what_is_kept_does_not_depend_on_how_it_was_written(size: int) -> None:
    whole, written = "abcdefghijklmnopqrstuvwxyz", BoundedText(8)
    for start in range(0, len(whole), size):
        written.add(whole[start : start + size])
    assert written.value() == "abcd\n[... 18 of 26 characters left out ...]\nwxyz"


def test_adding_goes_on_after_a_look() -> None:
    text = BoundedText(4)
    text.add("abcdefgh")
    assert text.value().endswith("gh")
    text.add("ij")
    assert text.value() == "ab\n[... 6 of 10 characters left out ...]\nij"


def test_nothing_is_held_of_what_is_left_out() -> None:
    text = BoundedText(1000)
    for _ in range(10_000):
        text.add("x" * 100)
    assert sum(len(part) for part in text._tail) <= 2 * 500 + 100


def test_a_flood_of_small_writes_costs_no_copy_of_the_tail_each() -> None:
    """A cut joins the tail; it must happen rarely, or a million prints take a minute."""
    text, cuts = BoundedText(200_000), 0
    cut = text._cut_tail

    def counted() -> None:
        nonlocal cuts
        cuts += 1
        cut()

    text._cut_tail = counted  # type: ignore[method-assign]
    for _ in range(100_000):
        text.add("0123456789")
    assert 1 <= cuts <= 10


def test_writes_of_several_threads_are_all_counted() -> None:
    text = BoundedText(10)

    def write() -> None:
        for _ in range(5000):
            text.add("x")

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "19990 of 20000 characters" in text.value()


def test_a_stream_keeps_and_passes_on() -> None:
    below = io.StringIO()
    stream = CapturingStream(below, below)
    print("a", 1, file=stream)
    assert stream.value() == below.getvalue() == "a 1\n"
    silent = CapturingStream(below, None)
    silent.write("not passed on")
    assert below.getvalue() == "a 1\n"


def test_a_stream_refuses_bytes_like_any_text_stream() -> None:
    with pytest.raises(TypeError, match="must be str, not bytes"):
        CapturingStream(io.StringIO(), None).write(b"x")  # type: ignore[arg-type]


def test_what_is_no_writing_goes_to_the_stream_below(tmp_path) -> None:
    with (tmp_path / "out").open("w", encoding="latin-1") as below:
        stream = CapturingStream(below, None)
        assert (stream.fileno(), stream.buffer) == (below.fileno(), below.buffer)
        assert stream.encoding == "latin-1"
        assert stream.writable()
        assert not stream.isatty()
    assert CapturingStream(io.StringIO(), None).encoding == "utf-8"
    assert sys.stdout.writable()
