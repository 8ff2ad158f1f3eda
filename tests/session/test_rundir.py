"""Promises of `rlm_kernel.session.rundir`, alone and in a session."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest

from rlm_kernel.jupyter.export_command import add_arguments, export_here
from rlm_kernel.session import rundir
from rlm_kernel.session.rundir import RunFolder, prune
from rlm_kernel.stored_runs import find_run, read_run
from tests.session.conftest import Root, block, final


def make_run(root: Path, day: int, content: Any = None, *, size: int = 0) -> Path:
    """Make the folder of an episode; later days are newer."""
    folder = root / f"202001{day:02}-120000-{day:012x}"
    folder.mkdir(parents=True)
    if content is not None:
        (folder / "run.json").write_text(content if isinstance(content, str) else json.dumps(content))
    (folder / "c1.jsonl").write_bytes(b"x" * size)
    return folder


def ended(pid: int = 1) -> dict[str, Any]:
    return {"pid": pid, "ended": True, "host": platform.node()}


@pytest.fixture
def dead_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def test_the_folder_comes_with_its_first_use(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs", "abc", 3)
    assert not folder.exists
    assert folder.run_paths("c1") == ("", "")
    folder.write({"a": 1})
    assert not (tmp_path / "runs").exists()
    path = folder.path()
    assert path is not None
    assert path.name.endswith("-abc")
    assert path.stat().st_mode & 0o777 == 0o700
    assert folder.path() == path
    assert folder.run_paths("c1") == (str(path / "c1.log"), str(path / "c1.jsonl"))


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "abc", 3)
    path = folder.path()
    assert path is not None
    folder.write({"n": -1, "fill": ""})

    def write() -> None:
        for n in range(60):
            folder.write({"n": n, "fill": "x" * 100_000})

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while writer.is_alive() or not reads:
        assert json.loads((path / "run.json").read_text())["n"] >= -1
        reads += 1
    writer.join()
    assert json.loads((path / "run.json").read_text())["n"] == 59
    assert [p.name for p in path.iterdir()] == ["run.json"]


def test_a_full_disk_is_logged_and_keeps_the_file_that_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path, "abc", 3)
    path = folder.path()
    assert path is not None
    folder.write({"n": 1})

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    folder.write({"n": 2})
    assert "was not written" in caplog.text
    assert json.loads((path / "run.json").read_text()) == {"n": 1}
    assert [p.name for p in path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("secret", ["plain-secret-value", 'with "quotes" in it', "back\\slash-secret", "umläut-secret"])
def test_secrets_are_not_written_however_they_are_spelt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv("MY_TOKEN", secret)
    folder = RunFolder(tmp_path, "abc", 3)
    path = folder.path()
    assert path is not None
    folder.write(
        {"error": f"said {secret}!", "children": [{"prompt": secret, "other": Path("/x")}], "n": (1, None, 0.5)}
    )
    written = json.loads((path / "run.json").read_text())
    assert written == {
        "error": "said [redacted]!",
        "children": [{"prompt": "[redacted]", "other": "/x"}],
        "n": [1, None, 0.5],
    }


def test_text_that_is_no_utf8_is_written_all_the_same(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "abc", 3)
    path = folder.path()
    assert path is not None
    folder.write({"error": "\ud800"})
    assert json.loads((path / "run.json").read_text()) == {"error": "\ud800"}


# -- pruning


def test_the_newest_are_kept(tmp_path: Path) -> None:
    folders = [make_run(tmp_path, day, ended()) for day in range(1, 6)]
    assert sorted(prune(tmp_path, 2)) == folders[:3]
    assert sorted(tmp_path.iterdir()) == folders[3:]


def test_what_is_too_large_goes_however_many_are_to_be_kept(tmp_path: Path) -> None:
    folders = [make_run(tmp_path, day, ended(), size=1000) for day in range(1, 5)]
    assert sorted(prune(tmp_path, 10, max_total_bytes=2500)) == folders[:2]


def test_those_of_living_processes_are_spared_and_those_of_dead_ones_are_not(tmp_path: Path, dead_pid: int) -> None:
    living = make_run(tmp_path, 1, {"pid": os.getpid(), "ended": False, "host": platform.node()})
    dead = make_run(tmp_path, 2, {"pid": dead_pid, "ended": False, "host": platform.node()})
    finished = make_run(tmp_path, 3, ended(os.getpid()))
    assert sorted(prune(tmp_path, 0)) == [dead, finished]
    assert list(tmp_path.iterdir()) == [living]


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"pid": null}', '{"host": "another", "pid": 1}'], ids=repr)
def test_where_it_is_unclear_a_young_one_is_spared_and_an_old_one_is_not(tmp_path: Path, content: Any) -> None:
    """Without a readable run.json it may be in the making; on another host the pid means nothing here."""
    old = make_run(tmp_path, 1, content)
    young = make_run(tmp_path, 2, content)
    long_ago = time.time() - 2 * 86_400
    for path in (*old.iterdir(), old):
        os.utime(path, (long_ago, long_ago))
    assert prune(tmp_path, 0) == [old]
    assert list(tmp_path.iterdir()) == [young]


def test_nothing_else_in_the_directory_is_touched(tmp_path: Path) -> None:
    others = [tmp_path / "notes", tmp_path / "2020", tmp_path / "20200101-file-x"]
    others[0].mkdir()
    others[1].mkdir()
    others[2].write_text("a file")
    assert prune(tmp_path, 0) == []
    assert all(other.exists() for other in others)
    assert prune(tmp_path / "nowhere", 0) == []


def test_a_folder_that_another_kernel_prunes_at_the_same_time_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, 1, ended())
    stat = Path.stat

    def gone(self: Path, **options: Any) -> os.stat_result:
        if self.name == "c1.jsonl":
            raise FileNotFoundError(self)
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", gone)
    folder = RunFolder(tmp_path, "abc", 5)
    assert folder.path() is not None


def test_a_new_folder_makes_room_for_itself(tmp_path: Path) -> None:
    for day in range(1, 5):
        make_run(tmp_path, day, ended())
    assert RunFolder(tmp_path, "abc", 3).path() is not None
    assert len(list(tmp_path.iterdir())) == 3


# -- in a session


def test_nothing_is_written_for_a_session_without_children(root: Root) -> None:
    before = sorted(root.run_dir.rglob("*"))
    root.scripted("x")
    assert root.llm_query("p") == "x"
    root.session.close()
    root.say_final("done")
    assert sorted(root.run_dir.rglob("*")) == before


def test_refused_children_leave_nothing_either(root: Root) -> None:
    before = sorted(root.run_dir.rglob("*"))
    lock = threading.Lock()
    root.session.configure_value("client_factory", lambda: lock)
    with pytest.raises(Exception, match="cannot be pickled"):
        root.rlm_query("p", blocking=False)
    assert sorted(root.run_dir.rglob("*")) == before


def test_an_episode_is_written_down(root: Root) -> None:
    root.scripted(block("print(1)"), final("x"))
    root.rlm_query("the prompt", name="mine")
    root.say_final({"a": 1})
    folder = root.session.run_folder
    assert folder is not None
    run = json.loads((folder / "run.json").read_text())
    assert run["episode_id"] == root.session.episode_id
    assert (run["pid"], run["host"], run["ended"]) == (os.getpid(), platform.node(), False)
    assert run["final_answer"] == "{'a': 1}"
    assert run["verbs"][-1]["verb"] == "finalize"
    (child,) = run["children"]
    assert (child["name"], child["prompt"], child["state"], child["exited"]) == (
        "mine",
        "the prompt",
        "completed",
        True,
    )
    assert child["iterations"] == 2
    assert run["usage"]["calls"] == child["usage"]["calls"] == 2
    assert {p.name for p in folder.iterdir()} >= {"run.json", f"{child['id']}.jsonl", f"{child['id']}.log"}


def test_each_episode_has_a_folder_of_its_own(root: Root) -> None:
    root.scripted(final("x"))
    root.rlm_query("p")
    first = root.session.run_folder
    root.session.reset()
    root.rlm_query("p")
    second = root.session.run_folder
    assert first is not None
    assert second is not None
    assert first != second
    assert (first / "run.json").exists()


def test_a_directory_that_cannot_be_written_is_warned_of_once_and_everything_works(
    root: Root, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a-file").write_text("")
    root.session.configure("run_dir", str(tmp_path / "a-file" / "runs"))
    root.session.reset()
    root.scripted(block("print('printed')"), final("x"))
    with caplog.at_level(logging.WARNING):
        assert root.rlm_query_batched(["p", "q"]) == ["x", "x"]
        assert root.rlm_query("r") == "x"
        root.session.close()
    (record,) = [r for r in caplog.records if r.name == rundir.__name__]
    assert "runs are not written down" in record.getMessage()
    status = root.rlm_status()[0]
    assert status.trajectory_path is None
    assert "printed" in status.log_tail


# -- lineage, usage and how each run ended, whatever ended it


def test_every_run_says_where_it_belongs_and_how_it_ended(root: Root, tmp_path: Path) -> None:
    """Nested, killed in the middle, and cancelled before it began."""
    root.session.configure("max_depth", "3")
    root.session.configure("max_concurrent_children", "2")
    inner = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    root.scripted(
        rules={
            "outer": [block("h = rlm_query('inner', blocking=False)\nrlm_wait(h)"), block("FINAL(h.status().state)")],
            "inner": block(inner),
        }
    )
    assert root.rlm_query("outer", context="some text") == "failed"
    root.session.supervisor.observers.flush()
    folder = root.session.run_folder
    assert folder is not None
    content = json.loads((folder / "run.json").read_text())
    assert [(c["state"], c["exited"], c["depth"], bool(c["error"])) for c in content["children"]] == [
        ("completed", True, 1, False),
        ("failed", True, 2, True),
    ]
    outer, killed = (read_run(folder, child["id"]) for child in content["children"])
    assert killed.parent_id == outer.run_id
    assert [run.run_id for run in outer.descendants()] == [killed.run_id]
    for run, reason in ((outer, "final"), (killed, "failed")):
        assert run.end is not None
        assert run.end["stop_reason"] == reason
        assert (run.metadata["episode_id"], run.metadata["run_id"]) == (root.session.episode_id, run.run_id)
    assert killed.usage["calls"] == 1
    assert "SIGKILL" in str(killed.error) or "signal" in str(killed.error)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    said = export_here(parser.parse_args([outer.run_id, str(tmp_path / "my file.ipynb")]), root.session)
    assert "my file.ipynb" in said
    read = nbformat.read(tmp_path / "my file.ipynb", as_version=4)
    assert "context = 'some text'" in [c.source for c in read.cells if c.cell_type == "code"][1]


def test_a_run_in_the_roots_namespace_is_noted_with_the_children_it_started(root: Root) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    from rlm_kernel.environment.interpreter import make_shell
    from rlm_kernel.session.root_run import run_in_namespace

    shell: Any = make_shell()
    try:
        root.scripted(rules={"sub": final("s"), "Task|task": block("FINAL(rlm_query('sub'))")})
        root.rlm_query("sub")
        result = run_in_namespace(root.session, shell, "Task", context=["a", "b"])
    finally:
        InteractiveShell.clear_instance()
    assert result.answer == "s"
    run = find_run(root.run_dir, "root", current=root.session.run_folder)
    assert (run.metadata["context"]["file"] is not None, run.depth, run.parent_id) == (True, 0, None)
    assert [each.run_id for each in run.descendants()] == [result.children[0].id]
