"""What ``rlm-kernel doctor`` looks at: each thing that can be wrong is a problem that says what to do."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlm_kernel._version import __version__
from rlm_kernel.children import posix
from rlm_kernel.jupyter import checks
from rlm_kernel.jupyter.checks import Check, Finding, State


@pytest.fixture(autouse=True)
def nothing_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("RLM_MODEL", "RLM_CLIENT", "OPENAI_", "JUPYTER_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("RLM_RUN_DIR", str(tmp_path / "runs"))


def only(check: Check) -> Finding:
    (finding,) = check()
    return finding


def install_spec(home: Path, name: str, *argv: str) -> None:
    folder = home / "data" / "kernels" / name
    folder.mkdir(parents=True)
    spec = {"argv": [*argv, "-m", "rlm_kernel", "-f", "{connection_file}"], "display_name": name, "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")


def fake_python(path: Path, line: str) -> str:
    path.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
    path.chmod(0o700)
    return str(path)


def test_each_kernelspec_of_ours_is_looked_at_and_its_python_is_asked(tmp_path: Path) -> None:
    install_spec(tmp_path, "right", sys.executable)
    install_spec(tmp_path, "gone", "/nowhere/python")
    install_spec(tmp_path, "old", fake_python(tmp_path / "old-python", "echo 0.0.1"))
    install_spec(
        tmp_path, "without", fake_python(tmp_path / "other-python", "echo No module named rlm_kernel >&2; exit 1")
    )
    install_spec(tmp_path, "same", fake_python(tmp_path / "same-python", f"echo {__version__}"))
    found = {finding.check.removeprefix("kernelspec "): finding for finding in checks.check_kernelspecs()}
    assert {name: found[name].state for name in ("right", "same")} == {"right": State.OK, "same": State.OK}
    assert found["gone"].found.endswith("/nowhere/python is not there, or cannot be executed")
    assert f"has rlm-kernel 0.0.1, this is {__version__}" in found["old"].found
    assert found["without"].found.endswith("cannot import rlm_kernel: No module named rlm_kernel")
    for name in ("gone", "old", "without"):
        assert found[name].state is State.PROBLEM
        assert f"rlm-kernel install --user --name {name}" in found[name].mend


def test_without_any_kernelspec_of_ours_the_command_that_installs_one_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    from jupyter_client.kernelspec import KernelSpecManager

    monkeypatch.setattr(KernelSpecManager, "find_kernel_specs", lambda _self: {})
    finding = only(checks.check_kernelspecs)
    assert finding.state is State.PROBLEM
    assert "rlm-kernel install" in finding.mend


def test_versions_in_force_are_shown() -> None:
    finding = only(checks.check_versions)
    assert finding.state is State.OK
    for name in ("ipykernel", "ipython", "jupyter-client", "openai"):
        assert f"{name} {metadata.version(name)}" in finding.found


def test_what_is_too_old_or_missing_is_a_problem_with_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["ipykernel>=999", "no-such-package>=1", 'litellm>=1; extra == "litellm"']
    monkeypatch.setattr(metadata, "requires", lambda _name: wanted)
    monkeypatch.setattr(metadata, "metadata", lambda _name: {"Requires-Python": ">=9.1"})
    too_old_python, too_old, missing, rest = checks.check_versions()
    assert (too_old_python.state, too_old_python.mend) == (State.PROBLEM, "Python >=9.1 is needed")
    assert too_old.mend == "`pip install --upgrade 'ipykernel>=999'`"
    assert (missing.found, missing.mend) == ("no-such-package is missing", "`pip install 'no-such-package>=1'`")
    assert rest.state is State.OK


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, (State.NOTE, "none is configured")),
        ({"RLM_MODEL": "demo"}, (State.OK, "demo (from RLM_MODEL)")),
        ({"RLM_MODEL": "ollama/llama"}, (State.OK, "ollama/llama (from RLM_MODEL; no key is set)")),
        ({"RLM_MODEL": "openai/x"}, (State.PROBLEM, "openai/x (from RLM_MODEL), without a key")),
        (
            {"RLM_MODEL": "openai/x", "OPENAI_BASE_URL": "http://localhost:1/v1"},
            (State.OK, "openai/x (from RLM_MODEL; no key is set)"),
        ),
        (
            {"RLM_MODEL": "x", "RLM_CLIENT_FACTORY": "m:f"},
            (State.OK, "client_factory='m:f' (from RLM_CLIENT_FACTORY)"),
        ),
    ],
)
def test_the_model_is_told_with_its_source(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], found: tuple[State, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    finding = only(checks.check_model)
    assert (finding.state, finding.found) == found


def test_config_files_are_read_like_a_kernel_reads_them_and_a_bad_value_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profile = tmp_path / "ipython" / "profile_default"
    profile.mkdir(parents=True)
    (profile / "ipython_kernel_config.py").write_text("c = get_config()\nc.RLM.model = 'demo'\n", encoding="utf-8")
    assert only(checks.check_model).found == "demo (from c.RLM.model)"
    monkeypatch.setenv("RLM_MAX_DEPTH", "deep")
    bad, model = checks.check_model()
    assert bad.state is State.PROBLEM
    assert "RLM_MAX_DEPTH='deep'" in bad.found
    assert model.found == "demo (from c.RLM.model)"


def test_a_run_directory_that_cannot_be_written_to_or_is_full_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert only(checks.check_run_dir).found.startswith(f"{tmp_path}/runs (")
    assert not (tmp_path / "runs").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1 << 20))
    finding = only(checks.check_run_dir)
    assert (finding.state, finding.found) == (State.PROBLEM, f"{tmp_path}/runs: 1 MiB free")
    assert "rlm-kernel runs prune" in finding.mend
    monkeypatch.setenv("RLM_RUN_DIR", "/proc/nowhere")
    finding = only(checks.check_run_dir)
    assert finding.state is State.PROBLEM
    assert "RLM_RUN_DIR" in finding.mend


def test_tight_limits_of_the_system_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [finding.state for finding in checks.check_limits()] == [State.OK, State.OK]
    tight: dict[int, tuple[int, int]] = {resource.RLIMIT_NOFILE: (64, 64), resource.RLIMIT_NPROC: (20, 20)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: tight[which])
    files, processes = checks.check_limits()
    assert (files.state, files.found) == (State.PROBLEM, "at most 64")
    assert "ulimit -n" in files.mend
    assert (processes.state, processes.found) == (State.PROBLEM, "ulimit -u: 20")


def test_what_the_platform_lacks_is_told_with_what_follows_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {finding.state for finding in checks.check_platform()} == {State.OK}
    monkeypatch.setattr(posix, "open_pidfd", lambda _pid: None)
    pidfd = next(checks.check_platform())
    assert (pidfd.state, pidfd.found) == (State.NOTE, "no")
    assert "exits are confirmed by the nursery alone" in pidfd.mend
    monkeypatch.setattr(posix, "CAN_FORK", False)
    assert only(checks.check_platform).state is State.PROBLEM


def test_a_child_that_does_not_answer_or_is_not_confirmed_gone_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlm_kernel.session import session
    from rlm_kernel.values import CleanupReport

    status = SimpleNamespace(result=None, state="failed", error="it broke", exited=True, pid=1, exit_code=1)

    def start(settings: Any, namespace: dict[str, Any]) -> Any:
        namespace["rlm_query"] = lambda *_, **__: SimpleNamespace(wait=lambda _timeout_s: status)
        return SimpleNamespace(shutdown=lambda: CleanupReport("shutdown", survivors=(4194000,)))

    monkeypatch.setattr(session, "RLMSession", start)
    finding = only(checks.check_child)
    assert finding.state is State.PROBLEM
    assert "it broke" in finding.found
    status.result = "an answer"
    finding = only(checks.check_child)
    assert finding.state is State.PROBLEM
    assert "4194000" in finding.found


def test_the_provisioner_can_be_loaded_and_its_absence_is_only_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(checks.check_provisioner).state in (State.OK, State.NOTE)  # an installation from before it is noted
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    assert only(checks.check_provisioner).state is State.NOTE
