"""A ``with`` block that closes what it was entered with, for everything of ours that has a ``close``."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class ClosesOnExit:
    """Something to be closed, which a ``with`` block does at its end, however that comes."""

    def close(self) -> object:
        """Release what it holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
