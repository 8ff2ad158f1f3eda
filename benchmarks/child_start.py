"""What does a child cost? Handle, first answer, throughput and memory, against peers measured in the same run.

Peers: a raw ``os.fork`` of a process of the same size, a fresh process of ``multiprocessing``'s fork server, and a fresh ipykernel, which
is what a runtime pays that gives each child a kernel of its own. Run it on an idle machine::

    python benchmarks/child_start.py [--rounds N]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlm_kernel.clients.scripted import ScriptedClient
from rlm_kernel.session.config import Settings
from rlm_kernel.session.session import RLMSession


def _median_ms(action: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        action()
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times)


def _raw_fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _nothing() -> None:
    pass


def _forkserver_process(context: Any) -> None:
    process = context.Process(target=_nothing)
    process.start()
    process.join()


def _fresh_kernel() -> None:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def _private_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds

    raw_fork = _median_ms(_raw_fork, rounds)
    server = multiprocessing.get_context("forkserver")
    _forkserver_process(server)
    fork_server = _median_ms(lambda: _forkserver_process(server), rounds)
    kernel = _median_ms(_fresh_kernel, 3)

    with tempfile.TemporaryDirectory() as folder:
        namespace: dict[str, Any] = {}
        session = RLMSession(Settings({"run_dir": folder}, environ={}), namespace)
        session.configure_value("client_factory", ScriptedClient.factory(["```repl\nFINAL('done')\n```"]))
        query, wait = namespace["rlm_query"], namespace["rlm_wait"]
        began = time.perf_counter()
        query("first")
        first = (time.perf_counter() - began) * 1000
        answer = _median_ms(lambda: query("task"), rounds)
        handles: list[Any] = []
        handle = _median_ms(lambda: handles.append(query("task", blocking=False)), rounds)
        wait(handles)
        session.reset()
        count = 200
        began = time.perf_counter()
        wait([query("task", blocking=False) for _ in range(count)])
        rate = count / (time.perf_counter() - began)
        blocked = "```repl\nimport threading\nthreading.Event().wait()\n```"
        session.configure_value("client_factory", ScriptedClient.factory([blocked]))
        live = [query("task", blocking=False) for _ in range(4)]
        while any(not h.status().usage.calls for h in live):
            wait(live, timeout_s=0.01)
        private = statistics.median(_private_kib(h.status().pid) for h in live) / 1024
        session.shutdown()

    print(f"raw os.fork and exit                   {raw_fork:9.2f} ms")
    print(f"multiprocessing fork server            {fork_server:9.2f} ms   {fork_server / raw_fork:7.1f} x raw fork")
    print(f"fresh ipykernel, started and ready     {kernel:9.2f} ms   {kernel / raw_fork:7.1f} x raw fork")
    print(f"first child, nursery boot included     {first:9.2f} ms   {first / kernel:7.2f} x fresh ipykernel")
    print(f"handle of a background child           {handle:9.2f} ms   {handle / raw_fork:7.2f} x raw fork")
    print(f"child, from call to one-step answer    {answer:9.2f} ms   {answer / kernel:7.3f} x fresh ipykernel")
    print(f"children per second (8 at once)        {rate:9.1f}      {rate * kernel / 1000:7.1f} x fresh ipykernels")
    print(f"private memory per child               {private:9.1f} MiB")


if __name__ == "__main__":
    main()
