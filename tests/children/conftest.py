"""Fixtures of the process layer: one nursery for a module's tests, and what each test must leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from rlm_kernel.children.records import Limits
from rlm_kernel.children.supervisor import NurserySettings, Supervisor
from tests.children.helpers import QUICK, Reports, finish, limits, spec


@pytest.fixture(scope="module")
def module_supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    supervisor.configure(limits())
    finish(supervisor, spec("echo"))
    yield supervisor
    assert supervisor.close()


@pytest.fixture
def sup(module_supervisor: Supervisor, no_leftovers: None) -> Iterator[Supervisor]:
    """A supervisor with a warm nursery that other tests of the module use, too. No child of a test outlives it."""
    module_supervisor.begin_episode("test")
    module_supervisor.configure(limits())
    yield module_supervisor
    left = module_supervisor.live_ids
    if left:
        assert module_supervisor.stop("teardown", QUICK.from_kill()).ok


@pytest.fixture
def make_supervisor(no_leftovers: None) -> Iterator[Callable[..., Supervisor]]:
    """Make supervisors with nurseries of their own, for tests that hurt them."""
    made: list[Supervisor] = []

    def make(settings: NurserySettings | None = None, bounds: Limits | None = None, **more: object) -> Supervisor:
        supervisor = Supervisor(settings, **more)  # type: ignore[arg-type]
        supervisor.configure(bounds or limits())
        made.append(supervisor)
        return supervisor

    yield make
    for supervisor in made:
        assert supervisor.close()


@pytest.fixture
def reports(no_leftovers: None) -> Iterator[Reports]:
    with Reports() as pipe:
        yield pipe
