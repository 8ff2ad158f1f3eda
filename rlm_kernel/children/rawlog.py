"""The capped log of what a child writes to its standard output and standard error.

The supervisor thread owns it: it reads the pipe that is the child's fd 1 and 2, so a child can neither fill the disk
nor lose lines when it is killed. The file keeps the first `CAP_BYTES`; what comes after is counted, and the last
`TAIL_BYTES` of everything are kept for the status and appended at the end. A full disk never loses the child: the error
is remembered and writing stops.
"""

from __future__ import annotations

import os

CAP_BYTES = 5 << 20
TAIL_BYTES = 4 << 10


class RawLog:
    """One child's log. The file comes to be with the first output.

    Args:
        path: where to write, empty for nowhere.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        self._written = 0
        self._left_out = 0
        self._tail = bytearray()
        self.error: str | None = None

    def add(self, data: bytes) -> None:
        """Take in output."""
        self._tail += data
        del self._tail[: -TAIL_BYTES or None]
        room = max(0, CAP_BYTES - self._written)
        self._left_out += max(0, len(data) - room)
        self._write(data[:room])

    @property
    def tail(self) -> str:
        """The last part of the output as text."""
        return self._tail.decode("utf-8", "replace")

    def _write(self, data: bytes) -> None:
        if not data or not self._path or self.error is not None:
            return
        try:
            if self._fd < 0:
                os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            while data:
                written = os.write(self._fd, data)
                self._written += written
                data = data[written:]
        except OSError as error:
            self.error = f"{self._path}: {error.strerror}"

    def close(self) -> None:
        """Note what was left out, and close the file. May be called twice."""
        if self._left_out and self._fd >= 0:
            self._written = 0
            self._write(
                f"\n[... {self._left_out} bytes left out; the last {len(self._tail)} bytes follow ...]\n".encode()
            )
            self._write(bytes(self._tail))
        self._left_out = 0
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
