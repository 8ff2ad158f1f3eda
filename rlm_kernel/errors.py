"""Every exception that rlm-kernel raises on purpose.

The tree is ordered by whose fault it is, so that a caller can catch at the level that matters::

    RLMError
    ├── UsageMistake                 the caller's misuse
    │   ├── ConfigurationError       a setting has an illegal value (also a ValueError)
    │   ├── ModelNotConfigured       no model is configured at all
    │   ├── ManagedModeRequired      background children need a client factory
    │   ├── HandleError
    │   │   ├── UnknownHandleError   no child of that id ever existed for this caller (also a LookupError)
    │   │   └── StaleHandleError     the child belongs to an episode that a reset has ended
    │   ├── WaitTimedOut             the time was up before what was waited for (also a TimeoutError)
    │   ├── ResultNotReady           the child has not ended yet
    │   ├── EpisodeFinalized         the episode has its answer; no new children until a reset
    │   ├── ForkedProcessError       a helper was called in a process that user code forked
    │   └── PayloadError             something that must travel to a child cannot be pickled
    ├── LimitReached
    │   └── ChildLimitError          a configured limit was reached (``.limit``, ``.value``)
    ├── PeerFailed                   somebody else broke
    │   ├── ModelCallError           a model call failed after the client's own retries
    │   ├── ChildFailedError         a child ended without an answer (``.status``)
    │   ├── NurseryError             the fork server could not be started or died
    │   └── KernelDied               the kernel that an environment drives has died, or had to be killed
    └── LifecycleError
        ├── EpisodeClosing           a stop is under way; nothing new is admitted
        └── ChildCleanupError        processes could not be confirmed gone (``.survivors``)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlm_kernel.values import ChildStatus, CleanupReport


class RLMError(Exception):
    """Base of every error that rlm-kernel raises on purpose."""


class UsageMistake(RLMError):
    """The caller asked for something that cannot be; the message says what to do instead."""


class ConfigurationError(UsageMistake, ValueError):
    """A setting has an illegal value.

    Args:
        field: name of the setting, as the user typed it.
        value: the value that was refused.
        reason: what a legal value looks like.
    """

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(f"{field}={value!r}: {reason}")
        self.field = field
        self.value = value
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.field, self.value, self.reason))


_CONFIGURE = (
    "Configure one first: type `%rlm model openai/gpt-5-mini` (or `%rlm model demo` to try things out offline), "
    "or set RLM_MODEL before the kernel starts."
)


class ModelNotConfigured(UsageMistake):
    """``llm_query``/``rlm_query`` was called although no model is configured."""

    def __init__(self, message: str = f"No model is configured. {_CONFIGURE}") -> None:
        super().__init__(message)


class ManagedModeRequired(UsageMistake):
    """``blocking=False`` was asked for, but no client factory is configured."""

    def __init__(
        self,
        message: str = (
            "blocking=False starts a managed child process, which must be able to build its own model client. "
            f"{_CONFIGURE} Any callable works too: `%rlm config client_factory=package.module:make_client`."
        ),
    ) -> None:
        super().__init__(message)


class HandleError(UsageMistake):
    """A handle or id does not name a child that this caller may reach."""


class UnknownHandleError(HandleError, LookupError):
    """No child of that id exists for this caller; the message lists the ids that do."""


class StaleHandleError(HandleError):
    """The handle belongs to an episode that a reset has ended."""


class ResultNotReady(UsageMistake):
    """The child has not ended yet, so there is no result to give."""


class WaitTimedOut(UsageMistake, TimeoutError):
    """The time given to ``rlm_as_completed`` was up before all children had ended. They run on."""


class EpisodeFinalized(UsageMistake):
    """The episode has its final answer: no new children until a reset."""


class ForkedProcessError(UsageMistake):
    """A helper was called in a process that user code forked from the kernel or a child."""


class PayloadError(UsageMistake):
    """Something that must travel to a child process cannot be pickled."""


class LimitReached(RLMError):
    """A configured limit was reached."""


class ChildLimitError(LimitReached):
    """A limit on children was reached.

    Args:
        limit: name of the limit, a field of `ManagedChildConfig`.
        value: the configured value of that limit.
        message: overrides the default text.
    """

    def __init__(self, limit: str, value: object, message: str | None = None) -> None:
        super().__init__(message or f"{limit} exceeded (limit: {value!r})")
        self.limit = limit
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.limit, self.value, str(self)))


class PeerFailed(RLMError):
    """Somebody else broke: a model server, a child, the nursery."""


class ModelCallError(PeerFailed):
    """A model call failed after the client's own retries."""


class ChildFailedError(PeerFailed):
    """A child ended without an answer.

    Args:
        message: what happened, readable.
        status: the child's last status, if known.
    """

    def __init__(self, message: str, status: ChildStatus | None = None) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (str(self), self.status))


class NurseryError(PeerFailed):
    """The nursery (fork server) could not be started, or died."""


class KernelDied(PeerFailed):
    """The kernel that an environment drives has died, or had to be killed. The environment's next reset starts another."""


class LifecycleError(RLMError):
    """The episode's lifecycle does not allow this now."""


class EpisodeClosing(LifecycleError):
    """A stop is under way: nothing new is admitted until it has been confirmed."""


class ChildCleanupError(LifecycleError):
    """Processes could not be confirmed gone in time.

    Args:
        message: which, and what to do next.
        survivors: pids that have not been confirmed as exited.
        report: the whole cleanup report.
    """

    def __init__(self, message: str, survivors: tuple[int, ...] = (), report: CleanupReport | None = None) -> None:
        super().__init__(message)
        self.survivors = tuple(survivors)
        self.report = report

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (str(self), self.survivors, self.report))
