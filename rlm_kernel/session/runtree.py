"""The tree of runs that recur in one process, without child processes: what they count and bound together.

Who runs it: the threads of the runs, in the process that they share. It owns nothing but numbers under one lock, which is
never held over a call to anybody else.

A thread cannot be stopped from outside. So a stop is cooperative: it is seen at the next model call of the run and of
everything below it, whoever makes that call.
"""

from __future__ import annotations

import threading
import time

from rlm_kernel.errors import EpisodeClosing
from rlm_kernel.session.rundir import RunFolder
from rlm_kernel.values import Usage


class RunNode:
    """One run's place in the tree. It is the meter of the run's model calls.

    Args:
        parent: the run that started this one, None for the root.
        name: the run's name, unique in its tree.
    """

    def __init__(self, parent: RunNode | None = None, name: str = "root") -> None:
        self.name = name
        self._parent = parent
        self._root: RunNode = self if parent is None else parent._root
        self._lock: threading.Lock = threading.Lock() if parent is None else parent._lock
        self._usage = Usage()
        self._children = 0
        self._stopped = False
        self._deadline: float | None = None
        self._folder: RunFolder | None = None

    @property
    def parent(self) -> RunNode | None:
        """The run that started this one."""
        return self._parent

    @property
    def folder(self) -> RunFolder | None:
        """Where the runs of this tree are written down; None if they are not."""
        return self._root._folder

    @folder.setter
    def folder(self, folder: RunFolder) -> None:
        self._root._folder = folder

    @property
    def usage(self) -> Usage:
        """What this run and everything below it has used."""
        with self._lock:
            return self._usage

    @property
    def children(self) -> int:
        """How many children the whole tree has started."""
        with self._lock:
            return self._root._children

    def admit_child(self, limit: int | None) -> int | None:
        """Count one more child of the tree.

        Args:
            limit: how many there may be, None for no limit.

        Returns:
            the child's number, or None if there are so many already.

        Raises:
            EpisodeClosing: this run is being stopped.
        """
        self.check()
        with self._lock:
            if limit is not None and self._root._children >= limit:
                return None
            self._root._children += 1
            return self._root._children

    def begin_anew(self) -> None:
        """Forget what was counted. For the root of a tree in which nothing runs."""
        with self._lock:
            self._usage, self._children = Usage(), 0

    # -- time

    @property
    def deadline(self) -> float | None:
        """The `time.monotonic` value at which the time of this run, or of one above it, is up; None for never."""
        own, above = self._deadline, None if self._parent is None else self._parent.deadline
        return min((value for value in (own, above) if value is not None), default=None)

    def limit_time(self, seconds: float | None) -> None:
        """Give this run so many seconds from now, None for no limit of its own."""
        self._deadline = None if seconds is None else time.monotonic() + seconds

    # -- stopping

    def stop(self) -> None:
        """Have this run and everything below it end at the next model call."""
        self._stopped = True

    @property
    def stopped(self) -> bool:
        """Whether this run or one above it is being stopped."""
        return self._stopped or (self._parent is not None and self._parent.stopped)

    def check(self) -> None:
        """Raise if the run is being stopped.

        Raises:
            EpisodeClosing: it is.
        """
        if self.stopped:
            raise EpisodeClosing("this run has ended or is being stopped; it makes no further call")

    # -- the meter of model calls

    def begin_call(self) -> None:
        """Allow a model call.

        Raises:
            EpisodeClosing: this run is being stopped.
        """
        self.check()

    def end_call(self, usage: Usage, model: str = "", duration_s: float = 0.0) -> None:
        """Add up what a call has cost, here and all the way up."""
        with self._lock:
            node: RunNode | None = self
            while node is not None:
                node._usage += usage
                node = node._parent
