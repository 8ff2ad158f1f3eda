"""Managed children without a kernel: an `RLMSession` as environments, runners and controllers use it.

Who runs it: helpers run in whatever thread calls them. The verbs (`begin_episode`, `finalize`, `close`, `cleanup`) may
be called from any thread, also while another one is blocked in a helper: they run side by side with it, and are serialized
among each other by the session's lifecycle. On the main thread a verb runs on a thread "rlm-lifecycle" of its own, so
that Ctrl-C cannot leave it half done: it makes the verb skip to SIGKILL, and is raised again when the verb has ended.

What it owns: the session, and with it the supervisor, the nursery and their threads, until `close`. If nobody calls
that, it is closed when the object is collected (on a thread of its own, since a collection may run on any) or
when the interpreter exits. If the process is killed, the nursery notices and stops the children.

How each step can fail: a child's exit is not confirmed in time (`ChildCleanupError`; helpers and `begin_episode` are
then refused until `cleanup` or any verb confirms it); the platform cannot fork (`ManagedModeRequired`, here and now).
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from rlm_kernel.clients.base import ModelClient
from rlm_kernel.closing import ClosesOnExit
from rlm_kernel.errors import ChildCleanupError, ConfigurationError, EpisodeClosing, EpisodeFinalized
from rlm_kernel.session.queries import ChatFn, chat_client
from rlm_kernel.values import ChildStatus, CleanupReport, FinalAnswer, ManagedChildConfig, Usage

if TYPE_CHECKING:
    from rlm_kernel.session.models import ModelAccess
    from rlm_kernel.session.session import RLMSession

_NOT_INJECTED = frozenset({"FINAL", "FINAL_VAR", "SHOW_VARS"})
"""Helpers that belong to the environment, which records the final answer."""


class ManagedChildren(ClosesOnExit):
    """Children in supervised processes, one episode after another. See the module's docstring.

    Args:
        config: how children are started and bounded. Their clients come from its ``client_factory``.
        chat_fn: makes the root's own model calls (``llm_query``, and ``rlm_query`` at the depth limit); None for a client
            of the factory's.
        system_prompt: of the children's runs, see `build_rlm_system_prompt`; None for the usual one.

    Raises:
        ManagedModeRequired: this platform cannot fork.
        ConfigurationError: ``config`` is no `ManagedChildConfig`, or ``chat_fn`` neither a chat function nor a client.
    """

    def __init__(
        self,
        config: ManagedChildConfig,
        *,
        chat_fn: ChatFn | ModelClient | None = None,
        system_prompt: str | None = None,
    ) -> None:
        if not isinstance(config, ManagedChildConfig):
            raise ConfigurationError("config", config, "must be a ManagedChildConfig(client_factory=..., ...)")
        # Here and not at the top: this module can be imported where no process can be forked.
        from rlm_kernel.children.posix import require_fork
        from rlm_kernel.environment.finalization import Finalization
        from rlm_kernel.session.config import Settings
        from rlm_kernel.session.helpers import Helpers
        from rlm_kernel.session.session import RLMSession

        require_fork()
        self.config = config
        values = {field.name: getattr(config, field.name) for field in fields(config)}
        # Of the environment only where files go: what was asked for in code is not to be overridden from outside.
        environ = {name: os.environ[name] for name in ("RLM_RUN_DIR",) if name in os.environ}
        client = None if chat_fn is None else chat_client(chat_fn)
        self._session = RLMSession(Settings(values, environ), {}, root_client=client, system_prompt=system_prompt)
        self._finalized = self._closed = False
        environment = replace(
            self._session.helper_environment, may_start=self._check_may_start, may_block=self._check_may_run
        )
        unused = Finalization(dict, frozenset)
        functions = Helpers(environment, unused).functions()
        self._helpers = {name: function for name, function in functions.items() if name not in _NOT_INJECTED}
        self._at_exit = functools.partial(_shut_down, self._session)
        atexit.register(self._at_exit)
        self._if_collected = weakref.finalize(self, _shut_down_later, self._session, self._at_exit)
        self._if_collected.atexit = False

    # -- what environments and runners use

    def helpers(self) -> Mapping[str, Callable[..., Any]]:
        """Return the functions to put into a namespace: ``llm_query`` to ``rlm_share``. They stay the same for life."""
        return dict(self._helpers)

    @property
    def session(self) -> RLMSession:
        """The session behind it."""
        return self._session

    @property
    def models(self) -> ModelAccess:
        """The root's own model calls."""
        return self._session.models()

    @property
    def episode_id(self) -> str:
        """The id of the running episode."""
        return self._session.episode_id

    @property
    def usage(self) -> Usage:
        """Model calls and tokens of the whole episode, children included."""
        return self._session.usage

    def statuses(self) -> list[ChildStatus]:
        """Return a snapshot of every child of the episode, in start order."""
        return self._session.supervisor.status()

    def prepare(self) -> None:
        """Start the nursery in the background, so that the first child need not wait for it."""
        self._check_may_run()
        self._session.prepare()

    # -- verbs

    def begin_episode(self, episode_id: str | None = None) -> CleanupReport:
        """Stop the children and begin a new episode: earlier handles become stale, counts begin at zero.

        Args:
            episode_id: the id of the new episode, None for a fresh one.

        Raises:
            ChildCleanupError: an exit could not be confirmed in time; the episode before goes on.
            EpisodeClosing: it was closed.
        """
        self._check_open()
        report = self._run(lambda: self._session.reset(episode_id=episode_id))
        self._finalized = False
        return report

    def finalize(self, answer: FinalAnswer | None = None) -> CleanupReport:
        """Stop the children because the episode has its answer. Later nonblocking queries raise `EpisodeFinalized`.

        Args:
            answer: the final answer, for what is kept on disk.

        Raises:
            ChildCleanupError: an exit could not be confirmed in time.
        """
        self._finalized = True
        if answer is not None and self._session.finalization.final is None:
            self._session.finalization.final = answer
        return self._run(self._session.finalize)

    def close(self) -> CleanupReport:
        """Stop the children and end for good: nursery and threads, too. May be called again, also after a failure.

        Raises:
            ChildCleanupError: an exit could not be confirmed in time. The nursery goes on killing.
        """
        self._closed = True
        report = self._run(lambda: self._session.shutdown("close"))
        atexit.unregister(self._at_exit)
        self._if_collected.detach()
        return report

    def cleanup(self) -> CleanupReport:
        """Try again to confirm what an earlier verb could not.

        Returns:
            the report; its ``survivors`` are what still could not be confirmed.
        """
        return self._confirmed(self._session.cleanup)

    @property
    def cleanup_failure(self) -> ChildCleanupError | None:
        """The error that blocks the episode until a later attempt confirms; None if nothing does."""
        failure = self._session.cleanup_failure
        return None if failure is None or failure.report is None else _cleanup_error(failure.report)

    # -- checks

    def _check_open(self) -> None:
        if self._closed:
            raise EpisodeClosing("these children were closed for good; make new ones")

    def _check_may_run(self) -> None:
        self._check_open()
        failure = self.cleanup_failure
        if failure is not None:
            raise failure
        self._session.check_may_run()

    def _check_may_start(self) -> None:
        self._check_may_run()
        if self._finalized:
            raise EpisodeFinalized(
                "this episode has its final answer, so no new children are started; a reset begins a new episode"
            )

    # -- running verbs

    def _run(self, verb: Callable[[], CleanupReport]) -> CleanupReport:
        report = self._confirmed(verb)
        if not report.ok:
            raise _cleanup_error(report)
        return report

    def _confirmed(self, verb: Callable[[], CleanupReport]) -> CleanupReport:
        """Run a verb to its end, whatever interrupts come."""
        if threading.current_thread() is not threading.main_thread():
            return verb()  # no interrupt reaches this thread
        from rlm_kernel.session.offthread import run_off_thread, wait_here

        interrupts: list[None] = []

        def hasten() -> None:
            interrupts.append(None)
            self._session.lifecycle.hasten()

        report = wait_here(run_off_thread(verb), hasten)
        if interrupts and report.ok:
            raise KeyboardInterrupt("interrupted while children were being stopped; they are gone")
        return report


def _cleanup_error(report: CleanupReport) -> ChildCleanupError:
    pids = ", ".join(map(str, report.survivors))
    return ChildCleanupError(
        f"{report.verb}: could not confirm the exit of pid {pids} within {report.duration_s:.1f} s. Running code, starting "
        "children and a reset are refused until it is confirmed: call cleanup(), or any of finalize(), begin_episode() and "
        "close(), to try again. The final answer is kept.",
        report.survivors,
        report,
    )


def _shut_down(session: RLMSession) -> None:
    """End a session whose owner has not closed it. What survives is logged by the verb itself."""
    session.shutdown("exit")


def _shut_down_later(session: RLMSession, at_exit: Callable[[], None]) -> None:
    """End the session of an object that was collected: on a thread of its own, as a collection may run on any thread of ours."""
    from rlm_kernel.session.offthread import run_off_thread

    atexit.unregister(at_exit)
    run_off_thread(functools.partial(_shut_down, session))
