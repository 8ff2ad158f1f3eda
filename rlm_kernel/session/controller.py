"""Put together what carries out the queries of an environment or a runner: the one place where that is decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlm_kernel.clients.base import ModelClient
from rlm_kernel.closing import ClosesOnExit
from rlm_kernel.errors import ConfigurationError
from rlm_kernel.loop.prompts import RLM_SYSTEM_PROMPT
from rlm_kernel.session.backends import BackendLimits, DirectLMBackend, LocalChildRLMBackend, ManagedChildBackend
from rlm_kernel.session.queries import ChatFn
from rlm_kernel.values import ManagedChildConfig

if TYPE_CHECKING:
    from rlm_kernel.session.managed import ManagedChildren


@dataclass(frozen=True, slots=True)
class RecursiveController(ClosesOnExit):
    """The functions that an environment puts into its namespace, and the backend behind them.

    Attributes:
        llm_query_fn: ``(prompt, model=None)``.
        llm_batch_fn: ``(prompts, model=None)``.
        rlm_query_fn, rlm_batch_fn: the same for recursive calls; None where there is no recursion.
        backend: what carries them out.
        managed: the managed children, None where children are not processes.
    """

    llm_query_fn: Callable[..., str]
    llm_batch_fn: Callable[..., list[str]]
    rlm_query_fn: Callable[..., Any] | None
    rlm_batch_fn: Callable[..., Any] | None
    backend: Any
    managed: ManagedChildren | None = None

    def begin_episode(self, episode_id: str | None = None) -> None:
        """Begin an episode: what the one before has left running is stopped, and limits count anew.

        Args:
            episode_id: its id, None for a fresh one.

        Raises:
            ChildCleanupError: names the processes whose exit could not be confirmed; the episode before goes on.
        """
        if self.managed is not None:
            self.managed.begin_episode(episode_id)
        elif hasattr(self.backend, "begin_episode"):
            self.backend.begin_episode()

    def close(self) -> None:
        """Stop what runs, for good. May be called twice, and from any thread.

        Raises:
            ChildCleanupError: names the processes whose exit could not be confirmed; call it again to retry.
        """
        if hasattr(self.backend, "close"):  # one of a user's own need not have it
            self.backend.close()


def create_server_recursive_controller(
    chat_fn: ChatFn | ModelClient,
    *,
    max_depth: int,
    max_iterations: int,
    system_prompt: str = RLM_SYSTEM_PROMPT,
    max_batch_workers: int = 8,
    max_children_total: int | None = None,
    max_children_per_batch: int | None = None,
    result_truncation_limit: int | None = None,
    per_child_timeout_s: float | None = None,
    env_max_iterations_multiplier: int = 5,
    managed: ManagedChildConfig | None = None,
) -> RecursiveController:
    """Make the controller for an environment.

    Args:
        chat_fn: makes the root's model calls, and, without ``managed``, those of the whole tree.
        max_depth, max_iterations, env_max_iterations_multiplier: for children in this process.
        system_prompt: for children of either kind.
        max_batch_workers: model calls or children in this process of one batch that are under way at once.
        max_children_total, max_children_per_batch, result_truncation_limit, per_child_timeout_s: bounds on children of
            either kind; where they are not None, they take the place of what ``managed`` says.
        managed: have children be supervised processes; it says how deep they nest and how long they run.

    Returns:
        the controller; close it when it is not needed any more.

    Raises:
        ConfigurationError: names the field and the value.
        ManagedModeRequired: ``managed`` is given where no process can be forked.
    """
    limits = BackendLimits(
        max_depth=max_depth,
        max_batch_workers=max_batch_workers,
        max_children_total=max_children_total,
        max_children_per_batch=max_children_per_batch,
        result_truncation_limit=result_truncation_limit,
        per_child_timeout_s=per_child_timeout_s,
    )
    backend: DirectLMBackend | ManagedChildBackend
    if managed is not None:
        backend = ManagedChildBackend(chat_fn, managed=managed_config(managed, limits), system_prompt=system_prompt)
    elif max_depth > 1:
        backend = LocalChildRLMBackend(
            chat_fn,
            system_prompt=system_prompt,
            max_iterations=max_iterations,
            env_max_iterations_multiplier=env_max_iterations_multiplier,
            limits=limits,
        )
    else:
        backend = DirectLMBackend(chat_fn, limits=limits)
    recurs = managed is not None or max_depth > 1
    return RecursiveController(
        llm_query_fn=backend.query,
        llm_batch_fn=backend.query_batched,
        rlm_query_fn=backend.recursive_query if recurs else None,
        rlm_batch_fn=backend.recursive_query_batched if recurs else None,
        backend=backend,
        managed=backend.managed if isinstance(backend, ManagedChildBackend) else None,
    )


def managed_config(config: ManagedChildConfig, limits: BackendLimits, **callbacks: Any) -> ManagedChildConfig:
    """Return a configuration in which what was said beside it holds.

    Args:
        limits: those of its bounds that are not None take the place of the configuration's. How deep children nest is
            the configuration's business alone.
        callbacks: likewise.

    Raises:
        ConfigurationError: it is no configuration.
    """
    if not isinstance(config, ManagedChildConfig):
        raise ConfigurationError("managed", config, "must be a ManagedChildConfig(client_factory=..., ...)")
    beside = {
        "max_children_total": limits.max_children_total,
        "max_children_per_batch": limits.max_children_per_batch,
        "result_truncation_limit": limits.result_truncation_limit,
        "per_child_timeout_s": limits.per_child_timeout_s,
        **callbacks,
    }
    return replace(config, **{name: value for name, value in beside.items() if value is not None})
