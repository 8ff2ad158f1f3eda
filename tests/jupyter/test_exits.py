"""SIGTERM and SIGHUP become a call on a thread of our own, and a main thread that does not unwind is ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

WATCHED = """
import os, signal, sys, threading, time
from rlm_kernel.jupyter.exits import EndSignals
def ended(signum):
    print("ended", signum, threading.current_thread().name, flush=True)
    os._exit(7)
signals = EndSignals(ended)
signals.install()
"""

BLOCKED = {
    "a lock": "print('ready', flush=True); threading.Lock().acquire(); lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "a loop": "print('ready', flush=True)\nwhile True: pass",
    "sleep": "print('ready', flush=True); time.sleep(60)",
}


def start(text: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", WATCHED + text],  # of a fork with threads, which is what this is about
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    if (line := process.stdout.readline()) != "ready\n":
        process.kill()
        pytest.fail(line + process.communicate()[0])
    return process


@pytest.mark.parametrize("text", BLOCKED.values(), ids=BLOCKED.keys())
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_the_signal_is_noticed_whatever_the_main_thread_does(text, signum) -> None:
    with start(text) as process:
        process.send_signal(signum)
        out, _ = process.communicate(timeout=20)
    assert out.split() == ["ended", str(int(signum)), "rlm-signals"]
    assert process.returncode == 7


def test_it_is_noticed_when_code_has_replaced_the_wake_up_descriptor() -> None:
    with start("signal.set_wakeup_fd(-1); " + BLOCKED["sleep"]) as process:
        process.terminate()
        out, _ = process.communicate(timeout=20)
    assert out.split()[:2] == ["ended", "15"]


FORKED = """
reader, writer = os.pipe()
copy = os.fork()
if copy == 0:
    os.write(writer, b"x")
    time.sleep(60)
os.read(reader, 1)
os.kill(copy, signal.SIGTERM)
print("ready", flush=True)
print("copy", os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]), flush=True)
time.sleep(60)
"""


def test_a_signal_to_a_forked_copy_ends_the_copy_and_is_not_taken_for_one_to_us() -> None:
    with start(FORKED) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "copy -15\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.terminate()
        out, _ = process.communicate(timeout=20)
    assert out.split()[:2] == ["ended", "15"]


def test_signals_come_through_again_after_a_fork() -> None:
    text = "pid = os.fork()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0)\n" + BLOCKED["sleep"]
    with start(text) as process:
        process.terminate()
        out, _ = process.communicate(timeout=20)
    assert out.split()[:2] == ["ended", "15"]


LAST_RESORT = """
import sys, threading, time
from rlm_kernel.jupyter import exits
exits.UNWIND_S = 0.2
last = exits.LastResort(lambda: 9, lambda: print("flushed", flush=True))
last.start()
last.start()
{then}
print("main", flush=True)
"""


@pytest.mark.parametrize(
    ("then", "out", "code"),
    [
        ("last.arm(); time.sleep(60)", "flushed", 9),
        ("last.arm(); last.unwound(); time.sleep(0.5)", "main", 0),
        ("threading.Event().wait(0.5)", "main", 0),
    ],
    ids=["does-not-unwind", "unwinds", "never-armed"],
)
def test_a_main_thread_that_does_not_unwind_is_ended_and_no_other(then, out, code) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", LAST_RESORT.format(then=then)], capture_output=True, text=True, timeout=20, check=False
    )
    assert (done.stdout.strip(), done.returncode) == (out, code), done.stderr
    assert time.monotonic() - began < 15
