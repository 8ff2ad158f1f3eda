"""``rlm-kernel doctor``, and the sweep of a kernel that starts: they find what outlived everything, and touch nothing else."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jupyter_core.utils import ensure_event_loop

from rlm_kernel.children.orphans import Orphan
from rlm_kernel.children.supervisor import Supervisor
from rlm_kernel.jupyter import doctor
from tests.children.helpers import DEADLINE_S, QUICK, ROOT, Reports, Watched, limits, nursery_of, spec
from tests.support.kernels import Kernel
from tests.support.strays import strays

Start = Callable[[str], int]


@pytest.fixture(autouse=True, scope="module")
def event_loop() -> None:
    """jupyter_client keeps one for good: it is not to look like a leak of the test that starts a kernel."""
    ensure_event_loop()


@pytest.fixture
def stray(no_leftovers: None) -> Iterator[Start]:
    """Start a daemon with a nursery's marker and no nursery."""
    with strays() as start:
        yield start


@pytest.fixture
def living(no_leftovers: None) -> Iterator[set[int]]:
    """A nursery with a child and a daemon of that child's."""
    supervisor = Supervisor()
    supervisor.configure(limits())
    with Reports() as reports:
        supervisor.start([spec("daemonize", reports, then="pause")])
        report = reports.next()
    yield {nursery_of(supervisor), report["pid"], report["daemon"]}
    assert supervisor.stop("teardown", QUICK).ok
    assert supervisor.close()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlm_kernel.cli", "doctor", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_doctor_names_what_is_left_behind_and_the_sweep_kills_it_and_nothing_else(
    stray: Start, living: set[int]
) -> None:
    pid = stray("left-by-nobody-1")
    with Watched(pid) as orphan, Watched(*living) as others:
        said = run()
        assert said.returncode == 1
        assert f"left behind: pid {pid} " in said.stdout
        assert "`rlm-kernel doctor --sweep` kills" in said.stdout
        assert orphan.alive() == [pid]
        swept = run("--sweep")
        assert (swept.returncode, swept.stderr) == (0, "")
        assert f"killed: pid {pid} " in swept.stdout
        assert orphan.alive() == []
        assert set(others.alive()) == living
        assert not any(f"pid {other} " in said.stdout + swept.stdout for other in living)


def test_doctor_says_what_the_platform_offers_and_0_when_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "find_orphans", list)
    monkeypatch.setattr(doctor, "kill_orphans", lambda _timeout_s: ([], ()))
    assert doctor.run(argparse.Namespace(sweep=False)) == 0
    assert doctor.run(argparse.Namespace(sweep=True)) == 0
    shown = capsys.readouterr().out
    assert "process descriptors (pidfd): yes" in shown
    assert "nothing is left behind" in shown
    assert "nothing was left behind" in shown


def test_what_a_sweep_cannot_kill_is_said_and_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Orphan(11, "m", "one"), Orphan(12, "m", "two")]
    monkeypatch.setattr(doctor, "kill_orphans", lambda _timeout_s: (found, (12,)))
    assert doctor.run(argparse.Namespace(sweep=True)) == 1
    shown = capsys.readouterr().out
    assert "killed: pid 11  one\nNOT gone: pid 12  two\n2 found, 1 gone" in shown


def test_a_kernel_that_starts_kills_what_an_earlier_one_left_and_nothing_else(
    stray: Start, living: set[int], tmp_path: Path
) -> None:
    pid = stray("left-by-nobody-2")
    with Watched(pid) as orphan, Watched(*living) as others, Kernel(tmp_path) as kernel:
        assert orphan.alive(DEADLINE_S) == []
        assert kernel.ok("1 + 1").text == "2"
        assert set(others.alive()) == living
