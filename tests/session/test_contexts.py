"""Promises of `rlm_kernel.session.contexts`."""

from __future__ import annotations

import array
import gc
import os
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rlm_kernel.errors import PayloadError, UsageMistake
from rlm_kernel.session import contexts
from rlm_kernel.session.contexts import INLINE_CONTEXT, SharedContext, decode, encode


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before = open_fds()
    yield
    if open_fds() > before:
        gc.collect()
    assert open_fds() <= before


class Vector:
    """Pickles its numbers out of band, as numpy arrays do."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Vector, (pickle.PickleBuffer(self.buffer),)


LARGE = INLINE_CONTEXT + 1


@pytest.mark.parametrize(
    "value",
    [
        "",
        "text",
        "é€😀",
        "lone \ud800 surrogate \udcff",
        "x" * LARGE,
        "\ud800" * LARGE,
        b"",
        b"\x00\xff",
        b"x" * LARGE,
        None,
        {"a": [1, 2.5, None], "b": ("x", {1})},
        {"text": "x" * LARGE},
        array.array("d", [1.0, 2.0]),
        bytearray(b"abc"),
        lambda: 1,
    ],
    ids=lambda value: f"{type(value).__name__}-{len(value) if hasattr(value, '__len__') else ''}",
)
def test_a_context_arrives_as_it_was(value: object) -> None:
    arrived = decode(*encode(value))
    assert type(arrived) is type(value)
    if callable(value):
        assert callable(arrived)
        assert arrived() == value()
    else:
        assert arrived == value


class MyText(str):
    """A subclass of str, which is more than its characters."""

    note = ""


def test_a_subclass_of_str_stays_one() -> None:
    text = MyText("x")
    text.note = "kept"
    arrived = decode(*encode(text))
    assert (type(arrived), arrived, arrived.note) == (MyText, "x", "kept")


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, LARGE])
def test_buffers_travel_beside_the_pickle_and_are_writable_copies(size: int) -> None:
    ours = [bytearray(os.urandom(size)) for _ in range(3)]
    encoded, fds = encode([Vector(buffer) for buffer in ours])
    assert len(fds) == 1
    assert encoded.inline == b""
    arrived = decode(encoded, fds)
    assert [bytes(vector.buffer) for vector in arrived] == [bytes(buffer) for buffer in ours]
    if size:
        arrived[0].buffer[0] ^= 0xFF
        assert bytes(arrived[0].buffer) != bytes(ours[0])
        assert bytes(arrived[1].buffer) == bytes(ours[1])


def test_small_contexts_take_no_descriptor_and_large_ones_take_one() -> None:
    assert encode("x" * INLINE_CONTEXT)[1] == ()
    encoded, fds = encode("x" * LARGE)
    assert len(fds) == 1
    decode(encoded, fds)


@pytest.mark.parametrize(
    "value",
    [threading.Lock(), {"nested": [threading.Lock()]}, (i for i in range(3)), Vector(memoryview(bytearray(8))[::2])],
    ids=["lock", "nested", "generator", "not contiguous"],
)
def test_what_cannot_be_pickled_is_refused_with_advice(value: object) -> None:
    with pytest.raises(PayloadError, match=r"context= cannot be pickled .*pass text, bytes, or an object"):
        encode(value)


def test_a_context_that_cannot_be_rebuilt_leaks_nothing() -> None:
    encoded, fds = encode({"a": "x" * LARGE})
    with pytest.raises(Exception, match=r"."):
        decode(contexts.EncodedContext(contexts.PICKLE, in_file=True, sizes=(3,)), fds)
    assert encoded.in_file


def test_a_full_memory_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        encode("x" * LARGE)


@pytest.mark.parametrize("value", ["small", "x" * LARGE, {"a": 1}, Vector(bytearray(b"abc"))])
def test_a_shared_context_serves_many_times(value: object) -> None:
    shared = SharedContext(value)
    for _ in range(3):
        arrived = decode(*encode(shared))
        assert type(arrived) is type(value)
    assert type(shared.restore()) is type(value)
    del arrived
    shared.close()


def test_a_shared_context_is_a_snapshot() -> None:
    parts = ["a"]
    shared = SharedContext(parts)
    parts.append("b")
    assert shared.restore() == ["a"]


@pytest.mark.parametrize("value", ["small", "x" * LARGE])
def test_a_released_shared_context_says_so_and_may_be_released_twice(value: str) -> None:
    shared = SharedContext(value)
    assert "bytes" in repr(shared)
    shared.close()
    shared.close()
    assert "released" in repr(shared)
    with pytest.raises(UsageMistake, match="call rlm_share again"):
        encode(shared)


def test_descriptors_that_were_handed_out_outlive_the_release() -> None:
    shared = SharedContext("x" * LARGE)
    handed_out = shared.reference()
    shared.close()
    assert decode(*handed_out) == "x" * LARGE


def test_a_shared_context_is_released_with_its_last_reference() -> None:
    before = open_fds()
    shared = SharedContext("x" * LARGE)
    assert open_fds() == before + 1
    del shared
    assert open_fds() == before


def test_a_shared_context_inside_another_object_is_refused() -> None:
    shared = SharedContext("x")
    with pytest.raises(PayloadError, match="pass it as context= instead"):
        encode({"inside": shared})
