"""``rlm-kernel doctor``, and the sweep of a kernel that starts: what they say, what they find, and that they touch nothing else."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jupyter_core.utils import ensure_event_loop

from rlm_kernel.children.orphans import Orphan
from rlm_kernel.children.supervisor import Supervisor
from rlm_kernel.jupyter import doctor
from rlm_kernel.jupyter.checks import Check, Finding, State, check_leftovers
from tests.children.helpers import DEADLINE_S, QUICK, ROOT, Reports, Watched, limits, nursery_of, spec
from tests.support.kernels import Kernel, environment
from tests.support.strays import strays

Start = Callable[[str], int]

pytestmark = pytest.mark.alone  # any kernel that starts meanwhile would sweep these strays


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


def run(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlm_kernel.cli", "doctor", *arguments],
        cwd=ROOT,
        env=environment(home, **variables),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_doctor_finds_nothing_wrong_with_a_real_installation_and_starts_a_child_in_real(tmp_path: Path) -> None:
    said = run(tmp_path, "--json", RLM_MODEL="openai/test", OPENAI_API_KEY="sk-not-to-be-shown")
    assert said.stderr == ""
    answer = json.loads(said.stdout)
    found = {finding["check"]: finding for finding in answer["findings"]}
    # Another user of this machine may have left something behind.
    assert [f for f in answer["findings"] if f["state"] == "problem" and f["check"] != "left behind"] == []
    assert (said.returncode == 0) is answer["ok"] is (found["left behind"]["state"] == "ok")
    assert "is confirmed gone" in found["child"]["found"]
    assert found["model"]["found"] == "openai/test (from RLM_MODEL; OPENAI_API_KEY is set)"
    assert "not-to-be-shown" not in said.stdout
    assert found["kernelspec rlm"]["state"] == "ok"
    assert {path.name for path in tmp_path.iterdir()} <= {"ipython"}  # which IPython makes wherever it runs


def test_doctor_names_what_is_left_behind_and_the_sweep_kills_it_and_nothing_else(
    stray: Start, living: set[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = stray("left-by-nobody-1")
    with Watched(pid) as orphan, Watched(*living) as others:
        code, said = doctor_says(monkeypatch, capsys, check_leftovers)
        assert code == 1
        assert f"problem left behind: pid {pid} " in said
        assert "`rlm-kernel doctor --sweep` kills" in said
        assert orphan.alive() == [pid]
        assert doctor.run(argparse.Namespace(sweep=True, json=False)) == 0
        swept = capsys.readouterr().out
        assert f"killed: pid {pid} " in swept
        assert orphan.alive() == []
        assert set(others.alive()) == living
        assert not any(f"pid {other} " in said + swept for other in living)


def findings() -> Iterator[Finding]:
    yield Finding("first", State.OK, "[as it] should be")
    yield Finding("second", State.NOTE, "could be better", "do this")


def broken() -> Iterator[Finding]:
    yield from findings()
    raise RuntimeError("it broke, with sk-not-to-be-shown in it")


def doctor_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], check: Check, *, in_json: bool = False
) -> tuple[int, str]:
    monkeypatch.setattr(doctor, "CHECKS", {"a check": check})
    code = doctor.run(argparse.Namespace(sweep=False, json=in_json))
    return code, capsys.readouterr().out


def test_what_is_in_order_or_only_noted_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "ok      first: [as it] should be\nnote    second: could be better\n        to mend it: do this\n"
    assert doctor_says(monkeypatch, capsys, findings) == (0, lines)
    code, text = doctor_says(monkeypatch, capsys, findings, in_json=True)
    assert (code, json.loads(text)["ok"], json.loads(text)["findings"][0]["mend"]) == (0, True, "")


def test_a_check_that_breaks_is_a_problem_and_shows_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-not-to-be-shown")
    code, text = doctor_says(monkeypatch, capsys, broken)
    assert code == 1
    assert text.startswith("problem a check: this check broke: RuntimeError: it broke, with [redacted] in it\n")


def test_a_terminal_gets_a_table_with_the_same_words(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.show_table(findings())
    words = " ".join(capsys.readouterr().out.split())
    assert words == "ok first [as it] should be note second could be better to mend it: do this"


def test_a_sweep_that_finds_nothing_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "kill_orphans", lambda _timeout_s: ([], ()))
    assert doctor.run(argparse.Namespace(sweep=True, json=False)) == 0
    assert capsys.readouterr().out == "nothing was left behind\n"


def test_what_a_sweep_cannot_kill_is_said_and_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Orphan(11, "m", "one"), Orphan(12, "m", "two")]
    monkeypatch.setattr(doctor, "kill_orphans", lambda _timeout_s: (found, (12,)))
    assert doctor.run(argparse.Namespace(sweep=True, json=False)) == 1
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
