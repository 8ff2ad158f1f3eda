"""What a harness is told about an episode: one JSON object, taken from a session at any time.

Who runs it: any thread of the root process; in the kernel it is called after each cell, before the ``execute_reply``.
It owns nothing, waits for nothing and runs none of the user's code: no ``repr``, ``str``, ``len`` or attribute of an
object that is not exactly one of Python's own types. So no object, however odd or large, can delay or break a reply. A
part that fails for a reason of its own is null, and logged.

The schema (``schema`` counts up when a key changes its meaning; new keys may come at any time)::

    schema          1
    episode_id      text
    done            whether the episode has its final answer
    final_answer    the answer as text, cut at `FINAL_LIMIT` characters; null while there is none
    final_answer_length, final_answer_type     of the whole text; the name of the value's type; null while there is none
    final_value     the answer itself. Only there if it is made of JSON's own types, and small
    partial_answer  ``answer["content"]`` as text, if it is non-empty and one of JSON's own types; else null
    context         {type, length, preview}: length is null for what is not one of Python's own containers
    variables       {name: name of its type}: the user's own, the newest `VARIABLES` of them
    variables_total how many there are
    children        {total, live, counts: {state: number}, shown: [...]}; shown are the live and then the latest, at most
                    `CHILDREN`, in start order: {id, name, state, done, exited, depth, parent_id, elapsed_s, error}
    usage           {calls, prompt_tokens, completion_tokens}, children included
    cleanup_failure {message, survivors: [pids]} while an unconfirmed exit blocks the session; else null

With every bound reached it takes about 1.3 million characters, without a long answer less than 60,000.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlm_kernel.environment.interpreter import short_repr
from rlm_kernel.values import ChildStatus, FinalAnswer

if TYPE_CHECKING:
    from rlm_kernel.session.session import RLMSession

_log = logging.getLogger(__name__)

SCHEMA = 1
FINAL_LIMIT = 1_000_000
"""Characters of the final answer that are shown."""

PARTIAL_LIMIT = 20_000
PREVIEW_LIMIT = 500
TEXT_LIMIT = 300
"""Characters of a name or an error."""

VARIABLES = 200
CHILDREN = 50
SURVIVORS = 100

_VALUE_PARTS = 1000
"""Numbers, texts and containers that a final value may consist of, to be shown as a value."""

_VALUE_CHARACTERS = 100_000
_WHOLE_LIMIT = 2**63
"""Whole numbers from here on are beyond what every reader of JSON can read."""

_CONTAINERS: tuple[type, ...] = (str, bytes, bytearray, list, tuple, dict, set, frozenset, range)
_NAME_OF_TYPE = type.__dict__["__name__"]
_MRO_OF_TYPE = type.__dict__["__mro__"]
_BRACKETS: dict[type, tuple[str, str]] = {list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}"), set: ("{", "}")}
_PREVIEW_ITEMS = 30


def observe(session: RLMSession) -> dict[str, Any]:
    """Describe the episode, as the module's docstring has it. Never raises, never waits."""
    final = session.finalization.final
    return {
        "schema": SCHEMA,
        "episode_id": session.episode_id,
        "done": final is not None,
        **(_part(lambda: _final(final)) or _NO_ANSWER),
        "partial_answer": _part(lambda: _partial(session)),
        "context": _part(lambda: _context(session.namespace.get("context"))),
        **(_part(lambda: _variables(session)) or {"variables": {}, "variables_total": None}),
        "children": _part(lambda: _children(session.supervisor.status())),
        "usage": _part(lambda: _usage(session)),
        "cleanup_failure": _part(lambda: _cleanup_failure(session)),
    }


class Observation(dict[str, Any]):
    """An observation that shows as ``application/json``, so that ``user_expressions`` carry it as such."""

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        return {"application/json": dict(self), "text/plain": dict.__repr__(self)}


class Observer:
    """What the name ``__rlm__`` is bound to: for harnesses that ask through ``user_expressions``.

    Args:
        session: whose episodes are observed.
    """

    def __init__(self, session: RLMSession) -> None:
        self._session = session

    def observation(self) -> Observation:
        """Return the state of the episode; see `rlm_kernel.session.observation`."""
        return Observation(observe(self._session))

    def snapshot(self, names: list[str]) -> Observation:
        """Return the reprs of some of the user's variables, cut at 500 characters each. This runs code of the user's."""
        variables = self._session.finalization.variables()
        return Observation({name: _encodable(short_repr(variables[name])) for name in names if name in variables})

    def __repr__(self) -> str:
        return f"<RLM episode {self._session.episode_id}; its state: __rlm__.observation()>"


def _part(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception:
        _log.exception("a part of the observation could not be made")
        return None


_NO_ANSWER: dict[str, Any] = {"final_answer": None, "final_answer_length": None, "final_answer_type": None}


def _final(final: FinalAnswer | None) -> dict[str, Any]:
    if final is None:
        return dict(_NO_ANSWER)
    shown: dict[str, Any] = {
        "final_answer": _cut(final.text, FINAL_LIMIT),
        "final_answer_length": len(final.text),
        "final_answer_type": type_name(final.value),
    }
    try:
        shown["final_value"] = _plain(final.value, _Budget())
    except _NotPlain:
        pass
    return shown


def _partial(session: RLMSession) -> str | None:
    content = session.finalization.answer_dict.get("content")
    if content is None:
        return None
    if type(content) is str:
        return _cut(content, PARTIAL_LIMIT) or None
    try:
        return _cut(str(_plain(content, _Budget())), PARTIAL_LIMIT)
    except _NotPlain:
        return None


def _context(value: object) -> dict[str, Any]:
    return {"type": type_name(value), "length": plain_length(value), "preview": plain_preview(value)}


def _variables(session: RLMSession) -> dict[str, Any]:
    variables = session.finalization.variables()
    newest = list(variables.items())[-VARIABLES:]
    return {
        "variables": {_cut(name, TEXT_LIMIT): type_name(value) for name, value in newest},
        "variables_total": len(variables),
    }


def _children(statuses: list[ChildStatus]) -> dict[str, Any]:
    live = [status for status in statuses if not status.done]
    ended = [status for status in statuses if status.done]
    room = max(0, CHILDREN - len(live))
    shown = {status.id for status in (*live[-CHILDREN:], *(ended[-room:] if room else ()))}
    return {
        "total": len(statuses),
        "live": len(live),
        "counts": dict(Counter(str(status.state) for status in statuses)),
        "shown": [_child(status) for status in statuses if status.id in shown],
    }


def _child(status: ChildStatus) -> dict[str, Any]:
    return {
        "id": status.id,
        "name": _cut(status.name, TEXT_LIMIT),
        "state": str(status.state),
        "done": status.done,
        "exited": status.exited,
        "depth": status.depth,
        "parent_id": status.parent_id,
        "elapsed_s": round(status.elapsed_s, 3),
        "error": None if status.error is None else _cut(status.error, TEXT_LIMIT),
    }


def _usage(session: RLMSession) -> dict[str, int]:
    usage = session.usage
    return {
        "calls": usage.calls,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    }


def _cleanup_failure(session: RLMSession) -> dict[str, Any] | None:
    failure = session.cleanup_failure
    if failure is None:
        return None
    return {"message": _cut(str(failure), 10 * TEXT_LIMIT), "survivors": list(failure.survivors[:SURVIVORS])}


# -- values, without running code of the user's


def type_name(value: object) -> str:
    """Return the name of a value's type, also where a metaclass has other ideas about names."""
    name: str = _NAME_OF_TYPE.__get__(type(value))
    return _cut(name, TEXT_LIMIT)


def plain_length(value: object) -> int | None:
    """Return the length of one of Python's own containers, or of what derives from one; None for anything else."""
    kind: Any = next((kind for kind in _CONTAINERS if kind in _bases(value)), None)
    return None if kind is None else int(kind.__len__(value))  # the base's own: a subclass may have another idea


def plain_preview(value: Any) -> str:
    """Return the first `PREVIEW_LIMIT` characters of a text, or of the repr of what is made of Python's own types."""
    if str in _bases(value):
        return _cut(str.__getitem__(value, slice(PREVIEW_LIMIT)), PREVIEW_LIMIT)
    parts: list[str] = []
    _write_preview(value, parts, _Budget(60, PREVIEW_LIMIT))
    return _cut("".join(parts), PREVIEW_LIMIT)


def _bases(value: object) -> tuple[type, ...]:
    """Return the types that a value's type derives from. (``isinstance`` would ask the value for its ``__class__``.)"""
    bases: tuple[type, ...] = _MRO_OF_TYPE.__get__(type(value))
    return bases


class _NotPlain(Exception):
    """A value is not made of JSON's own types only, or is too large."""


class _Budget:
    """What may still be spent on one value."""

    def __init__(self, parts: int = _VALUE_PARTS, characters: int = _VALUE_CHARACTERS) -> None:
        self._parts = parts
        self._characters = characters

    def spend(self, characters: int = 0) -> bool:
        """Account for one part. Returns False when more has been spent than there was."""
        self._parts -= 1
        self._characters -= characters
        return self._parts >= 0 and self._characters >= 0


def _plain(value: Any, budget: _Budget, level: int = 40) -> Any:
    """Copy a value that JSON can carry as it is.

    Raises:
        _NotPlain: it cannot.
    """
    kind = type(value)
    if level == 0 or not budget.spend(len(value) if kind in (str, list, dict) else 0):
        raise _NotPlain
    if value is None or kind is bool:
        return value
    if kind is str:
        return _encodable(value)
    if (kind is int and -_WHOLE_LIMIT <= value < _WHOLE_LIMIT) or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return [_plain(item, budget, level - 1) for item in value.copy()]
    if kind is dict:
        return {_key(key, budget): _plain(item, budget, level - 1) for key, item in value.copy().items()}
    raise _NotPlain


def _key(key: Any, budget: _Budget) -> Any:
    if type(key) is not str:
        raise _NotPlain
    return _plain(key, budget)


def _write_preview(value: Any, parts: list[str], budget: _Budget, level: int = 4) -> None:
    """Append the repr of a value, until the budget is spent."""
    kind = type(value)
    if kind not in _BRACKETS:
        parts.append(_atom(value))
        budget.spend(len(parts[-1]))
        return
    opening, closing = _BRACKETS[kind]
    parts.append(opening)
    # Only the first few are looked at: to copy a large container, or to sort it, would take its time.
    items = _first(value.items() if kind is dict else value, _PREVIEW_ITEMS) if level else []
    for i, item in enumerate(items):
        if not budget.spend(2):
            break
        parts.append(", " if i else "")
        if kind is dict:
            _write_preview(item[0], parts, budget, level - 1)
            parts.append(": ")
            item = item[1]
        _write_preview(item, parts, budget, level - 1)
    parts.append(closing if len(value) == len(items) else f", …{closing}" if items else f"…{closing}")


def _atom(value: Any) -> str:
    kind = type(value)
    if kind in (str, bytes, bytearray):
        return repr(value[:PREVIEW_LIMIT])
    if kind in (type(None), bool, float, complex) or (kind is int and -_WHOLE_LIMIT <= value < _WHOLE_LIMIT):
        return repr(value)
    return f"<{type_name(value)}>"


def _first(container: Any, count: int) -> list[Any]:
    """Return the first items; fewer of one that another thread changes meanwhile."""
    found: list[Any] = []
    try:
        for item in itertools.islice(container, count):
            found.append(item)  # what has come is kept if the iteration breaks off
    except RuntimeError:
        pass
    return found


def _cut(text: str, limit: int) -> str:
    return _encodable(text if len(text) <= limit else text[: limit - 1] + "…")


def _encodable(text: str) -> str:
    """Replace lone surrogates, which no message can carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text
