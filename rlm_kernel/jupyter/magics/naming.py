"""Which child a person means: by its id, or by a name that only one child has."""

from __future__ import annotations

from collections.abc import Sequence

from IPython.core.error import UsageError

from rlm_kernel.errors import UnknownHandleError
from rlm_kernel.jupyter.magics.commands import did_you_mean
from rlm_kernel.session.handles import ChildHandle
from rlm_kernel.session.session import RLMSession
from rlm_kernel.values import ChildStatus

_LISTED = 20
"""Children that a message names at most."""


def find_children(session: RLMSession, words: Sequence[str]) -> list[ChildStatus]:
    """Return the children that words name, each once, in that order.

    Raises:
        UsageError: there is no such child, or a name is that of several.
        StaleHandleError: it belongs to an episode that a reset has ended.
    """
    statuses = session.supervisor.status()
    return list({child.id: child for child in (_find(session, word, statuses) for word in words)}.values())


def find_child(session: RLMSession, word: str) -> ChildStatus:
    """Return the child that a word names; see `find_children`."""
    return find_children(session, [word])[0]


def id_for_name(session: RLMSession, word: str) -> str | None:
    """Return the id of the child that is called like this, None if none is.

    Raises:
        UsageError: several are.
    """
    return _named(word, session.supervisor.status())


def _find(session: RLMSession, word: str, statuses: Sequence[ChildStatus]) -> ChildStatus:
    wanted = word if any(status.id == word for status in statuses) else _named(word, statuses)
    if wanted is not None:
        return next(status for status in statuses if status.id == wanted)
    try:
        return session.supervisor.status([(word, None)])[
            0
        ]  # it may just have been started, or be of an earlier episode
    except UnknownHandleError:
        raise UsageError(_unknown(session, word, statuses)) from None


def _named(name: str, statuses: Sequence[ChildStatus]) -> str | None:
    ids = [status.id for status in statuses if status.name == name]
    if len(ids) > 1:
        raise UsageError(f"{len(ids)} children are called {name!r}; say which by its id: {_listed(ids)}")
    return ids[0] if ids else None


def _unknown(session: RLMSession, word: str, statuses: Sequence[ChildStatus]) -> str:
    variable = session.namespace.get(word)
    if isinstance(variable, ChildHandle):
        return f"{word!r} is a variable; its child is {variable.id}: type that, or {{{word}.id}}"
    if not statuses:
        return f"no child {word!r} here: none has been started in this episode (rlm_query(prompt, blocking=False) does)"
    names = [status.name for status in statuses if status.name != status.id]
    return f"no child {word!r} here{did_you_mean(word, names)}. Children that exist: {list_children(statuses)}"


def list_children(statuses: Sequence[ChildStatus]) -> str:
    """Return ids, with names where they have some."""
    return _listed([s.id if s.name == s.id else f"{s.id} ({s.name})" for s in statuses])


def _listed(words: Sequence[str]) -> str:
    more = f" (and {len(words) - _LISTED} earlier ones)" if len(words) > _LISTED else ""
    return f"{', '.join(words[-_LISTED:]) or 'none'}{more}"
