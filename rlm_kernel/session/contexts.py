"""Hand a ``context=`` object over to a child: text and bytes as they are, anything else pickled with its buffers out of
band.

The sender encodes once into plain bytes in an anonymous file; every child gets a descriptor of that file. The child
decodes: buffers (arrays, for instance) are mapped copy-on-write and cost nothing until they are written to; text is
decoded. Nothing between the two unpickles anything.
"""

from __future__ import annotations

import io
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rlm_kernel.children.worker import INHERITED
from rlm_kernel.errors import PayloadError, UsageMistake
from rlm_kernel.wire.anonymous import anonymous_file, map_private, read_anonymous
from rlm_kernel.wire.channel import close_fds

INLINE_CONTEXT = 16 << 10
"""Contexts up to this many bytes travel inside the task itself."""

_ALIGN = 64
"""Out-of-band buffers begin at multiples of this many bytes, as vector instructions like it."""

TEXT, BYTES, PICKLE = "text", "bytes", "pickle"


class EncodedContext(msgspec.Struct, frozen=True):
    """A context ready to travel.

    Attributes:
        kind: ``text``, ``bytes`` or ``pickle``.
        inline: the content, if it is small.
        in_file: whether the content is in the attached file instead.
        sizes: for a pickle in a file: length of the pickle, then of each buffer.
        held: the key under which the nursery holds it, so that the child has inherited it.
    """

    kind: str
    inline: bytes = b""
    in_file: bool = False
    sizes: tuple[int, ...] = ()
    held: str = ""


Hold = Callable[[object], EncodedContext | None]
"""Gives a reference to an object that the children inherit, None for one that they do not."""


def inherited_reference(obj: object) -> EncodedContext | None:
    """Return a reference to an object that this process has inherited from the nursery: its children will, too."""
    for key, value in INHERITED.items():
        if value is obj:
            return EncodedContext(TEXT if isinstance(value, str) else BYTES, held=key)
    return None


def encode(obj: Any, hold: Hold = inherited_reference) -> tuple[EncodedContext, tuple[int, ...]]:
    """Encode a context.

    Args:
        hold: knows what children inherit.

    Returns:
        the encoded form, and the descriptors that travel with it (owned by the caller).

    Raises:
        PayloadError: the object cannot be pickled.
    """
    if isinstance(obj, SharedContext):
        return obj.reference(hold)
    if (held := hold(obj)) is not None:
        return held, ()
    if type(obj) is str:
        return _encode_plain(TEXT, obj.encode("utf-8", "surrogatepass"))
    if type(obj) is bytes:
        return _encode_plain(BYTES, obj)
    import cloudpickle

    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    try:
        cloudpickle.CloudPickler(file, protocol=5, buffer_callback=buffers.append).dump(obj)
        raw = [buffer.raw() for buffer in buffers]  # fails if one is not contiguous
    except Exception as error:
        raise PayloadError(
            f"context= cannot be pickled ({type(obj).__name__}: {type(error).__name__}: {error}); "
            "pass text, bytes, or an object that pickle can handle"
        ) from error
    pickled = file.getvalue()
    if not buffers and len(pickled) <= INLINE_CONTEXT:
        return EncodedContext(PICKLE, inline=pickled), ()
    parts: list[bytes | memoryview] = [pickled, *raw]
    sizes = tuple(len(part) for part in parts)
    padded: list[bytes | memoryview] = []
    for part in parts:
        padded += [part, bytes(-len(part) % _ALIGN)]
    return EncodedContext(PICKLE, in_file=True, sizes=sizes), (anonymous_file(padded),)


def _encode_plain(kind: str, data: bytes) -> tuple[EncodedContext, tuple[int, ...]]:
    if len(data) <= INLINE_CONTEXT:
        return EncodedContext(kind, inline=data), ()
    return EncodedContext(kind, in_file=True), (anonymous_file([data]),)


def decode(encoded: EncodedContext, fds: Sequence[int]) -> Any:
    """Rebuild a context in the process that asked for it. Closes the descriptors."""
    if encoded.held:
        try:
            return INHERITED[encoded.held]
        except KeyError:
            raise PayloadError("the shared context was released before this child was started") from None
    try:
        if encoded.kind == PICKLE:
            return _unpickle(encoded, fds)
        data = read_anonymous(fds[0]) if encoded.in_file else encoded.inline
        return data.decode("utf-8", "surrogatepass") if encoded.kind == TEXT else data
    finally:
        close_fds(fds)


def _unpickle(encoded: EncodedContext, fds: Sequence[int]) -> Any:
    if not encoded.in_file:
        return pickle.loads(encoded.inline)
    view = map_private(fds[0])
    parts, at = [], 0
    for size in encoded.sizes:
        parts.append(view[at : at + size])
        at += size + (-size % _ALIGN)
    return pickle.loads(parts[0], buffers=parts[1:])


class SharedContext:
    """An object that was snapshotted once, to be passed to many children as ``context=``. Made by ``rlm_share``.

    Later changes of the object do not reach the snapshot. The memory is released when the last reference goes, or at a
    reset.
    """

    def __init__(self, obj: Any) -> None:
        # Text and bytes cannot change, so they need no snapshot; and the nursery can hold them for all children.
        self._plain = obj if type(obj) in (str, bytes) else None
        self._encoded, fds = encode(obj, lambda _obj: None)
        self._fd = fds[0] if fds else -1
        self._lock = threading.Lock()
        self._closed = False
        self._owner = os.getpid()
        self.type_name = type(obj).__name__
        self.size_bytes = os.fstat(self._fd).st_size if self._fd >= 0 else len(self._encoded.inline)

    def reference(self, hold: Hold = lambda _obj: None) -> tuple[EncodedContext, tuple[int, ...]]:
        """Return the encoded form with fresh descriptors, which the caller owns.

        Args:
            hold: knows what children inherit.

        Raises:
            UsageMistake: a reset has released the memory.
        """
        with self._lock:
            if self._closed:
                raise UsageMistake("this shared context was released by a reset; call rlm_share again")
            if self._plain is not None and (held := hold(self._plain)) is not None:
                return held, ()
            return self._encoded, ((os.dup(self._fd),) if self._fd >= 0 else ())

    def restore(self) -> Any:
        """Build a copy of the object from the snapshot, in this process."""
        return decode(*self.reference())

    def close(self) -> None:
        """Release the memory. May be called twice."""
        with self._lock:
            fd, self._fd, self._closed, self._plain = self._fd, -1, True, None
        if fd >= 0 and os.getpid() == self._owner:
            os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self.close()

    def __repr__(self) -> str:
        state = "released" if self._closed else f"{self.size_bytes:,} bytes"
        return f"<SharedContext of {self.type_name}, {state}>"

    def __reduce__(self) -> Any:
        raise PayloadError("a SharedContext cannot be pickled; pass it as context= instead")
