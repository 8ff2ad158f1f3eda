"""Promises of `rlm_kernel.loop.trajectory`: what is on disk is complete, readable, private, and never in the way."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import pytest

from rlm_kernel.loop.trajectory import (
    MAX_FIELD_CHARS,
    BlockRecord,
    IterationRecord,
    RunMetadata,
    TrajectoryWriter,
    read_trajectory,
    write_missing_end,
)
from rlm_kernel.values import CodeResult, FinalAnswer, ModelCall, Usage

SECRET = "sk-verysecret"


def record(iteration: int = 1, **changes: Any) -> IterationRecord:
    return IterationRecord(iteration, ({"role": "user", "content": "hi"},), **changes)


def written(path: Path, *records: IterationRecord, **options: Any) -> list[dict[str, Any]]:
    with TrajectoryWriter(path, **options) as writer:
        for each in records:
            writer.write_iteration(each)
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_lines_have_the_published_keys(tmp_path: Path) -> None:
    call = ModelCall("p", "r", Usage(1, 5, 7), 0.5)
    result = CodeResult("out", "err", {"x": "1"}, 0.25, model_calls=(call,))
    blocks = (BlockRecord("x = 1", result),)
    metadata, line = written(
        tmp_path / "t.jsonl",
        record(3, response="r", blocks=blocks, final=FinalAnswer(0), usage=Usage(2, 6, 8), duration_s=1.5),
        metadata=RunMetadata(root_model="m", max_depth=2, max_iterations=9, run_id="c1", parent_id="c0", depth=1),
    )
    assert metadata["type"] == "metadata"
    assert {"timestamp", "backend", "backend_kwargs", "environment_type", "environment_kwargs"} <= metadata.keys()
    assert "other_backends" in metadata
    assert [metadata[key] for key in ("root_model", "max_depth", "max_iterations")] == ["m", 2, 9]
    assert [metadata[key] for key in ("run_id", "parent_id", "depth")] == ["c1", "c0", 1]
    assert line["type"] == "iteration"
    assert line["iteration"] == 3
    assert line["prompt"] == [{"role": "user", "content": "hi"}]
    assert line["response"] == "r"
    assert line["final_answer"] == "0"
    assert line["iteration_time"] == 1.5
    assert line["run_id"] == "c1"
    assert line["usage"] == {"calls": 2, "prompt_tokens": 6, "completion_tokens": 8}
    (block,) = line["code_blocks"]
    assert block["code"] == "x = 1"
    result_line = block["result"]
    assert [result_line[key] for key in ("stdout", "stderr", "locals", "execution_time")] == [
        "out",
        "err",
        {"x": "1"},
        0.25,
    ]
    (call_line,) = result_line["rlm_calls"]
    assert call_line == {
        "prompt": "p",
        "response": "r",
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "execution_time": 0.5,
        "error": None,
    }


def test_the_end_line_says_how_the_run_ended(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path / "t.jsonl", metadata=RunMetadata(run_id="c1"))
    writer.write_end(stop_reason="final", final=FinalAnswer("x"), iterations=2, usage=Usage(1, 2, 3))
    metadata, end = read_trajectory(writer.path)
    assert metadata["type"] == "metadata"
    assert end.pop("timestamp")
    assert end == {
        "type": "end",
        "run_id": "c1",
        "stop_reason": "final",
        "final_answer": "x",
        "iterations": 2,
        "usage": {"calls": 1, "prompt_tokens": 2, "completion_tokens": 3},
        "error": None,
    }


PUBLISHED: dict[str, Any] = {
    "metadata": {
        "type": str,
        "timestamp": str,
        "root_model": str | None,
        "max_depth": int,
        "max_iterations": int,
        "backend": str,
        "backend_kwargs": dict,
        "environment_type": str,
        "environment_kwargs": dict,
        "other_backends": list | None,
    },
    "iteration": {
        "type": str,
        "iteration": int,
        "timestamp": str,
        "prompt": [{"role": str, "content": str}],
        "response": str,
        "code_blocks": [
            {
                "code": str,
                "result": {
                    "stdout": str,
                    "stderr": str,
                    "locals": dict,
                    "execution_time": float,
                    "rlm_calls": [
                        {
                            "prompt": str,
                            "response": str,
                            "prompt_tokens": int,
                            "completion_tokens": int,
                            "execution_time": float,
                        },
                    ],
                },
            }
        ],
        "final_answer": str | None,
        "iteration_time": float,
    },
}
"""The fields that the public visualizer reads, with their types. Further ones are allowed."""


def mismatches(value: Any, shape: Any, where: str = "$") -> list[str]:
    """Name every published field that is missing or of another type."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return [f"{where}: {value!r}"]
        missing = [f"{where}.{name} is missing" for name in shape.keys() - value.keys()]
        return missing + [m for n, s in shape.items() if n in value for m in mismatches(value[n], s, f"{where}.{n}")]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{where}: {value!r}"]
        return [m for i, item in enumerate(value) for m in mismatches(item, shape[0], f"{where}[{i}]")]
    fits = isinstance(value, shape) and not (isinstance(value, bool) and shape is int)
    return [] if fits or (shape is float and type(value) is int) else [f"{where}: {value!r}"]


@pytest.mark.parametrize("odd", [False, True])
def test_every_line_has_every_published_field_in_its_published_type(tmp_path: Path, odd: bool) -> None:
    """Field by field, whatever values come in; and timestamps that JavaScript's Date reads."""
    call = ModelCall("p", "r", Usage(1, 5, 7), 0.5, error="E" if odd else None)
    result = CodeResult("out", "err", {"x": "1"}, 0.25, not odd, "E: x" if odd else None, (call, call))
    records = [
        record(1, response="r", blocks=(BlockRecord("x = 1", result),) * 2, usage=Usage(2, 6, 8), started_at=1.5),
        record(2, final=FinalAnswer(None if odd else 0), error="E" if odd else None, last_chance=odd),
        record(3, response="r", final=FinalAnswer({"a": object()})),
    ]
    metadata = RunMetadata(root_model=None if odd else "m", other_backends=("b",) if odd else None)
    lines = written(tmp_path / "t.jsonl", *records, metadata=metadata)
    assert [line["type"] for line in lines] == ["metadata", "iteration", "iteration", "iteration"]
    for line in lines:
        assert mismatches(line, PUBLISHED[line["type"]]) == []
        assert datetime.fromisoformat(line["timestamp"]).tzinfo is not None


def test_a_missing_or_mistyped_field_would_be_noticed() -> None:
    assert mismatches({"iteration": "1"}, {"iteration": int, "response": str}) == [
        "$.response is missing",
        "$.iteration: '1'",
    ]
    assert mismatches([{"a": 1}, {"a": None}], [{"a": int}]) == ["$[1].a: None"]


def test_a_file_that_is_cut_anywhere_reads_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = written(path, record(1, response="é€ {}"), record(2, response="\n"), metadata=RunMetadata(run_id="c1"))
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    for cut in sorted({*range(0, len(data), 13), *ends, *(end - 1 for end in ends)}):
        path.write_bytes(data[:cut])
        # A line without its line end is whole as soon as its last brace is there.
        assert read_trajectory(path) == lines[: sum(end - 1 <= cut for end in ends)]


def test_a_run_that_has_only_begun_has_left_its_name(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with TrajectoryWriter(path, metadata=RunMetadata(run_id="c1", episode_id="e", task="t")) as writer:
        writer.write_metadata()
        (line,) = read_trajectory(path)
        writer.write_iteration(record())
    assert [line[name] for name in ("type", "run_id", "episode_id", "task")] == ["metadata", "c1", "e", "t"]
    assert [line["type"] for line in read_trajectory(path)] == ["metadata", "iteration"]


@pytest.mark.parametrize(
    ("before", "types"),
    [
        (None, ["metadata", "end"]),
        (b"", ["end"]),
        (b'{"type":"metadata"}\n', ["metadata", "end"]),
        (b'{"type":"metadata"}\n{"type":"iter', ["metadata", "end"]),
        (b'{"type":"metadata"}\n{"type":"end","stop_reason":"own"}\n', ["metadata", "end"]),
        (b'{"type":"end","stop_reason":"own"}\n', ["end"]),
    ],
    ids=["no-file", "empty", "killed", "torn", "ended", "only-an-end"],
)
def test_the_end_of_a_run_is_added_where_its_process_could_not(
    tmp_path: Path, before: bytes | None, types: list[str]
) -> None:
    path = tmp_path / "t.jsonl"
    if before is not None:
        path.write_bytes(before)
    for _ in range(2):
        write_missing_end(
            path, metadata=RunMetadata(run_id="c1"), stop_reason="failed", error=f"killed {SECRET}", secrets=(SECRET,)
        )
    lines = read_trajectory(path)
    assert [line["type"] for line in lines] == types
    assert lines[-1]["stop_reason"] == ("own" if before and b"own" in before else "failed")
    assert SECRET not in path.read_text()


def test_the_folder_of_a_run_that_was_removed_is_not_made_again(tmp_path: Path) -> None:
    assert not write_missing_end(tmp_path / "gone" / "t.jsonl", metadata=RunMetadata(), stop_reason="failed")
    assert list(tmp_path.iterdir()) == []


def test_the_file_comes_into_being_with_the_first_line_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "t.jsonl"
    writer = TrajectoryWriter(path)
    assert not path.parent.exists()
    writer.write_iteration(record())
    writer.close()
    writer.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_each_line_is_one_append_and_is_there_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed leaves complete lines: nothing waits in a buffer."""
    path = tmp_path / "t.jsonl"
    sizes: list[int] = []
    write = os.write

    def counting(fd: int, data: bytes) -> int:
        sizes.append(len(data))
        return write(fd, data)

    monkeypatch.setattr(os, "write", counting)
    writer = TrajectoryWriter(path)
    for number in (1, 2, 3):
        writer.write_iteration(record(number, response="x" * 100_000))
        assert [line.get("iteration") for line in read_trajectory(path)] == [None, *range(1, number + 1)]
        assert len(sizes) == number + 1
    writer.close()
    assert sum(sizes) == path.stat().st_size


def test_a_torn_last_line_is_skipped_and_spoils_no_later_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    written(path, record(1), record(2))
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert [line.get("iteration") for line in read_trajectory(path)] == [None, 1]
    with TrajectoryWriter(path) as writer:
        writer.write_iteration(record(7))
    assert [line.get("iteration") for line in read_trajectory(path)] == [None, 1, None, 7]


def test_two_writers_of_one_file_do_not_overwrite_each_other(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with TrajectoryWriter(path) as one, TrajectoryWriter(path) as other:
        one.write_iteration(record(1))
        other.write_iteration(record(2))
        one.write_iteration(record(3))
    assert [line["iteration"] for line in read_trajectory(path) if line["type"] == "iteration"] == [1, 2, 3]


def test_secrets_are_redacted_wherever_they_stand(tmp_path: Path) -> None:
    """In messages, replies, code, output, locals, calls, errors, answers and metadata; also across the cut."""
    padding = "x" * (MAX_FIELD_CHARS // 2 - len(SECRET) // 2)
    call = ModelCall(SECRET, SECRET, Usage(), 0.0, error=SECRET)
    result = CodeResult(
        padding + SECRET + padding + "x", SECRET, {SECRET: SECRET}, exception=SECRET, model_calls=(call,)
    )
    path = tmp_path / "t.jsonl"
    metadata = RunMetadata(
        root_model=SECRET, backend_kwargs={"nested": [{"k": SECRET}], "api_key": "short", "max_tokens": 5}, task=SECRET
    )
    with TrajectoryWriter(path, metadata=metadata, secrets=["", "sk-very", SECRET]) as writer:
        writer.write_iteration(
            IterationRecord(
                1,
                ({"role": "user", "content": SECRET},),
                response=SECRET,
                blocks=(BlockRecord(SECRET, result),),
                final=FinalAnswer([SECRET]),
                error=SECRET,
            )
        )
        writer.write_end(stop_reason="error", final=FinalAnswer(SECRET), error=SECRET)
    text = path.read_text()
    assert "sk-v" not in text
    assert "ecret" not in text
    assert text.count("[redacted]") >= 15
    kwargs = read_trajectory(path)[0]["backend_kwargs"]
    assert kwargs["api_key"] == "[redacted]"
    assert kwargs["max_tokens"] == 5


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_odd_values_survive(tmp_path: Path) -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    path = tmp_path / "t.jsonl"
    metadata, line = written(
        path,
        record(response="lone \ud800 surrogate, ü, \u2028, \x00", final=FinalAnswer(Unshowable())),
        metadata=RunMetadata(
            backend_kwargs={
                "o": object,
                "nan": float("nan"),
                "cycle": cycle,
                cast(Any, 5): (1, None, True),
                "bad": Unshowable(),
            }
        ),
    )
    assert line["response"] == "lone \ud800 surrogate, ü, \u2028, \x00"
    assert "Unshowable" in line["final_answer"]
    kwargs = metadata["backend_kwargs"]
    assert kwargs["o"] == "<class 'object'>"
    assert kwargs["nan"] == "nan"
    assert kwargs["5"] == [1, None, True]
    assert "without a repr" in kwargs["bad"]


def test_messages_and_output_are_bounded_but_replies_code_and_answers_are_whole(tmp_path: Path) -> None:
    long = "HEAD" + "x" * 300_000 + "TAIL"
    call = ModelCall(long, long, Usage(), 0.0)
    path = tmp_path / "t.jsonl"
    _, line = written(
        path,
        IterationRecord(
            1,
            ({"role": "user", "content": long},),
            response=long,
            blocks=(BlockRecord(long, CodeResult(long, long, model_calls=(call,))),),
            final=FinalAnswer(long),
        ),
    )
    (block,) = line["code_blocks"]
    (call_line,) = block["result"]["rlm_calls"]
    bounded = [line["prompt"][0]["content"], block["result"]["stdout"], block["result"]["stderr"]]
    for text in [*bounded, call_line["prompt"], call_line["response"]]:
        assert len(text) < MAX_FIELD_CHARS + 100
        assert text.startswith("HEAD")
        assert text.endswith("TAIL")
        assert "300,008 characters" in text
    assert line["response"] == block["code"] == line["final_answer"] == long


def test_a_full_disk_is_recorded_and_warned_of_once_and_never_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.jsonl"
    writer = TrajectoryWriter(path)
    writer.write_iteration(record(1))
    write = os.write
    calls = 0

    def full(fd: int, data: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            return write(fd, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "write", full)
        for number in (2, 3):
            writer.write_iteration(record(number))
        writer.write_end(stop_reason="final")
    writer.write_iteration(record(4))
    assert writer.error is not None
    assert writer.error.errno == errno.ENOSPC
    assert len(caplog.records) == 1
    assert [line.get("iteration") for line in read_trajectory(path)] == [None, 1]
    assert path.read_bytes().count(b"\n") == 2


def test_a_path_that_cannot_be_made_is_recorded_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    writer = TrajectoryWriter(tmp_path / "file" / "t.jsonl")
    writer.write_iteration(record())
    assert isinstance(writer.error, OSError)
    assert len(caplog.records) == 1


def test_a_line_longer_than_one_system_write_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    _, line = written(tmp_path / "t.jsonl", record(response="y" * 50))
    assert line["response"] == "y" * 50
