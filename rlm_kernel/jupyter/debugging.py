"""Interrupt a cell that the debugger has stopped. A part of `attachment`, which see.

A thread that is stopped at a breakpoint waits in a loop of the debugger's (pydevd, below debugpy). ``KeyboardInterrupt``
raised there leaves the thread marked as stopped: it waits again at once, nobody is told, and the debugger is of no use any
more. (So it is with a stock kernel.) Therefore the mark is taken off first. Then the interrupt goes through to the line at
which the cell stands, and no further line of it runs. Telling the debugger "continue" instead would let some run.
The debugger stops other threads along with the cell's (IPython's, the user's); those are told to continue.

Who runs it: the main thread (`let_go` in the signal handler, `trace_again` before the next cell); `continue_others` on the
thread "Control".

How each step can fail: a future debugger keeps its mark elsewhere (the interrupt is as harmful as in a stock kernel);
another request to the debugger is under way and does not end, or the debugger does not answer (after `_PATIENCE_S` the
other threads are left as they are).
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ipykernel.ipkernel import IPythonKernel

_PATIENCE_S = 0.5
"""Seconds that the debugger gets: within them a stop button still feels prompt."""

_RUNS, _NO_STEP = 1, -1
"""pydevd's ``STATE_RUN``, and its step command for "none"."""


def let_go(frame: FrameType | None) -> KeyboardInterrupt:
    """Take the debugger's mark off a thread, if it has stopped that.

    Args:
        frame: the innermost frame of the thread.

    Returns:
        the interrupt that is to be raised there.
    """
    interrupt = KeyboardInterrupt()
    while frame is not None:
        if frame.f_code.co_name == "do_wait_suspend" and frame.f_globals.get("__name__") == "pydevd":
            info = getattr(frame.f_locals.get("thread"), "additional_info", None)
            if info is not None and frame.f_back is not None:
                info.pydev_step_cmd, info.pydev_state = _NO_STEP, _RUNS
                where = f"KeyboardInterrupt where the debugger had stopped, at line {frame.f_back.f_lineno}"
                # IPython would spend seconds on showing the debugger's own frames, while that traces it.
                interrupt._render_traceback_ = lambda where=where: [where]  # type: ignore[attr-defined]
            break
        frame = frame.f_back
    return interrupt


def trace_again() -> None:
    """Have the debugger trace this thread again: up to Python 3.11, an exception in a trace function ends the tracing."""
    debugpy = sys.modules.get("debugpy")
    if debugpy is not None:
        debugpy.trace_this_thread(True)


def continue_others() -> None:
    """Let the threads go on that the debugger has stopped along with the cell's."""
    lifecycle = sys.modules.get("_pydevd_bundle.pydevd_thread_lifecycle")
    if lifecycle is not None:
        lifecycle.resume_threads("*")


def has_stopped(kernel: IPythonKernel) -> bool:
    """Tell whether the debugger has stopped threads of a kernel."""
    debugger = getattr(kernel, "debugger", None)
    return debugger is not None and bool(debugger.is_started and debugger.stopped_threads)
