"""``rlm-kernel runs``: what is kept can be listed, looked at, and pruned."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlm_kernel.cli import main
from rlm_kernel.clients.scripted import ScriptedClient
from rlm_kernel.session.config import Settings
from rlm_kernel.session.session import RLMSession


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory with three ended episodes, each with one child, made by a session."""
    monkeypatch.setenv("RLM_RUN_DIR", str(tmp_path))
    namespace: dict[str, object] = {}
    session = RLMSession(Settings({"run_dir": str(tmp_path)}, environ={}), namespace)
    session.configure_value("client_factory", ScriptedClient.factory(["```repl\nFINAL('done')\n```"]))
    for i in range(3):
        assert namespace["rlm_query"](f"task {i}") == "done"  # type: ignore[operator]
        assert session.reset().ok
    assert session.shutdown().ok
    return tmp_path


def test_episodes_are_listed_shown_and_pruned(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all("1 children" in line and "ScriptedFactory" in line for line in lines)
    episode = lines[0].split()[0]
    assert main(["runs", "show", episode[:6]]) == 0
    shown = capsys.readouterr().out
    assert f"episode {episode} in {kept}" in shown
    assert "completed" in shown
    assert ".jsonl" in shown
    assert main(["runs", "prune", "--keep", "1"]) == 0
    assert "2 removed, 1 kept" in capsys.readouterr().out
    assert len(os.listdir(kept)) == 1


def test_an_unknown_id_and_a_bad_number_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLM_RUN_DIR", str(tmp_path))
    assert main(["runs", "list"]) == 0
    assert "no runs in" in capsys.readouterr().out
    assert main(["runs", "show", "nosuch"]) == 1
    assert "ID='nosuch': no episode" in capsys.readouterr().err
    assert main(["runs", "prune", "--keep", "-1"]) == 1
    assert "--keep=-1" in capsys.readouterr().err


def test_an_unreadable_run_file_does_not_hide_the_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLM_RUN_DIR", str(tmp_path))
    folder = tmp_path / "20260101-000000-abcdef"
    folder.mkdir()
    (folder / "run.json").write_text('{"half', "utf-8")
    assert main(["runs", "list"]) == 0
    assert folder.name in capsys.readouterr().out
