"""What every Jupyter kernel must do: the public test suite for kernels, and each reply as the protocol wants it.

``python -m tests.end_to_end.test_conformance`` runs that suite against the stock kernel, too, and compares.
"""

from __future__ import annotations

import sys
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import jupyter_kernel_test
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpec

from tests.support.kernels import Kernel
from tests.support.message_spec import CheckedKernel, check_message
from tests.support.model_server import ModelServer

pytestmark = pytest.mark.slow


class Suite:
    """The public suite's samples for Python, and a kernel that is started our way."""

    kc: BlockingKernelClient
    _home: tempfile.TemporaryDirectory[str]
    _kernel: Kernel
    is_stock = False
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples: ClassVar = [{"text": "zi", "matches": ["zip"]}, {"text": "rais", "matches": ["raise"]}]
    complete_code_samples: ClassVar = ["1", "print('hello')", "def f(x):\n  return x*2\n\n\n"]
    incomplete_code_samples: ClassVar = ["print('''hello", "def f(x):\n  x*2"]
    invalid_code_samples: ClassVar = ["import = 7q"]
    code_page_something = "zip?"
    code_generate_error = "1 / 0"
    code_execute_result: ClassVar = [
        {"code": "1+2+3", "result": "6"},
        {"code": "[n*n for n in range(1, 4)]", "result": "[1, 4, 9]"},
        {"code": "from IPython.display import HTML; HTML('<b>b</b>')", "mime": "text/html"},
    ]
    code_display_data: ClassVar = [
        {"code": "from IPython.display import HTML, display; display(HTML('<b>test</b>'))", "mime": "text/html"},
        {"code": "from IPython.display import Math, display; display(Math(r'\\frac{1}{2}'))", "mime": "text/latex"},
    ]
    code_history_pattern = "1?2*"
    supported_history_operations = ("tail", "search")  # "range" fails with the stock kernel, too
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"

    @classmethod
    def setUpClass(cls) -> None:
        cls._home = tempfile.TemporaryDirectory()
        cls._kernel = Kernel(Path(cls._home.name) / "kernel")
        if cls.is_stock:
            arguments = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            cls._kernel.manager._kernel_spec = KernelSpec(argv=arguments, language="python")
        cls.kc = cls._kernel.start().client

    @classmethod
    def tearDownClass(cls) -> None:
        cls._kernel.stop()
        cls._home.cleanup()


class TestPublicSuite(Suite, jupyter_kernel_test.KernelTests):  # type: ignore[misc]
    """Our kernel passes all of it, and skips none."""


@pytest.fixture(scope="module")
def checked(module_server: ModelServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedKernel]:
    with CheckedKernel(
        tmp_path_factory.mktemp("kernel"), RLM_MODEL="openai/test", **module_server.environment
    ) as kernel:
        yield kernel


REQUESTS = {
    "kernel_info": {},
    "complete": {"code": "rlm_q", "cursor_pos": 5},
    "inspect": {"code": "rlm_query", "cursor_pos": 9, "detail_level": 1},
    "is_complete": {"code": "for x in y:"},
    "history": {"hist_access_type": "tail", "n": 3, "output": False, "raw": True},
    "comm_info": {},
}


@pytest.mark.parametrize("channel", ["shell", "control"])
def test_each_question_is_answered_by_the_protocol_on_both_channels(checked, channel) -> None:
    for name, content in REQUESTS.items():
        kind = f"{name}_request"
        assert checked.answer(checked.ask(kind, content, channel=channel))["status"] in ("ok", "incomplete"), kind
    assert {kind.removesuffix("_reply") for kind, _ in checked.seen} >= set(REQUESTS)


def test_the_kernel_announces_what_it_can_do(checked) -> None:
    info = checked.answer(checked.ask("kernel_info_request"))
    assert {"kernel subshells", "debugger"} <= set(info["supported_features"])
    assert info["implementation"] == "rlm-kernel"
    assert checked.answer(checked.ask("usage_request"))["pid"] == checked.pid


def test_what_a_cell_leads_to_is_by_the_protocol(checked) -> None:
    checked.ok(
        "import sys\nfrom IPython.display import display, HTML, clear_output\n"
        "print('out'); print('err', file=sys.stderr); clear_output(wait=True)\n"
        "h = display(HTML('<b>1</b>'), display_id=True); h.update(HTML('<b>2</b>'))\n1"
    )
    assert checked.run("1 / 0").status == "error"
    assert checked.ok("").messages[-1]["content"] == {"execution_state": "idle"}
    silent = checked.run("1 / 0", silent=True, store_history=False)
    assert silent.status == "error"
    expressions = checked.run("n = 1", user_expressions={"good": "n", "bad": "1 / 0"}).reply["user_expressions"]
    assert (expressions["good"]["status"], expressions["bad"]["status"]) == ("ok", "error")
    first, second = checked.send("1 / 0"), checked.send("2")
    assert (checked.finish(first).status, checked.finish(second).status) == ("error", "aborted")
    kinds = {
        "stream",
        "display_data",
        "update_display_data",
        "execute_result",
        "error",
        "execute_input",
        "clear_output",
    }
    assert {kind for kind, _ in checked.seen} >= kinds
    assert {status for kind, status in checked.seen if kind == "execute_reply"} == {"ok", "error", "aborted"}


def test_a_request_for_input_is_by_the_protocol(checked) -> None:
    cell = checked.send("import getpass; (input('name? '), getpass.getpass('word? '))", allow_stdin=True)
    for prompt, hidden, text in (("name? ", False, "Ada"), ("word? ", True, "secret")):
        asked = checked.client.get_stdin_msg(timeout=10)
        check_message(asked)
        assert (asked["content"]["prompt"], asked["content"]["password"]) == (prompt, hidden)
        assert asked["parent_header"]["msg_id"] == cell.msg_id
        checked.client.input(text)
    assert checked.finish(cell).text == "('Ada', 'secret')"


SURVIVOR = """
from rlm_kernel.values import CleanupReport
supervisor = get_ipython().kernel.rlm.supervisor
def stop(verb, graces, refs=None, **more):
    del supervisor.stop  # for one call
    return CleanupReport(verb, survivors=(4194000,))
supervisor.stop = stop
"""


def test_replies_that_the_kernel_makes_itself_are_by_the_protocol(checked) -> None:
    """A cell that cannot clean up after its answer, refused cells, a stop that fails, an interrupted cell, a stopped await."""
    assert checked.run(f"{SURVIVOR}\nFINAL(1)").reply["ename"] == "ChildCleanupError"
    refused = checked.run("2")
    assert refused.reply["ename"] == "ChildCleanupError"
    assert [m["msg_type"] for m in refused.messages] == ["status", "execute_input", "error", "status"]
    assert [m["msg_type"] for m in checked.run("2", silent=True).messages] == ["status", "status"]
    checked.ok("%rlm cleanup")
    checked.ok("%rlm reset")
    checked.ok(SURVIVOR)
    cell = checked.blocked("import time\ntime.sleep(30)")
    assert checked.interrupt()["status"] == "error"
    assert checked.finish(cell).status == "error"
    assert checked.interrupt() == {"status": "ok"}
    for text in ("import asyncio\nawait asyncio.sleep(30)", "while True: pass"):
        cell = checked.blocked(text)
        first, second = checked.ask("interrupt_request"), checked.ask("interrupt_request")
        assert checked.answer(first) == checked.answer(second) == {"status": "ok"}
        assert checked.finish(cell).status == "error"
    assert checked.ok("FINAL('done')").status == "ok"
    checked.ok("%rlm reset")


WIDGET = """
import ipywidgets
slider = ipywidgets.IntSlider(value=3, max=10)
changes = []
slider.observe(lambda change: changes.append(change['new']), 'value')
slider
"""


def test_a_widget_is_made_and_moved_from_the_front_end_as_on_a_stock_kernel(checked) -> None:
    cell = checked.ok(WIDGET)
    assert "application/vnd.jupyter.widget-view+json" in cell.result
    opened = [m for m in cell.messages if m["msg_type"] == "comm_open"]
    state = {m["content"]["comm_id"]: m["content"]["data"]["state"] for m in opened}
    (slider,) = [comm_id for comm_id, fields in state.items() if fields.get("_model_name") == "IntSliderModel"]
    assert cell.result["application/vnd.jupyter.widget-view+json"]["model_id"] == slider
    data = {"method": "update", "state": {"value": 7}, "buffer_paths": []}
    checked.ask("comm_msg", {"comm_id": slider, "data": data}, channel="shell")
    assert checked.value("(slider.value, changes)") == (7, [7])
    moved = checked.ok("slider.value = 9")
    (sent,) = [m["content"] for m in moved.messages if m["msg_type"] == "comm_msg"]
    assert (sent["comm_id"], sent["data"]["state"]) == (slider, {"value": 9})
    assert slider in checked.answer(checked.ask("comm_info_request", channel="shell"))["comms"]


def test_the_replies_to_two_shutdowns_are_by_the_protocol(checked) -> None:
    """The last test of this kernel."""
    first, second = (checked.ask("shutdown_request", {"restart": restart}) for restart in (True, False))
    assert checked.answer(first) == {"status": "ok", "restart": True}
    assert checked.answer(second) == {"status": "ok", "restart": False}
    assert checked.wait_exit(4.0) == 0


def main() -> int:
    """Run the public suite against both kernels; the same tests must pass."""
    outcomes = {}
    for is_stock in (True, False):
        suite_class = type("Compared", (Suite, jupyter_kernel_test.KernelTests), {"is_stock": is_stock})
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(suite_class).run(result)
        failed = sorted(str(test) for test, _ in [*result.failures, *result.errors, *result.skipped])
        print("stock" if is_stock else "ours", result.testsRun, "run; not passed:", failed)
        outcomes[is_stock] = result.testsRun, failed
    return 0 if outcomes[True] == outcomes[False] else 1


if __name__ == "__main__":
    sys.exit(main())
