"""The capped log of what a child writes to its standard output and standard error.

The supervisor thread owns it: it reads the pipe that is the child's fd 1 and 2, so a child can neither fill the disk
nor lose lines when it is killed. The file keeps the first `CAP_BYTES`; what comes after is counted, and the last
`TAIL_BYTES` of everything are kept for the status and appended at the end. A full disk never loses the child: the error
is remembered and writing stops.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from rlm_kernel.credentials import REDACTED

CAP_BYTES = 5 << 20
TAIL_BYTES = 4 << 10


class RawLog:
    """One child's log. The file comes to be with the first output.

    Args:
        path: where to write, empty for nowhere.
        secrets: texts that are replaced wherever they occur, also where one write ends in the middle of one.
    """

    def __init__(self, path: str, secrets: Sequence[str] = ()) -> None:
        self._path = path
        self._secrets = [secret.encode("utf-8", "surrogatepass") for secret in secrets]
        self._held_back = b""
        self._fd = -1
        self._written = 0
        self._left_out = 0
        self._tail = bytearray()
        self.error: str | None = None

    def add(self, data: bytes) -> None:
        """Take in output."""
        if self._secrets:
            data = self._without_secrets(self._held_back + data)
        self._keep(data)

    def _without_secrets(self, data: bytes) -> bytes:
        """Replace secrets, and hold back an end that could be the beginning of one."""
        for secret in self._secrets:
            data = data.replace(secret, REDACTED.encode())
        held = max((_overlap(data, secret) for secret in self._secrets), default=0)
        self._held_back = data[len(data) - held :]
        return data[: len(data) - held]

    def _keep(self, data: bytes) -> None:
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
        """Write what was held back, note what was left out, and close the file. May be called twice."""
        held_back, self._held_back = self._held_back, b""
        if held_back:
            self._keep(held_back)
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


def _overlap(data: bytes, secret: bytes) -> int:
    """Return how many bytes at the end of ``data`` are the beginning of ``secret``, though not all of it."""
    for length in range(min(len(data), len(secret) - 1), 0, -1):
        if data.endswith(secret[:length]):
            return length
    return 0
