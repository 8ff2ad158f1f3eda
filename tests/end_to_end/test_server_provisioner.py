"""A kernel that is started with the provisioner: Jupyter waits for its graces, and for the end of all that a killed kernel leaves."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from rlm_kernel.jupyter.install import kernel_spec
from rlm_kernel.jupyter.provisioner import RLMProvisioner
from tests.support import plain_client
from tests.support.families import STUBBORN, parent_of, start_child
from tests.support.generations import MAX_DEPTH, start_generations
from tests.support.kernels import Kernel, Processes, marked
from tests.support.model_server import ModelServer


def provisioned(home: Path, model: ModelServer, **variables: str) -> Kernel:
    all_variables = {**MAX_DEPTH, **plain_client.variables(model), **variables}
    return Kernel(home, spec=kernel_spec(provisioner=True), **all_variables)


@pytest.mark.slow
def test_a_killed_kernel_is_done_with_only_when_nothing_of_it_is_left(server, fifo, tmp_path) -> None:
    """What code in the notebook has started by itself is not the provisioner's business."""
    with provisioned(tmp_path, server) as kernel:
        assert isinstance(kernel.manager.provisioner, RLMProvisioner)
        own = kernel.value(
            "__import__('subprocess').Popen(['sleep', '300'], start_new_session=True, "
            "stdin=-3, stdout=-3, stderr=-3, close_fds=True).pid"
        )
        family = start_generations(kernel.ok, server, fifo)
        with Processes([own]) as started_by_hand:
            with Processes(family.all) as processes:
                kernel.manager.restart_kernel(now=True)
                assert processes.left == []
            assert started_by_hand.left == [own]
        kernel.reconnect()

        pid = start_child(kernel, fifo, STUBBORN)
        nursery = parent_of(pid)
        kernel.blocked("rlm_wait(h)")
        with Processes([pid, nursery]) as processes:
            os.kill(kernel.pid, signal.SIGKILL)
            kernel.manager.shutdown_kernel()
            assert processes.left == []
        assert marked(kernel.mark) == {own}


@pytest.mark.slow
def test_jupyter_waits_for_graces_that_are_longer_than_its_own_wait(server, fifo, tmp_path) -> None:
    """Without the provisioner the kernel would get SIGTERM and SIGKILL while its child is still given time."""
    with provisioned(tmp_path, server, RLM_SHUTDOWN_GRACE_S="0.8", RLM_KILL_GRACE_S="30") as kernel:
        warnings = kernel.value("get_ipython().kernel.rlm.settings.warnings")
        kernel.manager.shutdown_wait_time = 1.0
        pid = start_child(kernel, fifo, STUBBORN)
        process: subprocess.Popen[bytes] = kernel.process
        with Processes([pid]) as processes:
            kernel.manager.shutdown_kernel()
            assert processes.left == []
        assert process.returncode == 0
    assert warnings == []
