"""Large texts and bytes that the nursery holds, so that every later child inherits them instead of getting a copy.

Who runs it: any thread of the root process that starts children. The same object (not an equal one) is handed over once; a strong reference
keeps its identity meaningful. The total is bounded: what does not fit any more travels by file, a copy for each child. Everything is
released at a reset, when no child is left that could still need it.
"""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass

from rlm_kernel.children.supervisor import Supervisor
from rlm_kernel.session.contexts import BYTES, TEXT, EncodedContext
from rlm_kernel.wire.anonymous import anonymous_file

HOLD_FROM = 256 << 10
"""Characters or bytes from which a text is held: below that, a copy costs less than keeping track."""

HOLD_TOTAL_BYTES = 4 << 30
"""Bytes that are held in all, at most. The nursery and an anonymous file hold each of them once."""


@dataclass(frozen=True, slots=True)
class _Held:
    obj: str | bytes
    encoded: EncodedContext
    size_bytes: int


class HeldContexts:
    """What the nursery of one session holds."""

    def __init__(self, supervisor: Supervisor, total_bytes: int = HOLD_TOTAL_BYTES) -> None:
        self._supervisor = supervisor
        self._limit = total_bytes
        self._held: dict[int, _Held] = {}
        self._lock = threading.Lock()

    @property
    def total_bytes(self) -> int:
        """Bytes that are held now."""
        with self._lock:
            return sum(held.size_bytes for held in self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def reference(self, obj: object) -> EncodedContext | None:
        """Return a reference to an object that is held, handing it over first if need be; None if it is not to be held.

        Raises:
            NurseryError: there is no supervisor thread to be had.
        """
        if type(obj) not in (str, bytes) or len(obj) < HOLD_FROM:  # type: ignore[arg-type]
            return None
        assert isinstance(obj, str | bytes)
        with self._lock:
            known = self._held.get(id(obj))
            if known is not None:
                return known.encoded
            data = obj.encode("utf-8", "surrogatepass") if isinstance(obj, str) else obj
            if sum(held.size_bytes for held in self._held.values()) + len(data) > self._limit:
                return None
            key = uuid.uuid4().hex
            kind = TEXT if isinstance(obj, str) else BYTES
            self._supervisor.hold(key, anonymous_file([data]), text=kind == TEXT)
            held = self._held[id(obj)] = _Held(obj, EncodedContext(kind, held=key), len(data))
            return held.encoded

    def release(self) -> None:
        """Release everything. No child that was admitted may still have to be started."""
        with self._lock:
            if self._held:
                self._held.clear()
                self._supervisor.release_held()
