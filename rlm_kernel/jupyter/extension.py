"""``%load_ext rlm_kernel``: a session in a stock IPython kernel, or in IPython in a terminal.

`load_ipython_extension` and `unload_ipython_extension` run on the main thread, in a cell or at the start. What is
attached is kept with the shell itself, so that loading twice, under either name (``rlm_kernel``, ``rlm``), finds it.

How each step can fail: loaded from another thread, such as a subshell's (refused: signal handlers belong to the main
thread); unloaded while children cannot be confirmed gone (refused; it stays loaded, so that ``%rlm cleanup`` can go
on).
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol

from rlm_kernel.errors import UsageMistake
from rlm_kernel.jupyter.shell_session import ShellSession
from rlm_kernel.session.offthread import run_off_thread, wait_here

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_log = logging.getLogger(__name__)

_KEPT_AS = "_rlm_attachment"
"""The attribute of a shell that holds what is attached to it."""

_BUILT_IN = "built in"

_ALREADY_HERE = "The RLM kernel has all of this built in: there is nothing to load or unload."


class Attachment(Protocol):
    """What connects a session to the lifecycle of where it was loaded."""

    cells: ShellSession

    def attach(self) -> None: ...

    def detach(self) -> None: ...

    def at_exit(self) -> None:
        """Called by an exit hook of the interpreter."""


def mark_built_in(shell: InteractiveShell) -> None:
    """Say that a shell belongs to a kernel that needs no extension."""
    setattr(shell, _KEPT_AS, _BUILT_IN)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Give a shell the helpers, the magics and the lifecycle.

    Raises:
        UsageMistake: this is not the main thread.
    """
    attached = getattr(shell, _KEPT_AS, None)
    if attached is not None:
        print(_ALREADY_HERE if attached == _BUILT_IN else "The RLM extension is loaded already.")
        return
    _check_thread("load")
    attachment = _attachment(shell)
    attachment.attach()
    setattr(shell, _KEPT_AS, attachment)
    atexit.register(attachment.at_exit)
    taken = attachment.cells.furnish()
    if taken:
        print(f"kept as you have them: {', '.join(taken)} (delete one, and ours takes its place)", file=sys.stderr)
    attachment.cells.start()


def _attachment(shell: InteractiveShell) -> Attachment:
    kernel: Any = getattr(shell, "kernel", None)
    log = _log if kernel is None else kernel.log
    cells = ShellSession(shell, shell, log)
    if kernel is not None:
        from ipykernel.ipkernel import IPythonKernel

        if isinstance(kernel, IPythonKernel):
            from rlm_kernel.jupyter.attachment import KernelAttachment

            return KernelAttachment(kernel, cells)
    from rlm_kernel.jupyter.terminal import TerminalAttachment

    return TerminalAttachment(shell, cells)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Stop the children, confirm, and undo what loading did.

    Raises:
        ChildCleanupError: children are left; the extension stays loaded.
        UsageMistake: this is not the main thread.
    """
    attachment = getattr(shell, _KEPT_AS, None)
    if attachment is None or attachment == _BUILT_IN:
        if attachment is not None:
            print(_ALREADY_HERE)
        return
    _check_thread("unload")
    session = attachment.cells.rlm
    wait_here(run_off_thread(session.close), session.lifecycle.hasten)
    if session.cleanup_failure is not None:
        raise session.cleanup_failure
    report = wait_here(run_off_thread(lambda: session.shutdown("unload")), session.lifecycle.hasten)
    if not report.ok:  # processes that the user has abandoned
        print(report.summary(), file=sys.stderr)
    attachment.detach()
    attachment.cells.remove()
    atexit.unregister(attachment.at_exit)
    delattr(shell, _KEPT_AS)


def _check_thread(what: str) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise UsageMistake(
            f"the RLM extension can {what} only in the main thread: use a cell that is not in a subshell"
        )
