"""An interrupt hits the cell that runs, once, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from rlm_kernel.jupyter.interrupts import CellInterrupts


@pytest.fixture
def interrupts(monkeypatch) -> Iterator[CellInterrupts]:
    monkeypatch.setattr(
        "rlm_kernel.jupyter.interrupts.os.getpgrp", lambda: -1
    )  # never signal the group of the test run
    previous = signal.getsignal(signal.SIGINT)
    made = CellInterrupts(lambda: None)
    made.install()
    yield made
    made.disarm()
    signal.signal(signal.SIGINT, previous)


def from_another_thread(call) -> list[object]:
    """Call in a thread that has ended when this returns (or is broken off by the interrupt itself)."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join(10)
    return results


def test_a_running_cell_is_interrupted_once(interrupts) -> None:
    hits = 0
    interrupts.arm()
    try:
        thread = threading.Thread(target=interrupts.interrupt)
        thread.start()
        threading.Event().wait(10)
    except KeyboardInterrupt:
        hits += 1
    thread.join()
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # the echo: the same interrupt's second signal
        hits -= 1
    assert hits == 0


def test_the_second_signal_of_an_interrupt_may_be_late_on_a_busy_machine(interrupts) -> None:
    interrupts.arm()
    with pytest.raises(KeyboardInterrupt):
        from_another_thread(interrupts.interrupt)
    interrupts._echo_until -= 0.5  # half a second later
    interrupts._late_until -= 0.5
    signal.raise_signal(signal.SIGINT)  # raises nothing
    interrupts.disarm()
    interrupts.arm()
    with pytest.raises(KeyboardInterrupt):  # the next cell is interruptible at once
        signal.raise_signal(signal.SIGINT)


def test_a_second_interrupt_that_is_asked_for_hits_again(interrupts) -> None:
    interrupts.arm()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            from_another_thread(interrupts.interrupt)


def test_between_cells_nothing_is_sent_and_nothing_raised(interrupts) -> None:
    assert from_another_thread(interrupts.interrupt) == [False]
    interrupts.arm()
    interrupts.disarm()
    assert from_another_thread(interrupts.interrupt) == [False]
    signal.raise_signal(signal.SIGINT)  # from outside: ignored as well


def test_an_interrupt_before_the_code_runs_is_raised_when_it_would(interrupts) -> None:
    interrupts.expect()
    assert from_another_thread(interrupts.interrupt) == [True]
    with pytest.raises(KeyboardInterrupt):
        interrupts.arm()
    signal.raise_signal(signal.SIGINT)  # it is not armed


def test_an_interrupt_before_a_cell_that_never_ran_does_not_hit_the_next(interrupts) -> None:
    interrupts.expect()
    from_another_thread(interrupts.interrupt)
    interrupts.disarm()
    interrupts.expect()
    interrupts.arm()
    interrupts.disarm()


def test_a_replaced_handler_is_put_back_for_the_next_cell(interrupts) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.arm()
    with pytest.raises(KeyboardInterrupt):
        from_another_thread(interrupts.interrupt)


def run_cell(interrupts: CellInterrupts, monkeypatch: pytest.MonkeyPatch, source: str) -> str:
    """Run a cell with ``await`` as the kernel does, interrupt it, and return the name of what it ends with."""
    namespace: dict[str, object] = {"asyncio": asyncio, "threading": threading}
    exec(f"async def cell():\n    ready.set()\n    {source}", namespace)
    ready = namespace["ready"] = threading.Event()

    def interrupt() -> None:
        ready.wait(10)
        interrupts.interrupt()

    async def main() -> str:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(interrupts, "_wake_loop", lambda: loop.call_soon_threadsafe(lambda: None))

        async def guarded() -> str:
            try:
                await namespace["cell"]()  # type: ignore[operator]
            except BaseException as error:
                return type(error).__name__
            return "nothing"

        task = asyncio.ensure_future(guarded())
        thread = threading.Thread(target=interrupt)
        interrupts.arm()
        try:
            with interrupts.cancelling(task, namespace):
                thread.start()
                return await asyncio.wait_for(asyncio.shield(task), 10)
        finally:
            interrupts.disarm()
            thread.join()

    new_loop = asyncio.new_event_loop()
    try:
        return new_loop.run_until_complete(main())
    finally:
        new_loop.close()


def test_a_cell_that_awaits_is_cancelled(interrupts, monkeypatch) -> None:
    assert run_cell(interrupts, monkeypatch, "await asyncio.sleep(30)") == "CancelledError"


def test_a_cell_with_await_that_runs_code_is_interrupted_in_that_code(interrupts, monkeypatch) -> None:
    assert run_cell(interrupts, monkeypatch, "threading.Event().wait(30)") == "KeyboardInterrupt"


GROUP = """
import os, signal, subprocess, threading
from rlm_kernel.jupyter.interrupts import CellInterrupts
interrupts = CellInterrupts(lambda: None)
interrupts.install()
started = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
interrupts.arm()
hits = 0
try:
    threading.Thread(target=interrupts.interrupt).start()
    threading.Event().wait(30)
except KeyboardInterrupt:
    hits += 1
print(hits, started.wait(10))
"""


def test_the_leader_of_a_group_interrupts_what_the_cell_started_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROUP], capture_output=True, text=True, timeout=40, start_new_session=True, check=False
    )
    assert done.stdout.split() == ["1", str(-signal.SIGINT)], done.stderr


LEADER = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, lambda *_: print('hit', flush=True))
subprocess.run([sys.executable, '-c', sys.argv[1]])
"""


def test_a_process_that_does_not_lead_its_group_signals_only_itself() -> None:
    """The group's leader is another process, which must not notice, nor what was started."""
    text = GROUP.replace("started.wait(10)", "started.poll(), started.kill(), started.wait()")
    done = subprocess.run(
        [sys.executable, "-c", LEADER, text],
        capture_output=True,
        text=True,
        timeout=40,
        start_new_session=True,
        check=False,
    )
    assert done.stdout.split() == ["1", "None", "None", "-9"], done.stderr


def test_an_interrupt_is_repeated_until_the_main_thread_has_noticed_it(interrupts, monkeypatch) -> None:
    """As when a signal comes right before a system call: the first ones go unnoticed."""
    sent = []

    def send() -> None:
        sent.append(1)
        if len(sent) == 4:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    monkeypatch.setattr(interrupts, "_signal_main_thread", send)
    interrupts.arm()
    with pytest.raises(KeyboardInterrupt):
        from_another_thread(interrupts.interrupt) and threading.Event().wait(10)
    assert len(sent) == 4


def test_an_interrupt_of_an_awaiting_cell_is_not_lost_if_the_cell_goes_on_before_it_is_cancelled(interrupts) -> None:
    """The signal comes while the cell's task is suspended, and the loop runs the task, into a busy loop, before the cancellation."""
    cell_globals: dict[str, object] = {"interrupts": interrupts, "from_another_thread": from_another_thread}
    code = "import asyncio\nasync def cell():\n    await asyncio.sleep(0)\n    while True:\n        pass\n"
    exec(code, cell_globals)

    async def main() -> str:
        task = asyncio.ensure_future(cell_globals["cell"]())  # type: ignore[operator]
        with interrupts.cancelling(task, cell_globals):
            interrupts.arm()
            await asyncio.sleep(0)  # the cell has begun, and is next in the loop's queue
            from_another_thread(interrupts.interrupt)
            try:
                await task
            except (KeyboardInterrupt, asyncio.CancelledError) as error:
                return type(error).__name__
        return "not interrupted"

    outcome = ""
    try:
        outcome = asyncio.run(main())
    except KeyboardInterrupt:
        outcome = "KeyboardInterrupt"
    finally:
        interrupts.disarm()
    assert outcome in ("KeyboardInterrupt", "CancelledError")
