"""A client that plays a script: for tests, and for notebooks that must give the same output each time."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from rlm_kernel.clients.base import ModelClient, as_client
from rlm_kernel.errors import ConfigurationError, ModelCallError
from rlm_kernel.values import Completion, Message, Usage

Reply: TypeAlias = "str | Completion | BaseException | type[BaseException] | Callable[..., str | Completion]"
"""One reply: a text, something to raise, or a function of the messages (and, if it wants to, the model's name)."""

Replies: TypeAlias = "Reply | Sequence[Reply]"
"""A sequence is given in turn; a single reply is given every time."""


_ONE_CALL = Usage(calls=1)


class ScriptedClient(ModelClient):
    """Gives prepared replies. May be used from several threads; each call takes the next reply.

    Args:
        replies: a sequence, given in turn; or one reply, given every time.
        rules: regular expression → reply or sequence of replies, searched in the last user message. The first that
            matches decides; if none does, ``replies`` are used.
        delay_s: seconds that each call takes.
        usage: what each call counts as (unless a reply is a `Completion`, which has its own).
        loop: begin again when a sequence is used up.

    Attributes:
        calls: ``(messages, model)`` of each call so far, in order.

    Raises:
        ConfigurationError: something among the replies or rules is none.
    """

    def __init__(
        self,
        replies: Replies = (),
        *,
        rules: Mapping[str, Replies] | None = None,
        delay_s: float = 0.0,
        usage: Usage = _ONE_CALL,
        loop: bool = False,
    ) -> None:
        self._script = _Script("replies", replies, loop)
        self._rules = [
            (_compiled(pattern), _Script(f"replies for the rule {pattern!r}", rule, loop))
            for pattern, rule in (rules or {}).items()
        ]
        if not delay_s >= 0:
            raise ConfigurationError("delay_s", delay_s, "must be at least 0 seconds")
        self._delay_s = delay_s
        self._usage = usage
        self._lock = threading.Lock()
        self.calls: list[tuple[list[Message], str | None]] = []

    def complete(self, messages: list[Message], model: str | None = None) -> Completion:
        with self._lock:
            self.calls.append(([dict(message) for message in messages], model))  # the caller goes on with its list
            reply = self._choose(messages)
        if self._delay_s:
            time.sleep(self._delay_s)
        if isinstance(reply, BaseException) or (isinstance(reply, type) and issubclass(reply, BaseException)):
            raise reply
        if isinstance(reply, Completion):
            return reply
        if isinstance(reply, str):
            return Completion(reply, self._usage)
        given = as_client(reply, field="replies").complete(messages, model)
        return given if given.usage != _ONE_CALL else Completion(given.text, self._usage)

    def _choose(self, messages: Sequence[Message]) -> Reply:
        prompt = next((m["content"] for m in reversed(messages) if m.get("role") == "user"), "")
        script = next((script for pattern, script in self._rules if pattern.search(prompt)), self._script)
        if self._rules and script is self._script and not script:
            raise ModelCallError(f"no rule of the scripted client matches {prompt[:200]!r}")
        return script.take()

    @staticmethod
    def factory(replies: Replies = (), **options: Any) -> ScriptedFactory:
        """Return a client factory that gives a fresh client, with its script at the start, on each call.

        Args:
            replies, options: as for the class. What is in them must be picklable if children are to use it.
        """
        return ScriptedFactory(replies, options)


@dataclass(frozen=True)
class ScriptedFactory:
    """A client factory for `ScriptedClient`; see `ScriptedClient.factory`."""

    uses_openai: ClassVar[bool] = False

    replies: Replies = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self()  # a mistake in the script shows here, not in a child

    def __call__(self) -> ScriptedClient:
        return ScriptedClient(self.replies, **self.options)


class _Script:
    """Replies in turn. Not locked; its owner does that."""

    def __init__(self, what: str, replies: Replies, loop: bool) -> None:
        self._what = what
        single = isinstance(replies, str) or not isinstance(replies, Sequence)
        self._replies: tuple[Reply, ...] = (replies,) if single else tuple(replies)  # type: ignore[arg-type,assignment]
        self._loop = loop or single
        self._taken = 0
        for reply in self._replies:
            if not (isinstance(reply, str | Completion | BaseException) or callable(reply)):
                expected = "must be str, Completion, an exception, or a function of the messages"
                raise ConfigurationError("replies", reply, expected)

    def __bool__(self) -> bool:
        return bool(self._replies)

    def take(self) -> Reply:
        count = len(self._replies)
        if count == 0 or (self._taken >= count and not self._loop):
            raise ModelCallError(f"the scripted client has used up its {count} {self._what}")
        reply = self._replies[self._taken % count]
        self._taken += 1
        return reply


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as exc:
        raise ConfigurationError("rules", pattern, f"is no regular expression ({exc})") from exc
