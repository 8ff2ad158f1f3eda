"""The kernel's side of `rlm_kernel.jupyter.harness`: begin an episode in a kernel that has had others, and record a given answer.

Who runs it: the main thread, in a silent request of the harness. What the user's code of an earlier episode has left in names, working
directory, environment variables and import path is cleared. Imported modules stay as they are (many cannot be imported twice). Threads
cannot be stopped in Python, and tasks may refuse to: if some go on, `EpisodeLeftovers` says so, and the harness takes a new kernel.

How each step can fail: the job cannot be read or unpickled (nothing has been changed then); the children of the episode before cannot be
confirmed gone (`ChildCleanupError`, and that episode goes on); something is left running (`EpisodeLeftovers`, the kernel is of no use).
"""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlm_kernel.errors import LifecycleError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rlm_kernel.session.session import RLMSession

_JOIN_S = 0.2
"""Seconds for threads that are about to end, now that the names that held them are gone."""

_JUPYTER = ("ipykernel", "IPython", "zmq")

_ATTRIBUTE = "_rlm_ground"
"""Where the ground is kept: on the shell, whose life it shares."""


class EpisodeLeftovers(LifecycleError):
    """Code of an earlier episode still runs in this kernel, and would reach into the next one."""


@dataclass(frozen=True, slots=True)
class Job:
    """What an episode begins with.

    Attributes:
        context: what ``context`` is bound to.
        seed: for ``random``, and for numpy if it is there; None leaves them as they are.
        client_factory: builds the model client, None for what the kernel is configured with.
    """

    context: Any = ""
    seed: int | None = None
    client_factory: Any = None


@dataclass(slots=True)
class _Ground:
    """What was there before any code of the user's: of the kernel's life, and (``threads``) of the episode."""

    cwd: str
    environ: dict[str, str]
    path: list[str]
    threads: frozenset[threading.Thread]

    @classmethod
    def of(cls, shell: Any) -> _Ground:
        """Return the shell's ground: as it is now, if it has not been looked at before."""
        ground = getattr(shell, _ATTRIBUTE, None)
        if ground is None:
            ground = cls(os.getcwd(), dict(os.environ), list(sys.path), frozenset(threading.enumerate()))
            setattr(shell, _ATTRIBUTE, ground)
        return ground

    def restore(self) -> None:
        os.chdir(self.cwd)
        for name in set(os.environ) - set(self.environ):
            del os.environ[name]
        for name, value in self.environ.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        sys.path[:] = self.path


def serve_reset(path: str) -> None:
    """Begin a new episode: nothing of the user's is left in the namespace, and ``context`` is what the job says.

    Args:
        path: a file with a pickled `Job`.

    Raises:
        ChildCleanupError: children of the episode before could not be confirmed gone.
        EpisodeLeftovers: code of an earlier episode still runs.
    """
    shell, session = _shell_and_session()
    ground = _Ground.of(shell)
    with open(path, "rb") as file:
        job = pickle.load(file)
    _begin_anew(session)
    ground.restore()
    left = [f"task {task.get_name()}" for task in asyncio.all_tasks() if _runs_code_of(shell, task)]
    began = set(threading.enumerate()) - ground.threads
    shell.reset(new_session=True)
    left += [f"thread {thread.name}" for thread in _still_running(began)]
    if left:
        raise EpisodeLeftovers(f"still running: {', '.join(left)}")
    ground.threads = frozenset(threading.enumerate())  # the reset may have begun some, too
    if job.client_factory is not None:
        session.configure_value("client_factory", job.client_factory)
        session.prepare()
    shell.user_ns["context"] = job.context
    if job.seed is not None:
        random.seed(job.seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(job.seed % 2**32)


def serve_final(text: str | None) -> None:
    """End the episode with an answer that the harness gives, or without one: either way its children are stopped before the reply."""
    _shell, session = _shell_and_session()
    if text is not None and session.final_answer is None:
        session.finalization.FINAL(text)
        return
    from rlm_kernel.session.offthread import run_off_thread, wait_here

    wait_here(run_off_thread(session.close), session.lifecycle.hasten)
    session.check_may_run()


def _begin_anew(session: RLMSession) -> None:
    from rlm_kernel.session.offthread import run_off_thread, wait_here

    wait_here(run_off_thread(session.reset), session.lifecycle.hasten)
    session.check_may_run()


def _shell_and_session() -> tuple[Any, RLMSession]:
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    return shell, shell.kernel.rlm


def _runs_code_of(shell: Any, task: asyncio.Task[Any]) -> bool:
    frame = getattr(task.get_coro(), "cr_frame", None)
    return frame is not None and frame.f_globals is shell.user_global_ns and task is not asyncio.current_task()


def _is_machinery(thread: threading.Thread) -> bool:
    """Tell whether a thread is ours, or of a class of Jupyter's that begins it when it first needs it."""
    return thread.name.startswith("rlm-") or type(thread).__module__.partition(".")[0] in _JUPYTER


def _still_running(threads: Iterable[threading.Thread]) -> list[threading.Thread]:
    until = time.monotonic() + _JOIN_S
    theirs = [thread for thread in threads if not _is_machinery(thread)]
    for thread in theirs:
        thread.join(max(0.0, until - time.monotonic()))
    return [thread for thread in theirs if thread.is_alive()]
