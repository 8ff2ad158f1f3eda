"""Every way to end, as one serialized path. See docs/architecture.md for the table of events.

Who runs it: a *verb* (finalize, reset, close, cleanup, shutdown) runs on the thread that calls it: in the kernel a
lifecycle thread, never the main thread while a cell runs there, and never the thread that serves the control channel.
Verbs are serialized by one lock; one that arrives while another runs waits for it and then finds little left to do.
Admission of new children is shut before a verb queues for the lock, and opened again when no verb is left and the last
one was clean.

What it owns: the lock, the count of verbs under way, and the cleanup error that blocks the session until a later
attempt confirms.

How each step can fail: a process cannot be confirmed gone (the error is kept and returned; nothing else is lost); the
next verb after that starts at SIGKILL, since the graces have run; an unexpected exception passes through, and admission
stays shut only if the verb before it had failed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlm_kernel.children.supervisor import Supervisor
from rlm_kernel.errors import ChildCleanupError
from rlm_kernel.values import CleanupReport, Graces

_log = logging.getLogger(__name__)


class Lifecycle:
    """The serialized path of one session.

    Args:
        supervisor: whose children are stopped.
        graces: gives the configured graces.
    """

    def __init__(self, supervisor: Supervisor, graces: Callable[[], Graces]) -> None:
        self._supervisor = supervisor
        self._graces = graces
        self._serial = threading.Lock()
        self._state = threading.Lock()
        self._under_way = 0
        self._shut = False
        self._abandoned: frozenset[int] = frozenset()
        self.failure: ChildCleanupError | None = None

    @property
    def busy(self) -> bool:
        """Whether a verb is under way or waiting."""
        with self._state:
            return self._under_way > 0

    def begin(self) -> None:
        """Shut admission at once, before the verb itself. Each call is matched by one `run` with ``begun=True``."""
        with self._state:
            self._under_way += 1
            self._supervisor.admit_children(False)

    def run(
        self,
        verb: str,
        then: Callable[[CleanupReport], None] | None = None,
        *,
        begun: bool = False,
        for_good: bool = False,
    ) -> CleanupReport:
        """Stop every child, confirm, and do what the verb adds.

        Args:
            verb: its name, for the report and the log.
            then: called after a clean stop, before admission opens again.
            begun: whether `begin` was called for this verb.
            for_good: whether admission stays shut (shutdown).

        Returns:
            the report. If it is not clean, `failure` is set.
        """
        if not begun:
            self.begin()
        try:
            with self._serial:
                graces = self._graces() if self.failure is None else self._graces().from_kill()
                report = self._supervisor.stop(verb, graces)
                self._abandoned &= frozenset(report.survivors)  # the others are gone; their pids may come again
                if not for_good:  # the last word names every process that is left
                    report = self._without_abandoned(report)
                self.failure = None if report.ok else cleanup_error(report)
                _log.log(logging.INFO if report.ok else logging.ERROR, "%s", report.summary())
                if report.ok and then is not None:
                    then(report)
                return report
        finally:
            with self._state:
                self._under_way -= 1
                self._shut = self._shut or for_good
                if self._under_way == 0 and self.failure is None and not self._shut:
                    self._supervisor.admit_children(True)

    def run_for(self, verb: str, ids: Sequence[str]) -> CleanupReport:
        """Stop some children and their descendants, and confirm. Others run on, and admission stays open.

        Returns:
            the report. If it is not clean, `failure` is set.
        """
        with self._serial:
            report = self._supervisor.stop(verb, self._graces(), [(child_id, None) for child_id in ids])
            report = self._without_abandoned(report)
            if not report.ok:
                self.failure = cleanup_error(report)
            _log.log(logging.INFO if report.ok else logging.ERROR, "%s", report.summary())
            return report

    def _without_abandoned(self, report: CleanupReport) -> CleanupReport:
        """Leave out what was abandoned: it would block the session again at the next verb, and for ever."""
        return replace(report, survivors=tuple(pid for pid in report.survivors if pid not in self._abandoned))

    def abandon(self) -> ChildCleanupError | None:
        """Unlock the session although processes are left. Returns the error that named them."""
        with self._serial, self._state:
            failure, self.failure = self.failure, None
            self._abandoned |= frozenset(failure.survivors if failure is not None else ())
            if self._under_way == 0 and not self._shut:
                self._supervisor.admit_children(True)
        if failure is not None:
            _log.warning("abandoned: pid %s", ", ".join(map(str, failure.survivors)))
        return failure

    def hasten(self) -> None:
        """Skip to SIGKILL in the verb that is under way."""
        self._supervisor.hasten()


def cleanup_error(report: CleanupReport) -> ChildCleanupError:
    """Say which processes are left and what can be done."""
    pids = ", ".join(map(str, report.survivors))
    return ChildCleanupError(
        f"{report.verb}: could not confirm the exit of pid {pids} within {report.duration_s:.1f} s. Running cells and starting "
        "children is refused until it is confirmed: type `%rlm cleanup` to try again, or `%rlm cleanup --abandon` to go on without "
        "them. Your variables and the final answer are kept.",
        report.survivors,
        report,
    )
