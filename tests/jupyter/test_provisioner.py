"""`rlm_kernel.jupyter.provisioner`; with real kernels in ``tests/end_to_end/test_server_provisioner.py``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpec

from rlm_kernel.children import posix
from rlm_kernel.children.nursery_process import NurseryProcess
from rlm_kernel.jupyter.install import PROVISIONER_NAME, kernel_spec
from rlm_kernel.jupyter.provisioner import (
    LAUNCH_VARIABLE,
    RLMProvisioner,
    graces_in,
    open_remains,
    wait_until_gone,
)
from rlm_kernel.session.config import SHUTDOWN_WAIT_VARIABLE, Settings
from rlm_kernel.values import Graces
from rlm_kernel.wire.channel import close_fds
from tests.support.kernels import Processes
from tests.support.strays import strays


def make(**variables: str) -> tuple[RLMProvisioner, dict[str, str]]:
    """Make a provisioner, and prepare a launch with it. Returns it with the environment of that."""
    provisioner = RLMProvisioner(kernel_id="1", kernel_spec=KernelSpec(**kernel_spec(provisioner=True)))
    return provisioner, asyncio.run(provisioner.pre_launch(env=variables))["env"]


def test_jupyter_finds_it_by_the_name_that_kernelspecs_have() -> None:
    (found,) = entry_points(group="jupyter_client.kernel_provisioners", name=PROVISIONER_NAME)
    assert found.load() is RLMProvisioner


@pytest.mark.parametrize(
    ("variables", "recommended", "at_least"),
    [
        ({}, 5.0, 2 * 2.0),
        ({"RLM_TERMINATE_GRACE_S": "10"}, 5.0, 2 * 11.5),
        ({"RLM_TERMINATE_GRACE_S": "10"}, 60.0, 60.0),
        ({"RLM_TERMINATE_GRACE_S": "10", "RLM_MAX_DEPTH": "many"}, 5.0, 2 * 2.0),  # the kernel takes none of them then
    ],
)
def test_half_of_jupyters_wait_is_longer_than_the_graces(variables, recommended, at_least) -> None:
    provisioner, _ = make(**variables)
    wait_s = provisioner.get_shutdown_wait_time(recommended)
    assert at_least <= wait_s <= max(recommended, at_least + 6.0)


def test_graces_in_the_kernelspec_count() -> None:
    spec = KernelSpec(**kernel_spec(provisioner=True, env={"RLM_KILL_GRACE_S": "7"}))
    provisioner = RLMProvisioner(kernel_id="1", kernel_spec=spec)
    environ = asyncio.run(provisioner.pre_launch(env={}))["env"]
    assert graces_in(environ).kill_s == 7.0
    assert provisioner.get_shutdown_wait_time() > 2 * 8.0


def test_the_kernel_is_told_of_the_wait_and_does_not_warn_of_graces_that_fit_in(monkeypatch) -> None:
    _, environ = make(RLM_TERMINATE_GRACE_S="10")
    assert len(Settings(environ=environ).warnings) == 1  # this process was not launched by it
    monkeypatch.setattr(os, "getppid", os.getpid)
    assert Settings(environ=environ).warnings == []
    longer = Settings(environ=environ)
    longer.set("terminate_grace_s", 100.0)
    assert "SIGTERM 14 s after" in longer.warnings[0]


@pytest.mark.parametrize("text", ["", "9", "x:9", ":", "1:x"])
def test_an_announcement_that_says_nothing_changes_nothing(text) -> None:
    environ = {"RLM_TERMINATE_GRACE_S": "10", SHUTDOWN_WAIT_VARIABLE: text}
    assert "SIGTERM 2.5 s after" in Settings(environ=environ).warnings[0]


def test_another_process_can_take_the_kernel_over() -> None:
    provisioner, environ = make(RLM_KILL_GRACE_S="9")
    provisioner.connection_info = {}
    other = RLMProvisioner(kernel_id="1", kernel_spec=provisioner.kernel_spec)
    information: dict[str, Any] = asyncio.run(provisioner.get_provisioner_info())
    asyncio.run(other.load_provisioner_info(information))
    assert other.get_shutdown_wait_time() == provisioner.get_shutdown_wait_time()
    assert information["rlm_launch"] == environ[LAUNCH_VARIABLE]


def test_each_launch_has_a_mark_of_its_own() -> None:
    assert len({make()[1][LAUNCH_VARIABLE] for _ in range(3)}) == 3


@pytest.fixture
def nursery(monkeypatch: pytest.MonkeyPatch) -> Iterator[NurseryProcess]:
    """A nursery of the launch "ours", whose kernel is this process.

    While it lives, what has its marker is no orphan to a kernel that somebody else starts just now, and which sweeps.
    """
    monkeypatch.setenv(LAUNCH_VARIABLE, "ours")
    nursery = NurseryProcess.start()
    yield nursery
    nursery.kill()
    assert nursery.wait(10)
    nursery.close()


def test_what_outlives_the_graces_is_killed_and_others_are_left_alone(nursery, monkeypatch) -> None:
    marker = nursery.marker.partition("=")[2]
    with strays() as start:
        ours = start(marker)
        monkeypatch.setenv(LAUNCH_VARIABLE, "theirs")
        theirs = start(marker)
        with Processes([ours, nursery.pid]) as watched, Processes([theirs]) as others:
            remains = open_remains("ours", os.getpid())
            assert set(remains) == {ours, nursery.pid}
            assert wait_until_gone("ours", Graces(0.0, 0.0, 0.0), remains) == ()
            assert watched.left == []
            assert others.left == [theirs]


def test_what_cannot_be_killed_is_named(nursery, monkeypatch) -> None:
    remains = open_remains("ours", os.getpid())
    with monkeypatch.context() as patch:
        patch.setattr("rlm_kernel.jupyter.provisioner._KILL_S", 0.0)
        patch.setattr("rlm_kernel.jupyter.provisioner._NURSERY_MARGIN_S", 0.0)
        patch.setattr(posix, "signal_pidfd", lambda *_: False)
        assert wait_until_gone("ours", Graces(0.0, 0.0, 0.0), remains) == (nursery.pid,)


def test_the_nursery_of_a_kernel_that_lives_is_none_of_its_remains(nursery) -> None:
    """A kernel may have been started from within another one: it has the other's mark, too."""
    assert open_remains("ours") == {}
    found = open_remains("ours", os.getpid())
    close_fds(found.values())
    assert set(found) == {nursery.pid}
