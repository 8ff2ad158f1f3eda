"""What holds for every test."""

from __future__ import annotations

from pathlib import Path

import pytest

_END_TO_END = Path(__file__).parent / "end_to_end"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in ``tests/end_to_end``, so that nobody has to remember to."""
    for item in items:
        if _END_TO_END in item.path.parents:
            item.add_marker(pytest.mark.end_to_end)
