"""What the reactor does in an order of its own, seen by taking one of its ways of reading away."""

from __future__ import annotations

import pytest

from rlm_kernel.children.supervisor import Supervisor
from rlm_kernel.values import ChildState
from tests.children.helpers import finish, spec


def test_an_answer_that_is_still_in_the_socket_when_the_exit_is_reported_counts(
    sup: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child's channel is not served, so the answer can only be found when its exit has been reported."""
    monkeypatch.setattr(sup._core.reactor, "_serve_child", lambda _child_id: None)
    [status] = finish(sup, spec("echo"))
    assert status.state is ChildState.COMPLETED, status.error
