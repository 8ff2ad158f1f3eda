"""What of the kernel can be said without starting one; the rest is in tests/end_to_end."""

from __future__ import annotations

import pytest
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp

from rlm_kernel.jupyter.attachment import COVERED, KernelAttachment
from rlm_kernel.jupyter.control import ControlVerbs
from rlm_kernel.jupyter.control_queue import ControlQueue
from rlm_kernel.jupyter.kernel import RLMKernelApp
from rlm_kernel.jupyter.shell_session import is_empty, is_rlm_line
from rlm_kernel.session.config import RLM


@pytest.mark.parametrize("code", ["%rlm", "%rlm cleanup", "  %rlm status  ", "%rlm status\n\n%rlm cleanup --abandon\n"])
def test_lines_that_look_at_the_session_run_although_a_cleanup_failed(code) -> None:
    assert is_rlm_line(code)


@pytest.mark.parametrize(
    "code", ["x = 1", "%rlm status\nx = 1", "%%rlm\ntask", "print('%rlm')", "# %rlm", "%rl", "%rlmx = 1"]
)
def test_other_code_does_not_pass_for_one(code) -> None:
    assert not is_rlm_line(code)


@pytest.mark.parametrize(("code", "empty"), [("", True), (" \n\t", True), ("0", False), ("#", False)])
def test_an_empty_request_is_one_that_runs_no_code(code, empty) -> None:
    assert is_empty(code) is empty


def test_config_files_reach_the_settings() -> None:
    assert RLM in RLMKernelApp.classes
    assert set(IPKernelApp.classes) <= set(RLMKernelApp.classes)
    assert RLMKernelApp.kernel_class.default_value == "rlm_kernel.jupyter.kernel.RLMKernel"


def test_do_execute_takes_what_the_stock_one_takes() -> None:
    """ipykernel looks the parameters up to decide what it passes."""
    import inspect

    stock, ours = (inspect.signature(kind.do_execute).parameters for kind in (IPythonKernel, KernelAttachment))
    assert list(stock) == list(ours)
    assert [p.kind for p in stock.values()] == [p.kind for p in ours.values()]


def test_what_stands_in_front_of_the_stock_methods_takes_what_they_take() -> None:
    """A method that a later ipykernel renames would otherwise be covered in vain."""
    import inspect

    for name in COVERED:
        ours = next(
            getattr(kind, name) for kind in (KernelAttachment, ControlVerbs, ControlQueue) if hasattr(kind, name)
        )
        takes, wanted = (inspect.signature(call).parameters for call in (ours, getattr(IPythonKernel, name)))
        assert [p.kind for p in takes.values()] == [p.kind for p in wanted.values()], name
