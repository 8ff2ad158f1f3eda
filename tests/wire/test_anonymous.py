"""Anonymous files: bytes of any size behind one descriptor."""

from __future__ import annotations

import os

import pytest

from rlm_kernel.wire.anonymous import anonymous_file, map_private, read_anonymous


@pytest.fixture(params=["memfd", "temporary file"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "temporary file":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    return str(request.param)


@pytest.mark.parametrize(
    ("chunks", "content"), [([], b""), ([b"ab", bytearray(b"c"), memoryview(b"def")], b"abcdef"), ([b""], b"")]
)
def test_what_is_written_can_be_read_again_and_again(kind: str, chunks: list[bytes], content: bytes) -> None:
    fd = anonymous_file(chunks)
    try:
        assert read_anonymous(fd) == content
        assert read_anonymous(fd) == content
        assert bytes(map_private(fd)) == content
    finally:
        os.close(fd)


def test_nothing_has_a_name_on_disk_and_no_child_inherits_it(kind: str) -> None:
    fd = anonymous_file([b"x"])
    try:
        assert os.fstat(fd).st_nlink == 0
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_more_than_one_write_call_loses_nothing(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("rlm_kernel.wire.anonymous._WRITE_CHUNK", 7)
    fd = anonymous_file([bytes(range(100)), memoryview(b"abcd" * 5)])
    try:
        assert read_anonymous(fd) == bytes(range(100)) + b"abcd" * 5
    finally:
        os.close(fd)


def test_a_failed_write_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        anonymous_file([b"x"])
    assert set(os.listdir("/proc/self/fd")) == before


def test_writing_to_a_private_map_changes_nothing_for_others() -> None:
    fd = anonymous_file([b"abc"])
    try:
        mine = map_private(fd)
        mine[0] = ord("X")
        assert bytes(mine) == b"Xbc"
        assert read_anonymous(fd) == b"abc"
    finally:
        os.close(fd)


def test_non_contiguous_or_typed_buffers_are_written_as_their_bytes() -> None:
    import array

    fd = anonymous_file([memoryview(array.array("i", [1, 2]))])
    try:
        assert read_anonymous(fd) == array.array("i", [1, 2]).tobytes()
    finally:
        os.close(fd)
