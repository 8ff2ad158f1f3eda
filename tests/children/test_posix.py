"""What is read of another process is true, also at the moments at which the operating system shows nothing."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from rlm_kernel.children import posix


def test_a_process_that_has_just_been_started_shows_its_environment() -> None:
    """``Popen`` returns as soon as the exec has begun, some way before the environment stands in the new address space."""
    for _ in range(100):
        process = subprocess.Popen(["/bin/sleep", "1000"], env={"RLM_POSIX_TEST": "x"})
        try:
            assert posix.environ_has(process.pid, b"RLM_POSIX_TEST=x")
        finally:
            process.kill()
            process.wait()


def test_a_process_in_the_middle_of_an_exec_is_looked_at_when_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bytes] = [b"", b"", b"A=b\0"]
    stat = [b"0"] * 50
    stat[0], stat[20] = b"R", b"4096"
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: looks.pop(0) if path.name == "environ" else b"1 (x) " + b" ".join(stat)
    )
    assert posix.environ_value(1, "A") == "b"
    assert looks == []


def test_a_process_without_an_environment_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waited"))
    command = ["/bin/sh", "-c", "echo ready; read line"]
    with subprocess.Popen(command, env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert not posix.environ_has(process.pid, b"A=b")
    assert not posix.environ_has(process.pid, b"A=b")  # nor one that is gone
