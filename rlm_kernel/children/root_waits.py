"""Waits of the root process's own threads, which a stop must be able to end.

Who runs it: any thread of the root waits; the reactor's thread, or whichever one something happens on, wakes it. A signal
interrupts a wait on the main thread; one on another thread is ended by the supervisor's ``interrupt_waits``, which finds it in
its list. Nothing here can fail but by an interrupt, which leaves nothing registered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from rlm_kernel.children.core import Core
from rlm_kernel.children.registry import Waiter


@dataclass(slots=True, eq=False)
class RootWait:
    """One wait of the root's. ``over`` is released when it is over."""

    waiter: Waiter
    over: threading.Lock
    interrupted: bool = False
    on_main_thread: bool = field(default_factory=lambda: threading.current_thread() is threading.main_thread())

    @classmethod
    def for_no_child(cls) -> RootWait:
        """Make a wait that no child ends."""
        over = threading.Lock()
        over.acquire()
        return cls(Waiter(set(), False, over.release), over)

    def end(self) -> None:
        """End it, unless it is over. Under the core's lock."""
        if not self.waiter.over:
            self.waiter.over = True
            self.over.release()


class Stirs:
    """Lets one thread wait until something may have happened to a child. A ``with`` block.

    What stirs while nobody waits is remembered, so that a thread which looks and then waits misses nothing.

    Args:
        core: of the supervisor.
        root_waits: its waits, which a stop interrupts.
        subscribe: has a callback called whenever something stirs; returns what withdraws it.
    """

    def __init__(
        self,
        core: Core,
        root_waits: list[RootWait],
        subscribe: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:
        self._core = core
        self._root_waits = root_waits
        self._subscribe = subscribe
        self._withdraw: Callable[[], None] | None = None
        self._stirred = False
        self._waiting: RootWait | None = None

    def __enter__(self) -> Stirs:
        self._withdraw = self._subscribe(self._on_stir)
        return self

    def __exit__(self, *_: object) -> None:
        if self._withdraw is not None:
            self._withdraw()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until something has stirred since the last wait, or the time is up.

        Raises:
            KeyboardInterrupt: it was interrupted.
        """
        self._wait(timeout_s, whatever_stirs=False)

    def pause(self, seconds: float) -> None:
        """Let time pass, whatever stirs.

        Raises:
            KeyboardInterrupt: it was interrupted.
        """
        self._wait(seconds, whatever_stirs=True)

    def _wait(self, timeout_s: float | None, *, whatever_stirs: bool) -> None:
        wait = RootWait.for_no_child()
        try:
            with self._core.lock:
                self._root_waits.append(wait)
                if not whatever_stirs:
                    if self._stirred:
                        wait.end()
                    self._waiting, self._stirred = wait, False
            wait.over.acquire(timeout=-1 if timeout_s is None else min(max(0.0, timeout_s), threading.TIMEOUT_MAX))
        finally:
            with self._core.lock:
                wait.waiter.over = True
                self._waiting = None
                if wait in self._root_waits:
                    self._root_waits.remove(wait)
        if wait.interrupted:
            raise KeyboardInterrupt("the children that this watched are being stopped")

    def _on_stir(self) -> None:
        with self._core.lock:
            wait = self._waiting
            if wait is None:
                self._stirred = True
            else:
                wait.end()
