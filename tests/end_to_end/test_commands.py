"""``rlm-kernel run`` and ``rlm-kernel demo`` as a user starts them: a real kernel, real children, real exit codes."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from tests.support.families import tag
from tests.support.kernels import Processes, command, marked
from tests.support.model_server import code, reply, script

TASK = "How often does 'whale' occur?"


def finished(process) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=40)
    return process.returncode, out, err


def write_text(path, *, newline: str, end: str, lines: int = 400) -> int:
    """Write a text in which a word occurs a known number of times; return how often."""
    rows = [f"line {n}: " + ("a whale, 鯨 and é, whale" if n % 7 == 0 else "nothing — ñ") for n in range(lines)]
    path.write_bytes((newline.join(rows) + end).encode())
    return sum(row.count("whale") for row in rows)


def test_run_counts_right_and_keeps_the_answer_apart_from_the_progress(tmp_path) -> None:
    text = tmp_path / "größe.txt"
    count = write_text(text, newline="\n", end="\n")
    arguments = ["run", "--context", str(text), "--task", TASK, "--model", "demo"]
    with command(arguments, tmp_path) as (process, mark):
        returncode, out, err = finished(process)
        assert marked(mark) == set()
    assert returncode == 0, err
    assert out.strip().splitlines() == [out.strip()]
    assert str(count) in out
    assert "exit confirmed" in err
    assert "Traceback" not in err


def test_run_gives_json_on_request_and_takes_a_text_with_crlf_and_without_a_last_newline(tmp_path) -> None:
    text = tmp_path / "text.txt"
    count = write_text(text, newline="\r\n", end="")
    with command(["run", "--context", str(text), "--task", TASK, "--model", "demo", "--json"], tmp_path) as (
        process,
        _,
    ):
        returncode, out, _err = finished(process)
    result = json.loads(out)
    assert returncode == 0
    assert str(count) in result["answer"]
    assert result["usage"]["calls"] >= 1
    assert result["children"]
    assert all(child["exited"] for child in result["children"])


def test_progress_is_shown_while_the_run_goes_on(tmp_path, server) -> None:
    gate = tag("gate")
    task = script(code("print('so far')"), f"[[block {gate}]]{reply('FINAL(over)')}")
    with command(["run", "--task", task, "--model", "openai/test"], tmp_path, **server.environment) as (process, _):
        assert process.stderr is not None
        seen = ""
        while "| so far" not in seen:
            line = process.stderr.readline()
            assert line, f"the command ended: {seen}"
            seen += line
        assert process.poll() is None
        server.release(gate)
        returncode, out, _err = finished(process)
    assert (returncode, out) == (0, "over\n")


def test_demo_says_what_it_is_and_shows_states_and_confirmed_exits(tmp_path) -> None:
    with command(["demo"], tmp_path) as (process, mark):
        returncode, out, err = finished(process)
        assert marked(mark) == set()
    assert returncode == 0, err
    assert "rule-based stand-in" in err
    assert out.strip()
    for word in ("running", "completed", "exit confirmed", "exits confirmed"):
        assert word in err, err


@pytest.mark.parametrize(
    ("arguments", "returncode", "words"),
    [
        (["run", "--task", "x", "--model", "demo", "--context", "/no/such/file"], 1, ["--context", "/no/such/file"]),
        (["run", "--task", "x"], 1, ["model"]),
        (["run", "--task", "x", "--model", "nonsense"], 1, ["model", "nonsense"]),
        (["run", "--task", "x", "--model", "demo", "--max-iterations", "0"], 1, ["max_iterations", "0"]),
        (["run", "--task", "x", "--model", "demo", "--max-iterations", "many"], 2, ["--max-iterations", "many"]),
        (["run", "--model", "demo"], 2, ["--task"]),
        (["run", "--task", "x", "--modle", "demo"], 2, ["--modle"]),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else str(value),
)
def test_a_mistake_in_the_command_line_is_named_in_a_line_or_two(tmp_path, arguments, returncode, words) -> None:
    with command(arguments, tmp_path) as (process, mark):
        code, out, err = finished(process)
        assert marked(mark) == set()
    assert (code, out) == (returncode, "")
    for word in words:
        assert word in err
    assert "Traceback" not in err


def test_a_failing_model_is_one_readable_line_and_a_failure(tmp_path, server) -> None:
    arguments = ["run", "--task", "[[status 401]]", "--model", "openai/test"]
    with command(arguments, tmp_path, **server.environment) as (process, mark):
        returncode, out, err = finished(process)
        assert marked(mark) == set()
    assert (returncode, out) == (1, "")
    (line,) = [line for line in err.splitlines() if line.startswith("rlm-kernel:")]
    assert "ModelCallError" in line
    assert "Traceback" not in err


def blocked_task() -> tuple[str, str]:
    """Return a task whose child blocks in a model call, and a word that the child's request contains."""
    word = tag("blocked")
    return script(code(f"rlm_query('{word} [[block]]')")), word


def test_ctrl_c_ends_everything_before_the_command_exits(tmp_path, server) -> None:
    task, word = blocked_task()
    with command(["run", "--task", task, "--model", "openai/test"], tmp_path, **server.environment) as (process, mark):
        server.wait_for_request(word, timeout_s=30, count=2)
        with Processes(sorted(marked(mark) - {process.pid})) as processes:
            assert len(processes.left) >= 3  # kernel, nursery, child
            began = time.monotonic()
            os.kill(process.pid, signal.SIGINT)
            code_, out, err = finished(process)
            assert processes.left == []
        assert time.monotonic() - began < 5.0
    assert (code_, out) == (130, "")
    assert "Traceback" not in err


def test_sigterm_while_the_kernel_starts_leaves_nothing_either(tmp_path, server) -> None:
    with command(["run", "--task", "x", "--model", "openai/test"], tmp_path, **server.environment) as (process, mark):
        while len(found := marked(mark)) < 2:
            assert process.poll() is None
        os.kill(process.pid, signal.SIGTERM)
        with Processes(sorted(found - {process.pid})) as processes:
            code_, out, _err = finished(process)
            assert processes.left == []
        assert marked(mark) == set()
    assert (code_, out) == (143, "")


def test_killing_the_command_ends_kernel_and_children(tmp_path, server) -> None:
    task, word = blocked_task()
    with command(["run", "--task", task, "--model", "openai/test"], tmp_path, **server.environment) as (process, mark):
        server.wait_for_request(word, timeout_s=30, count=2)
        with Processes(sorted(marked(mark) - {process.pid})) as processes:
            os.kill(process.pid, signal.SIGKILL)
            assert processes.wait(3.5) == []


def test_a_time_limit_ends_the_run_as_a_failure(tmp_path, server) -> None:
    arguments = ["run", "--task", "[[block]]", "--model", "openai/test", "--timeout-s", "3"]
    with command(arguments, tmp_path, **server.environment) as (process, mark):
        returncode, out, err = finished(process)
        assert marked(mark) == set()
    assert (returncode, out) == (1, "")
    assert "--timeout-s" in err
