"""The raw log: bounded on disk, its end always known, and never a reason to lose a child."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlm_kernel.children import rawlog
from rlm_kernel.children.rawlog import RawLog


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rawlog, "CAP_BYTES", 100)
    monkeypatch.setattr(rawlog, "TAIL_BYTES", 20)


def test_no_output_makes_no_file(tmp_path: Path) -> None:
    RawLog(str(tmp_path / "c1.log")).close()
    assert list(tmp_path.iterdir()) == []


def test_output_is_written_as_it_comes_for_the_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "c1.log"
    log = RawLog(str(path))
    log.add(b"one\n")
    log.add(b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"
    assert path.stat().st_mode & 0o777 == 0o600
    log.close()
    assert path.read_bytes() == b"one\ntwo\n"


def test_what_is_beyond_the_cap_is_counted_and_the_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "c1.log"
    log = RawLog(str(path))
    log.add(b"a" * 90)
    log.add(b"b" * 500 + b"the very end")
    assert path.stat().st_size == 100
    log.close()
    log.close()
    text = path.read_text()
    assert text.startswith("a" * 90 + "b" * 10 + "\n[... 502 bytes left out; the last 20 bytes follow ...]\n")
    assert text.endswith("b" * 8 + "the very end")
    assert text.count("left out") == 1


def test_the_tail_is_the_end_of_everything_and_broken_text_stays_readable() -> None:
    log = RawLog("")
    log.add(b"x" * 50 + b"last \xff words")
    assert log.tail.endswith("last � words")
    assert len(log.tail) == 20
    log.close()


def test_a_file_that_cannot_be_written_loses_only_the_file(tmp_path: Path) -> None:
    blocked = tmp_path / "not_a_folder"
    blocked.write_text("")
    log = RawLog(str(blocked / "c1.log"))
    log.add(b"hello")
    log.add(b" again")
    assert log.error is not None
    assert log.tail == "hello again"
    log.close()


def test_a_full_disk_is_remembered_and_the_tail_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RawLog(str(tmp_path / "c1.log"))
    log.add(b"before")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    log.add(b" after")
    assert "No space left" in str(log.error)
    assert log.tail == "before after"
    log.close()


def test_a_secret_is_replaced_also_where_a_write_ends_in_the_middle_of_it(tmp_path: Path) -> None:
    path = tmp_path / "c1.log"
    log = RawLog(str(path), ("sk-secret", "sk-other"))
    for piece in (b"key sk-se", b"cret, sk-", b"o", b"ther and sk-s"):
        log.add(piece)
    assert b"sk-s" not in path.read_bytes()
    log.close()
    assert path.read_bytes() == b"key [redacted], [redacted] and sk-s"
