"""The composition root: one session, one episode after another. Usable without Jupyter.

Who runs it: helpers run in whatever thread of the root process calls them; the verbs run in the caller's thread (see
`lifecycle`). The session owns the supervisor, the run folder of the current episode, the shared contexts, and the
root's model client.

In a process that user code forked from the root, the helpers raise `ForkedProcessError`, and `shutdown` does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import platform
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlm_kernel._version import __version__
from rlm_kernel.children import posix
from rlm_kernel.children.records import Limits
from rlm_kernel.children.supervisor import NurserySettings, Supervisor
from rlm_kernel.credentials import looks_secret, secret_values
from rlm_kernel.environment.finalization import Finalization
from rlm_kernel.errors import (
    ChildCleanupError,
    EpisodeFinalized,
    ForkedProcessError,
    ManagedModeRequired,
    ModelNotConfigured,
)
from rlm_kernel.loop.trajectory import RunMetadata, write_missing_end
from rlm_kernel.session.config import Settings
from rlm_kernel.session.contexts import SharedContext
from rlm_kernel.session.helpers import HIDDEN_NAMES, HelperEnvironment, Helpers
from rlm_kernel.session.holding import HeldContexts
from rlm_kernel.session.lifecycle import Lifecycle
from rlm_kernel.session.models import ModelAccess, describe_model, name_for_usage
from rlm_kernel.session.ports import ChildrenPort, RootPort, Watch, unwatched
from rlm_kernel.session.rundir import RunFolder, runs_root
from rlm_kernel.session.subcalls import SubcallObserver
from rlm_kernel.session.tasks import WARM_UP, WARM_UP_WITHOUT_OPENAI, Inherited, pack, pickle_factory
from rlm_kernel.values import ChildStatus, CleanupReport, FinalAnswer, Usage, count_by_model

if TYPE_CHECKING:
    from rlm_kernel.clients.base import ModelClient

_log = logging.getLogger(__name__)

ROOT_RUN = "root"
"""How the ids of loops in the root's own namespace begin."""

_RUN_FILE_EVERY_S = 1.0
"""Seconds between two versions of ``run.json`` while children end one after another; the last one is always written."""


class RLMSession:
    """A session: settings, helpers, children, and the lifecycle of its episodes.

    Args:
        settings: the settings in force.
        namespace: the dict into which the helpers go and in which ``FINAL_VAR`` looks names up.
        on_change: called on an observer thread with a status whenever a child changes its state.
        on_warning: called on an observer thread with a line for the user.
        root_client: makes the root's own model calls, where that is not what the configured factory builds.

    Attributes:
        watch: gives the block within which the root waits for children. Whoever shows waits puts something of its own here.
    """

    def __init__(
        self,
        settings: Settings,
        namespace: dict[str, Any],
        *,
        on_change: Callable[[ChildStatus], None] | None = None,
        on_warning: Callable[[str], None] | None = None,
        root_client: ModelClient | None = None,
        system_prompt: str | None = None,
    ) -> None:
        self.settings = settings
        self.watch: Watch = unwatched
        self._root_client = root_client
        self._system_prompt = system_prompt
        self.namespace = namespace
        subcalls = SubcallObserver(lambda name: self.settings[name])
        self._listeners: list[Callable[[ChildStatus], None]] = [self._on_change, subcalls.on_change]
        if on_change is not None:
            self._listeners.append(on_change)
        self.episode_id = ""
        self.finalization = Finalization(lambda: self.namespace, lambda: HIDDEN_NAMES)
        self._shared: weakref.WeakSet[SharedContext] = weakref.WeakSet()
        self._models: ModelAccess | None = None
        self._models_for: Any = None
        self._spent = Usage()
        self._spent_by_model: dict[str, Usage] = {}
        self._reports: list[CleanupReport] = []
        self._root_runs: dict[str, list[str]] = {}
        self.root_runs_under_way: dict[str, object] = {}  # the one run of the root's namespace; see `root_run`
        self._files_lock = threading.RLock()  # a final answer's own __str__ may come back here
        self._run_file_written = 0.0
        self._started_at = time.time()
        self._ended = False
        self._pid = os.getpid()
        self.supervisor = Supervisor(
            paths=lambda run_id: self._folder.run_paths(run_id), on_change=self._tell_listeners, on_warning=on_warning
        )
        self.lifecycle = Lifecycle(self.supervisor, lambda: self.settings.bounds().graces)
        self.held = HeldContexts(self.supervisor)
        self._port = RootPort(
            self.supervisor,
            hold=self.held.reference,
            prepare=self._prepare_folder,
            inherited=self._inherited,
            keep_env=self._keep_env,
            model_label=self._model_label,
            watch=lambda refs: self.watch(refs),
        )
        self.helper_environment = HelperEnvironment(
            children=self._children,
            models=self.models,
            depth=0,
            # Where nothing can be forked, a blocking query is what it is at the depth limit: one model call.
            max_depth=lambda: self.settings["max_depth"] if posix.CAN_FORK else 1,
            episode_id=lambda: self.episode_id,
            may_start=self._check_may_start,
            may_block=self.check_may_run,
            on_share=self._shared.add,
            batch_limit=lambda: self.settings["max_children_per_batch"],
        )
        self.functions = Helpers(self.helper_environment, self.finalization).functions()
        self._begin_episode()

    # -- settings

    def configure(self, name: str, text: str) -> Any:
        """Change a setting from text; it holds for children started from now on. Returns the value.

        Raises:
            ConfigurationError: names the setting and the value; nothing was changed.
        """
        value = self.settings.set_model_text(text) if name == "model" else self.settings.set_text(name, text)
        self._apply_settings()
        return value

    def configure_value(self, name: str, value: Any) -> None:
        """Change a setting to a value, such as a callable for ``client_factory``.

        Raises:
            ConfigurationError: names the setting and the value; nothing was changed.
        """
        self.settings.set(name, value)
        self._apply_settings()

    def _apply_settings(self) -> None:
        bounds = self.settings.bounds()
        self.supervisor.configure(
            Limits(
                max_depth=bounds.max_depth,
                max_children_total=bounds.max_children_total,
                max_children_per_batch=bounds.max_children_per_batch,
                max_concurrent_children=bounds.max_concurrent_children,
                per_child_timeout_s=bounds.per_child_timeout_s,
                result_truncation_limit=bounds.result_truncation_limit,
                memory_limit_bytes=bounds.memory_limit_bytes,
                max_concurrent_model_calls=bounds.max_concurrent_model_calls,
                max_total_tokens=bounds.max_total_tokens,
                graces=bounds.graces,
            )
        )
        folder = self._folder.path() if self._folder.exists else None
        self.supervisor.settings = NurserySettings(
            warm_up=WARM_UP if self.settings.warms_openai else WARM_UP_WITHOUT_OPENAI,
            preload=bounds.preload,
            keep_secrets=bounds.child_env_keep,
            log_path="" if folder is None else str(folder / "nursery.log"),
        )

    @property
    def is_managed(self) -> bool:
        """Whether a client factory is configured, so that children can be started."""
        return self.settings.factory is not None

    @property
    def model_name(self) -> str | None:
        """How the configured model is called, None if there is none."""
        return describe_model(self.settings.factory, self.settings.call_model) if self.is_managed else None

    def prepare(self) -> None:
        """Start the nursery in the background, so that the first child need not wait for it."""
        self._apply_settings()
        if posix.CAN_FORK:
            self.supervisor.prepare()

    # -- what the helpers need

    def models(self) -> ModelAccess:
        """Return access to the configured model, for calls from the root.

        Raises:
            ModelNotConfigured: there is none; the message shows the line to type.
        """
        factory = self.settings.factory
        if factory is None:
            raise ModelNotConfigured
        # An edited key or address (`%env OPENAI_API_KEY=…`) must reach the next call, as it reaches the next child.
        made_for = (factory, self.settings.call_model, _client_variables())
        if self._models is None or self._models_for != made_for:
            from rlm_kernel.clients.base import build_client

            if self._models is not None:
                self._spent += self._models.usage
                for name, used in self._models.usage_by_model.items():
                    count_by_model(self._spent_by_model, name, used)
            self._models = ModelAccess(
                lambda: self._root_client or build_client(factory),
                model=self.settings.call_model,
                name_of=functools.partial(name_for_usage, factory),
                meter=self.supervisor,
                run=self.supervisor.run_interruptibly,
            )
            self._models_for = made_for
        return self._models

    def _children(self) -> ChildrenPort:
        return self._port

    def check_managed(self) -> None:
        """Raise if children cannot be started at all.

        Raises:
            ChildCleanupError: a failed cleanup blocks the session.
            ManagedModeRequired: no client factory is configured, or this platform cannot fork.
        """
        self.check_may_run()
        posix.require_fork()
        if not self.is_managed:
            raise ManagedModeRequired

    def _check_may_start(self) -> None:
        self.check_managed()
        if self.finalization.final is not None:
            raise EpisodeFinalized(
                "this episode has its final answer, so no new children are started; `%rlm reset` begins a new episode"
            )

    def _keep_env(self) -> tuple[str, ...]:
        keep: tuple[str, ...] = self.settings["child_env_keep"]
        return keep

    def _model_label(self, model: str | None) -> str:
        return model or self.model_name or ""

    def _inherited(self, model: str | None) -> bytes:
        """Pack what a tree inherits: called at each start, so that an edited factory is pickled anew."""
        factory = self.settings.factory
        if factory is None:
            raise ModelNotConfigured
        bounds = self.settings.bounds()
        return pack(
            Inherited(
                factory=pickle_factory(factory),
                root_model=self.model_name or "",
                model=self.settings.call_model,
                max_depth=bounds.max_depth,
                max_iterations=bounds.max_iterations,
                max_children_per_batch=bounds.max_children_per_batch,
                asks_for_calls=self.supervisor.gates_calls,
                memory_limit_bytes=bounds.memory_limit_bytes,
                episode_id=self.episode_id,
                system_prompt=self._system_prompt,
            )
        )

    # -- episodes

    def _begin_episode(self, episode_id: str | None = None) -> None:
        unique = uuid.uuid4().hex[:12]
        with self._files_lock:  # the end of a child may be written down at this moment: to one episode or the other
            self.episode_id = episode_id or unique
            # Not under an id that was given: it may be no file name, and may be given again.
            self._folder = RunFolder(runs_root(self.settings["run_dir"]), unique, self.settings["keep_runs"])
            self._started_at, self._ended = time.time(), False
            self._reports = []
            self._root_runs = {}
            self._spent, self._spent_by_model, self._models = Usage(), {}, None
            self.finalization.reset()
            self.supervisor.begin_episode(self.episode_id)
        self._apply_settings()
        self.inject()

    def inject(self) -> None:
        """Put the helpers and a fresh ``answer`` into the namespace; ``context`` is set to an empty text if it is new."""
        self.namespace.update(self.functions)
        self.namespace["answer"] = self.finalization.answer_dict
        self.namespace["context"] = ""

    def _prepare_folder(self) -> None:
        """Make the episode's folder before its first run. Not called under anybody's lock."""
        if not self._folder.exists and self._folder.path() is not None:
            self._apply_settings()
            self.write_run_file()

    @property
    def run_folder(self) -> Path | None:
        """The episode's folder, None while there is none."""
        return self._folder.path() if self._folder.exists else None

    @property
    def runs_root(self) -> Path:
        """The folder that holds what is kept of all episodes."""
        return self._folder.root

    def new_root_run(self) -> tuple[str, str]:
        """Begin a run of the loop in the root's namespace: return its id, and where it writes its trajectory."""
        self._prepare_folder()
        run_id = f"{ROOT_RUN}-{uuid.uuid4().hex[:6]}"
        self.note_root_run(run_id)
        return run_id, self._folder.run_paths(run_id)[1]

    def note_root_run(self, run_id: str, children: Sequence[str] = ()) -> None:
        """Write down that a run of the root's has begun, or which children it has started."""
        self._root_runs[run_id] = list(children)
        self.write_run_file()

    # -- children that end

    def _on_change(self, status: ChildStatus) -> None:
        """Write down the end of a child. On the observer thread."""
        if not status.done:
            return
        self._write_end(status)
        all_done = all(each.done for each in self.supervisor.status())
        if all_done or time.monotonic() - self._run_file_written >= _RUN_FILE_EVERY_S:
            self.write_run_file()

    def _write_end(self, status: ChildStatus) -> None:
        """Complete the trajectory of a child that did not do so itself."""
        if not status.trajectory_path or not (status.exited or status.pid is None):
            return
        write_missing_end(
            status.trajectory_path,
            metadata=RunMetadata(
                root_model=status.model,
                run_id=status.id,
                parent_id=status.parent_id,
                depth=status.depth,
                episode_id=self.episode_id,
                task=status.prompt_preview,
            ),
            stop_reason=str(status.state),
            iterations=status.iterations,
            usage=status.usage,
            error=status.error,
            secrets=secret_values(os.environ),
        )

    @property
    def usage(self) -> Usage:
        """Model calls and tokens of the whole episode, children included."""
        own = Usage() if self._models is None else self._models.usage
        return self._spent + own + self.supervisor.usage()

    @property
    def root_usage_by_model(self) -> dict[str, Usage]:
        """Model calls of the root's own (``llm_query`` in cells, turns of ``%%rlm``), by the names of the models."""
        found = dict(self._spent_by_model)
        for name, used in ({} if self._models is None else self._models.usage_by_model).items():
            count_by_model(found, name, used)
        return found

    # -- listeners

    @contextlib.contextmanager
    def listening(self, listener: Callable[[ChildStatus], None]) -> Any:
        """Have ``listener`` called, on the observer thread, with each child's changes for the length of the block."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def _tell_listeners(self, status: ChildStatus) -> None:
        for listener in list(self._listeners):
            try:
                listener(status)
            except Exception:
                _log.warning("an observer raised for %s %s", status.id, status.state, exc_info=True)

    # -- verbs

    def finalize(self, *, begun: bool = False) -> CleanupReport:
        """Stop the children because the episode has its answer."""
        return self._run_verb("finalize", begun=begun)

    def close(self, *, begun: bool = False) -> CleanupReport:
        """Stop the children; variables, results and handles stay usable, and new children may be started afterwards."""
        return self._run_verb("close", begun=begun)

    def cleanup(self) -> CleanupReport:
        """Try again to confirm what an earlier verb could not."""
        return self._run_verb("cleanup")

    def reset(self, *, begun: bool = False, episode_id: str | None = None) -> CleanupReport:
        """Stop the children and begin a new episode: handles become stale, ``context`` and ``answer`` are new.

        If the cleanup fails, the episode goes on and the failure blocks the session.

        Args:
            begun: whether `Lifecycle.begin` was called for this verb.
            episode_id: the id of the new episode, None for a fresh one.
        """

        def begin_anew(_report: CleanupReport) -> None:
            self._ended = True
            self.write_run_file()
            self._release_contexts()
            self._begin_episode(episode_id)

        return self._run_verb("reset", begin_anew, begun=begun)

    def _release_contexts(self) -> None:
        """Release what was shared. No child is left that could need it."""
        for shared in list(self._shared):
            shared.close()
        self._shared.clear()
        self.held.release()

    def shutdown(self, verb: str = "shutdown", *, begun: bool = False) -> CleanupReport:
        """Stop the children and end for good: nursery and threads, too."""
        if os.getpid() != self._pid:
            return CleanupReport(verb)
        self._ended = True
        report = self._run_verb(verb, begun=begun, for_good=True)
        if report.ok:
            self._release_contexts()
            if not self.supervisor.close():
                _log.error("%s: the nursery did not end in time", verb)
        # With survivors the nursery stays: it goes on killing, and ends by itself when this process is gone.
        return report

    def _run_verb(
        self,
        verb: str,
        then: Callable[[CleanupReport], None] | None = None,
        *,
        begun: bool = False,
        for_good: bool = False,
    ) -> CleanupReport:
        def finish(report: CleanupReport) -> None:
            self._note(report)
            if then is not None:
                then(report)

        report = self.lifecycle.run(verb, finish, begun=begun, for_good=for_good)
        if not report.ok:
            self._note(report)
        return report

    def _note(self, report: CleanupReport) -> None:
        self._reports.append(report)
        self.write_run_file()

    @property
    def cleanup_failure(self) -> ChildCleanupError | None:
        """The error that blocks the session until a later attempt confirms."""
        return self.lifecycle.failure

    def check_may_run(self) -> None:
        """Raise if a failed cleanup blocks the session.

        Raises:
            ChildCleanupError: names the processes and what to type.
        """
        if os.getpid() != self._pid:
            raise ForkedProcessError("this process was forked by user code; the RLM helpers do not work in it")
        failure = self.lifecycle.failure
        if failure is not None:
            # A fresh one: raising the same error again and again would let its traceback grow.
            raise ChildCleanupError(str(failure), failure.survivors, failure.report)

    @property
    def final_answer(self) -> FinalAnswer | None:
        return self.finalization.final

    # -- on disk

    def write_run_file(self) -> None:
        """Bring ``run.json`` up to date, if the episode has a folder."""
        with self._files_lock:  # so that an older state does not replace a newer one
            self._run_file_written = time.monotonic()
            self._folder.write(self._run_content())

    def _run_content(self) -> dict[str, Any]:
        final = self.finalization.final
        children = self.supervisor.status() if os.getpid() == self._pid else []
        return {
            "episode_id": self.episode_id,
            "pid": self._pid,
            "host": platform.node(),
            "version": __version__,
            "started_at": self._started_at,
            "ended": self._ended,
            "model": self.model_name,
            "final_answer": None if final is None else final.text,
            "usage": _usage_dict(self.usage),
            "verbs": [{"verb": r.verb, "summary": r.summary(), "survivors": r.survivors} for r in self._reports],
            "children": [
                {
                    "id": s.id,
                    "name": s.name,
                    "parent_id": s.parent_id,
                    "depth": s.depth,
                    "model": s.model,
                    "started_at": s.started_at,
                    "state": str(s.state),
                    "exited": s.exited,
                    "exit_code": s.exit_code,
                    "elapsed_s": s.elapsed_s,
                    "iterations": s.iterations,
                    "prompt": s.prompt_preview,
                    "error": s.error,
                    "usage": _usage_dict(s.usage),
                    "trajectory": os.path.basename(s.trajectory_path or ""),
                }
                for s in children
            ],
            "root_runs": [{"id": run_id, "children": ids} for run_id, ids in self._root_runs.items()],
        }


def _client_variables() -> dict[str, str]:
    """Return the environment variables that a model client may have been built from."""
    return {n: v for n, v in os.environ.items() if looks_secret(n) or n.endswith(("_BASE_URL", "_HOST"))}


def _usage_dict(usage: Usage) -> dict[str, int]:
    return {
        "calls": usage.calls,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    }
