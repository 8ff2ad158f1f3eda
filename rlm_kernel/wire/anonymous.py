"""Anonymous files: how bytes too large for a socket buffer travel between processes.

A memfd where the platform has them, an unlinked temporary file elsewhere. Either way nothing stays on disk and the
content lives as long as one descriptor to it does.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable

_WRITE_CHUNK = 64 << 20
"""Bytes per write call: Linux writes at most 2 GiB at once, and an interrupt should not wait for all of it."""


def anonymous_file(chunks: Iterable[bytes | bytearray | memoryview]) -> int:
    """Write ``chunks`` into a fresh anonymous file.

    Returns:
        a descriptor (close-on-exec) which the caller owns; its offset is undefined, so read it by position.

    Raises:
        OSError: memory or disk is exhausted; no descriptor is left open.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("rlm-kernel", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile(prefix="rlm-kernel-") as file:
            fd = os.dup(file.fileno())
    try:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            while view:
                written = os.write(fd, view[:_WRITE_CHUNK])
                view = view[written:]
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_anonymous(fd: int) -> bytes:
    """Return the whole content behind ``fd`` as bytes. Does not close it and does not use its offset."""
    size = os.fstat(fd).st_size
    if size == 0:
        return b""
    with mmap.mmap(fd, size, access=mmap.ACCESS_READ) as view:
        return view[:]


def map_private(fd: int) -> memoryview:
    """Map the content behind ``fd`` copy-on-write: pages are shared until someone writes to them.

    Returns:
        a writable view; the mapping lives as long as the view or anything built on it.
    """
    size = os.fstat(fd).st_size
    if size == 0:
        return memoryview(bytearray())
    return memoryview(mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
