"""The process layer under random use: whatever is done in whatever order, the registry and ``/proc`` agree.

A hypothesis state machine over the real thing: one supervisor with a real nursery, an episode per example. After every step it holds that
the ids are unique, that a child has one terminal state and keeps it, that this state can be explained by what was done, that no more
children run than the limit allows, that every running child has its process below the nursery, and that no process with the nursery's
marker is unknown. After each verb no process is left, and no descriptor or thread that was not there before.

The suite runs a short, steady form. ``RLM_TEST_MACHINE_EXAMPLES=500`` makes it a long, random one; so does
``python -m tests.soak --machine --minutes N``.
"""

from __future__ import annotations

import os

import pytest

from rlm_kernel.children import posix
from tests.children.machine import run_machine
from tests.children.machine_base import Arena

pytestmark = pytest.mark.skipif(not posix.IS_LINUX, reason="compares with /proc")

EXAMPLES_VARIABLE = "RLM_TEST_MACHINE_EXAMPLES"


@pytest.mark.slow
@pytest.mark.timeout(0 if EXAMPLES_VARIABLE in os.environ else 120)
def test_whatever_is_done_in_whatever_order_the_registry_and_the_processes_agree() -> None:
    asked = os.environ.get(EXAMPLES_VARIABLE)
    with Arena() as arena:
        run_machine(arena, examples=int(asked or 8), steady=asked is None)
        assert arena.steps > arena.examples, "the machine took no steps"
