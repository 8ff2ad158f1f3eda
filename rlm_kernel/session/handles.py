"""What ``rlm_query(..., blocking=False)`` returns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import Any

from rlm_kernel.children.core import Ref
from rlm_kernel.errors import ChildFailedError, ResultNotReady, RLMError, UsageMistake
from rlm_kernel.session.ports import ChildrenPort
from rlm_kernel.session.structured import AnswerForm
from rlm_kernel.values import ChildState, ChildStatus


class ChildHandle:
    """A child that was started in the background. Valid within its episode only.

    ``await handle`` gives the answer at the top level of a cell: the text, or the object where a schema was given. Handles
    are hashable, and equal if they name the same child.

    Attributes:
        id: short, readable, unique in the kernel process.
        name: the name it was given, else its id.
        depth: 1 for a child of the notebook, 2 for its children, …
        episode_id: the episode it belongs to.
    """

    __slots__ = ("_form", "_port", "depth", "episode_id", "id", "name")

    def __init__(
        self, port: ChildrenPort, status: ChildStatus, episode_id: str, form: AnswerForm | None = None
    ) -> None:
        self._port = port
        self._form = form
        self.id = status.id
        self.name = status.name
        self.depth = status.depth
        self.episode_id = episode_id

    @property
    def ref(self) -> Ref:
        """The id together with the episode's: what names the child even after a reset."""
        return (self.id, self.episode_id)

    def status(self) -> ChildStatus:
        """Return a snapshot; never blocks."""
        return self._port.status([self.ref])[0]

    def wait(self, timeout_s: float | None = None) -> ChildStatus:
        """Wait until the child has ended, or ``timeout_s`` seconds have passed. A timeout does not touch the child."""
        return self._port.wait([self.ref], check_timeout(timeout_s), False)[0]

    def result(self) -> Any:
        """Return the answer: its text, or the object that it builds where a schema was given.

        Raises:
            ResultNotReady: the child has not ended yet.
            ChildFailedError: it ended without an answer.
        """
        return answer_of(self.status(), self._form)

    def cancel(self, *, grace_s: float | None = None) -> ChildStatus:
        """Stop the child and its descendants; returns when their exits are confirmed.

        Args:
            grace_s: seconds for the cooperative request, None for the configured grace.

        Raises:
            ChildCleanupError: an exit could not be confirmed in time.
        """
        return self._port.cancel(self.ref, check_timeout(grace_s, "grace_s"))

    def send(self, message: str) -> None:
        """Send the child's model a message, which it sees before its next call. The status counts what was seen.

        Raises:
            UsageMistake: the child has ended.
        """
        self._port.send(self.ref, check_message(message))

    def __await__(self) -> Generator[Any, None, Any]:
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def settle() -> None:
            if not done.done():
                done.set_result(None)

        def from_any_thread() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle)

        withdraw = self._port.call_when_done(self.ref, from_any_thread)
        if withdraw is not None:
            try:
                with self._port.watching([self.ref]):
                    yield from done.__await__()
            finally:
                withdraw()
        return self.result()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChildHandle) and other.ref == self.ref

    def __hash__(self) -> int:
        return hash(self.ref)

    def __repr__(self) -> str:
        try:
            state = str(self.status().state)
        except RLMError as error:
            state = type(error).__name__
        named = "" if self.name == self.id else f" {self.name!r}"
        return f"<ChildHandle {self.id}{named} {state}>"


def check_message(message: object) -> str:
    """Check a message for a child.

    Raises:
        UsageMistake: it is no text, or empty.
    """
    if not isinstance(message, str) or not message.strip():
        raise UsageMistake(f"message must be a non-empty string, got {type(message).__name__}: {message!r}")
    return message.encode("utf-8", "backslashreplace").decode()


def check_timeout(timeout_s: object, name: str = "timeout_s") -> float | None:
    """Check an argument in seconds.

    Raises:
        UsageMistake: it is no number of seconds.
    """
    if timeout_s is None:
        return None
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s != timeout_s or timeout_s < 0:
        raise UsageMistake(f"{name}={timeout_s!r}: must be a number of seconds (0 or more), or None")
    return None if timeout_s == float("inf") else float(timeout_s)


def result_of(status: ChildStatus) -> str:
    """Return the answer of a child that has ended.

    Raises:
        ResultNotReady: it has not ended.
        ChildFailedError: it ended without an answer that counts.
    """
    if status.state is ChildState.COMPLETED:
        return status.result or ""
    if not status.done:
        raise ResultNotReady(f"{status.id} is {status.state}; wait for it with rlm_wait({status.id!r})")
    late = " (an answer that came too late is in its status)" if status.result is not None else ""
    why = f": {status.error}" if status.error else ""
    raise ChildFailedError(f"{status.id} {status.state}{why}{late}", status)


def answer_of(status: ChildStatus, form: AnswerForm | None) -> Any:
    """Return the answer of a child that has ended: its text, or the object that it builds.

    Raises:
        ResultNotReady, ChildFailedError: as `result_of`; also if the text does not build the object.
    """
    text = result_of(status)
    return text if form is None else form.object_of(text, status)
