"""Children in the background of a notebook: the parent works on, results are collected later, failures are readable."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.support.families import tag
from tests.support.model_server import code, reply, script


def test_four_children_run_side_by_side_while_the_parent_works_on(kernel) -> None:
    prompts = [f"[[delay 1.5]] [[reply: FINAL({n})]]" for n in range(4)]
    began = time.monotonic()
    kernel.ok(f"hs = [rlm_query(p, blocking=False) for p in {prompts!r}]")
    slowest = 0.0
    for _ in range(5):
        asked = time.monotonic()
        assert kernel.ok("1 + 1").text == "2"
        slowest = max(slowest, time.monotonic() - asked)
    assert slowest < 0.5
    assert kernel.value("[s.done for s in rlm_status()]") == [False] * 4
    assert kernel.value("[s.result for s in rlm_wait(hs)]") == ["0", "1", "2", "3"]
    assert time.monotonic() - began < 3.0
    assert kernel.value("[(s.exited, s.exit_code) for s in rlm_wait(hs)]") == [(True, 0)] * 4


def test_a_query_without_further_arguments_blocks_and_returns_the_answer(kernel) -> None:
    began = time.monotonic()
    assert kernel.value(f"rlm_query({script('[[delay 0.3]]' + reply('FINAL(text)'))!r})") == "text"
    assert time.monotonic() - began >= 0.3


def test_a_handle_can_be_awaited_at_the_top_level(kernel) -> None:
    assert kernel.ok(f"await rlm_query({reply('FINAL(awaited)')!r}, blocking=False)").text == "'awaited'"


def test_a_wait_that_times_out_leaves_the_child_alone(kernel, server) -> None:
    gate = tag("gate")
    kernel.ok(f"h = rlm_query('[[block {gate}]] [[reply: FINAL(late)]]', blocking=False)")
    assert kernel.value("rlm_wait(h, timeout_s=0.05).done") is False
    server.release(gate)
    assert kernel.value("rlm_wait(h).result") == "late"


FAULTS = {
    "401": ("[[status 401]]", "401"),
    "500": ("[[status 500]]", "500"),
    "garbage": ("[[garbage]]", ""),
    "close": ("[[close]]", ""),
}


def test_a_failing_model_server_fails_the_child_quickly_and_readably(kernel) -> None:
    prompts = [directive for directive, _ in FAULTS.values()]
    began = time.monotonic()
    kernel.ok(f"hs = [rlm_query(p, blocking=False) for p in {prompts!r}]")
    statuses = kernel.value("[(str(s.state), s.result, s.error) for s in rlm_wait(hs, timeout_s=20)]")
    assert time.monotonic() - began < 15
    for (state, result, error), (name, (_, word)) in zip(statuses, FAULTS.items(), strict=True):
        assert (state, result) == ("failed", None), name
        assert "ModelCallError" in error, name
        assert word in error, name
        assert len(error) < 600, name
        assert "Traceback" not in error, name


def test_a_model_server_that_is_not_there_fails_the_child_quickly(kernel) -> None:
    here = kernel.value("__import__('os').environ['OPENAI_BASE_URL']")
    kernel.ok("%env OPENAI_BASE_URL=http://127.0.0.1:9/v1")
    began = time.monotonic()
    error = kernel.run("rlm_query('x')").error
    took = time.monotonic() - began
    kernel.ok(f"%env OPENAI_BASE_URL={here}")
    assert took < 15
    assert error.startswith("ChildFailedError")
    assert "127.0.0.1:9" in error


def test_background_queries_without_a_model_say_what_to_type(start_kernel) -> None:
    kernel = start_kernel(RLM_MODEL="")
    background = kernel.run("rlm_query('x', blocking=False)")
    assert background.error.startswith("ManagedModeRequired")
    assert "%rlm model " in background.error
    direct = kernel.run("llm_query('x')")
    assert direct.error.startswith("ModelNotConfigured")
    assert "%rlm model " in direct.error
    kernel.ok("%rlm model openai/test")
    assert kernel.value(f"rlm_query({reply('FINAL(now)')!r})") == "now"


def test_a_bad_value_in_the_environment_does_not_keep_the_kernel_from_starting(start_kernel) -> None:
    kernel = start_kernel(RLM_MAX_DEPTH="x")
    first = kernel.ok("1 + 1")
    assert "RLM_MAX_DEPTH" in first.stderr
    assert "'x'" in first.stderr
    assert kernel.ok("1 + 1").stderr == ""  # said once


def test_no_api_key_is_anywhere_outside_of_the_kernel_and_its_calls(start_kernel, server) -> None:
    secret = "sk-secret-0123456789abcdef"
    kernel = start_kernel(RLM_MODEL="openai/test", OPENAI_API_KEY=secret, HF_TOKEN="hf-" + secret)
    look = (
        "import os\n"
        "print(sorted(os.environ.items()))\n"
        "print(open('/proc/self/environ', 'rb').read())\n"
        "print(open(f'/proc/{os.getppid()}/environ', 'rb').read())\n"
    )
    kernel.ok(f"h = rlm_query({script(code(look), '[[block look]]' + reply('FINAL(ok)'))!r}, blocking=False)")
    request = server.wait_for_request("PYTHONPATH")  # the second turn: it has seen what the code printed
    assert secret not in request.text
    assert request.headers["authorization"] == f"Bearer {secret}"
    nursery = kernel.value("get_ipython().kernel.rlm.supervisor.nursery_pid")
    pid = kernel.value("h.status().pid")
    for process in (nursery, pid):
        assert secret.encode() not in Path(f"/proc/{process}/environ").read_bytes()
    server.release("look")
    assert kernel.value("rlm_wait(h).result") == "ok"
    assert secret not in kernel.value("h.status().log_tail")
    kernel.answer(kernel.ask("shutdown_request", {"restart": False}))
    kernel.wait_exit(4.0)
    files = [path for path in (kernel.home / "runs").rglob("*") if path.is_file()]
    assert len(files) >= 3  # run.json, a trajectory, a log
    for path in files:
        assert secret.encode() not in path.read_bytes(), path
    assert secret not in kernel.log


def test_a_trajectory_can_be_read_while_the_child_still_runs(kernel, server) -> None:
    word = tag("second")
    task = script(code("print('first step')"), f"[[block {word}]]")
    kernel.ok(f"h = rlm_query({task!r}, blocking=False)")
    server.wait_for_request(lambda request: word in request.text and "first step\n" in request.text)
    path = kernel.value("h.status().trajectory_path")
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert any("first step" in json.dumps(line) for line in lines)


COUNTS = """
import os, threading
def count():
    names = sorted(t.name for t in threading.enumerate())
    return sorted(filter(None, map(target, os.listdir('/proc/self/fd')))), names
def target(fd):
    try:
        target = os.readlink(f'/proc/self/fd/{fd}').partition(':')[0]
    except OSError:  # the listing's own
        return None
    return None if 'history.sqlite' in target else target  # IPython writes it on a thread of its own
"""


def test_thirty_children_leave_no_thread_and_no_descriptor(kernel) -> None:
    kernel.ok(COUNTS)
    batch = f"hs = rlm_query_batched([{reply('FINAL(1)')!r}] * 10, blocking=False); len(rlm_wait(hs))"
    assert kernel.ok(batch).text == "10"
    fds, names = kernel.value("count()")
    for _ in range(3):
        assert kernel.ok(batch, 40).text == "10"
    later_fds, later_names = kernel.value("count()")
    assert later_fds == fds
    assert later_names == names


def test_files_of_an_episode_are_only_made_when_there_is_something_to_keep(start_kernel) -> None:
    kernel = start_kernel()
    kernel.ok("1 + 1")
    assert not (kernel.home / "runs").exists()
    assert os.listdir(kernel.home)  # the kernel's other files did go there


@pytest.mark.parametrize("text", ["def broken(:", "h = rlm_query('')", "rlm_wait(7)", "rlm_query('x', blockin=False)"])
def test_a_mistake_is_an_error_and_starts_nothing(kernel, text) -> None:
    assert kernel.run(text).status == "error"
    assert kernel.value("rlm_status()") == []
