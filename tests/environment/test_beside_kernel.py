"""In-process environments beside the shell of a kernel (or of a child), which has the process to itself otherwise."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell

from rlm_kernel.environment.executor import PythonExecutor
from rlm_kernel.environment.interpreter import Interpreter, make_shell
from tests.environment.test_thread_shell import globals_of_the_process


@pytest.fixture
def executor() -> Iterator[PythonExecutor]:
    made = PythonExecutor()
    yield made
    made.close()


@pytest.fixture(scope="module")
def main_shell() -> Iterator[Any]:
    """The shell of a kernel or a child, which has the process to itself otherwise."""
    made = make_shell()
    yield made
    made.restore_sys_module_state()
    atexit.unregister(made.atexit_operations)
    made.atexit_operations()
    InteractiveShell.clear_instance()


def test_a_block_beside_a_kernels_shell_is_kept_apart_from_it(main_shell: Any, executor: PythonExecutor) -> None:
    meet = threading.Barrier(2, timeout=20).wait
    main_shell.user_ns["meet"] = meet
    executor.inject_function("meet", meet)
    code = """
from IPython import get_ipython as found
from IPython.display import display as shown
for n in range(5):
    meet()
    print({who!r}, n)
    shown({who!r})
    assert found() is get_ipython()
meet()
{who!r}
"""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(executor.execute(code.format(who="env"))))
    thread.start()
    kernel = Interpreter(main_shell, echo=False).execute(code.format(who="kernel"))
    thread.join(30)
    for who, text in (("kernel", kernel.stdout), ("env", results[0]["stdout"])):
        lines = [line for n in range(5) for line in (f"{who} {n}", repr(who))]
        assert text.splitlines() == [*lines, repr(who)], results
    assert get_ipython() is main_shell


def test_a_block_leaves_a_kernels_shell_as_it_is(main_shell: Any, executor: PythonExecutor) -> None:
    before = globals_of_the_process()
    main_shell.user_ns["executor"] = executor
    result = Interpreter(main_shell, echo=False).execute(
        "r = executor.execute('1/0')\nprint('cell')\nr2 = executor.execute('2')\nr2['stdout']"
    )
    assert result.stdout == "cell\n'2\\n'\n"
    assert result.stderr == ""
    executor.execute("get_ipython().user_ns is globals()")
    after = globals_of_the_process()
    assert after["main"] is before["main"]
    assert after["instance"] is main_shell
    assert executor.get_variable("executor") is None


def test_the_shell_of_a_kernel_keeps_nothing_of_a_block(main_shell: Any) -> None:
    """Neither hooks nor a history of outputs, of which a long session would get ever more."""
    interpreter = Interpreter(main_shell, echo=False)
    interpreter.execute("display(1)\n1")
    before = {name: len(hooks) for name, hooks in main_shell.events.callbacks.items()}
    kept = str(dict(main_shell.history_manager.outputs))
    interpreter.execute("print(2)\ndisplay(2)\n2")
    assert {name: len(hooks) for name, hooks in main_shell.events.callbacks.items()} == before
    assert str(dict(main_shell.history_manager.outputs)) == kept


def test_a_cell_of_a_kernel_that_patches_its_stream_does_not_touch_a_block(
    main_shell: Any, executor: PythonExecutor
) -> None:
    """IPython does so for each cell, while the router may stand there."""
    inside, go_on = threading.Event(), threading.Event()
    executor.set_variable("inside", inside)
    executor.set_variable("go_on", go_on)
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(executor.execute("inside.set()\ngo_on.wait(10)\nprint('mine')"))
    )
    thread.start()
    inside.wait(10)
    main_shell.user_ns.update(go_on=go_on, thread=thread)
    main_shell.run_cell("print('cell')\ngo_on.set()\nthread.join()")
    assert results[0]["stdout"] == "mine\n"
    assert "mine" not in str(dict(main_shell.history_manager.outputs))


def test_a_timeout_works_for_a_kernels_shell_too(main_shell: Any) -> None:
    result = Interpreter(main_shell, echo=False).execute("while True: pass", timeout_s=0.05)
    assert not result.success
    assert result.exception is not None
    assert result.exception.startswith("TimeoutError: ")
