"""What does a large context cost the children that share it? Start and memory, against an empty context and against a copy for each.

The peers are measured in the same run: a child with an empty context, and one that gets the same text by file, as a context that is not
held by the nursery travels. Run it on an idle machine::

    python benchmarks/shared_context.py [--megabytes N] [--children N]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rlm_kernel.clients.scripted import ScriptedClient
from rlm_kernel.session.config import Settings
from rlm_kernel.session.session import RLMSession

ANSWER = "```repl\nFINAL(len(context))\n```"
BLOCKED = (
    "```repl\nn = context.count('x')\nprint('counted', flush=True)\nimport threading\nthreading.Event().wait()\n```"
)


def _private_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def _seconds(query: Any, **options: Any) -> float:
    began = time.perf_counter()
    query("task", **options)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--children", type=int, default=16)
    args = parser.parse_args()
    text = "abcdefghi " * (args.megabytes * 100_000)

    with tempfile.TemporaryDirectory() as folder:
        namespace: dict[str, Any] = {}
        settings = Settings({"run_dir": folder, "max_concurrent_children": args.children}, environ={})
        session = RLMSession(settings, namespace)
        query, wait = namespace["rlm_query"], namespace["rlm_wait"]
        session.configure_value("client_factory", ScriptedClient.factory([ANSWER]))
        query("warm up")
        first = _seconds(query, context=text)
        empty = [_seconds(query, context="") for _ in range(args.children)]
        held = [_seconds(query, context=text) for _ in range(args.children)]
        session.held._limit = 0
        session.held.release()
        copied = [_seconds(query, context=text) for _ in range(3)]
        session.held._limit = 4 << 30
        session.configure_value("client_factory", ScriptedClient.factory([BLOCKED]))
        handles = [query("task", context=text, blocking=False) for _ in range(args.children)]
        while not all("counted" in handle.status().log_tail for handle in handles):
            wait(handles, timeout_s=0.02)
        private = [_private_mib(handle.status().pid) for handle in handles]
        session.shutdown()

    base = statistics.median(empty)
    print(f"child with an empty context               {base * 1000:8.1f} ms")
    print(
        f"first child over {args.megabytes} MB (handed over)      {first * 1000:8.1f} ms  {first / base:6.1f} x empty"
    )
    print(
        f"last of {args.children} over the same text            {held[-1] * 1000:8.1f} ms  {held[-1] / base:6.2f} x empty"
    )
    median = statistics.median(copied)
    print(f"child with a copy of its own              {median * 1000:8.1f} ms  {median / base:6.1f} x empty")
    print(f"private memory per child, all {args.children} at work  {statistics.median(private):8.1f} MiB")


if __name__ == "__main__":
    main()
