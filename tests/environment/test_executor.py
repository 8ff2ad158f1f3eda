"""Promises of `rlm_kernel.environment.executor`."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlm_kernel.environment import deadline
from rlm_kernel.environment.executor import PythonExecutor
from rlm_kernel.errors import ConfigurationError


@pytest.fixture(scope="module")
def shared() -> Iterator[PythonExecutor]:
    executor = PythonExecutor()
    executor.execute("await __import__('asyncio').sleep(0)")  # the shell keeps the loop that its first await makes
    yield executor
    executor.close()


@pytest.fixture
def executor(shared: PythonExecutor) -> PythonExecutor:
    shared.reset()
    return shared


@pytest.fixture(params=["main thread", "other thread"])
def anywhere(request: pytest.FixtureRequest) -> Callable[[Callable[[], Any]], Any]:
    """Call a function on the main thread or on another one."""
    return (lambda function: function()) if request.param == "main thread" else in_thread


def in_thread(function: Callable[[], Any]) -> Any:
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(function()))
    thread.start()
    thread.join(30)
    assert outcome, "the thread has not ended, or has raised"
    return outcome[0]


def test_a_result_has_its_published_keys(executor: PythonExecutor) -> None:
    result = executor.execute("x = 1 + 1\nprint('hello')\nx")
    assert result.pop("execution_time") >= 0
    assert result == {
        "stdout": "hello\n2\n",
        "stderr": "",
        "locals_snapshot": {"x": "2"},
        "success": True,
        "exception": None,
    }


def test_an_error_is_reported_and_keeps_the_assignments_before_it(executor: PythonExecutor) -> None:
    result = executor.execute("a = 1\nraise ValueError('test error')\nb = 2")
    assert not result["success"]
    assert result["exception"] == "ValueError: test error"
    assert "ValueError: test error" in result["stderr"]
    assert "rlm_kernel" not in result["stderr"]
    assert executor.get_variable("a") == 1
    assert executor.get_variable("b") is None


def test_what_is_written_to_stderr_is_kept_apart(executor: PythonExecutor) -> None:
    result = executor.execute("import sys\nprint('o'); print('e', file=sys.stderr)")
    assert (result["stdout"], result["stderr"]) == ("o\n", "e\n")


def test_the_namespace_persists_until_a_reset(executor: PythonExecutor) -> None:
    executor.execute("x = 10\ndef double(n): return 2 * n")
    executor.execute("y = double(x)")
    assert executor.get_variable("y") == 20
    executor.inject_function("helper", len)
    kept = executor.get_variable("double")
    executor.reset()
    assert executor.get_variable("x") is None
    assert executor.list_variables() == []
    assert kept(2) == 4
    assert executor.execute("x")["exception"] == "NameError: name 'x' is not defined"


def test_variables_functions_and_the_context_can_be_put_in(executor: PythonExecutor) -> None:
    executor.set_context("Hello World")
    executor.set_variable("n", 3)
    executor.inject_function("double", lambda x: x * 2)
    assert executor.execute("result = double(n)\ncontext")["stdout"] == "'Hello World'\n"
    assert executor.get_variable("result") == 6
    assert executor.get_variable("missing") is None
    assert executor.list_variables() == ["context", "n", "double", "result"]


def test_private_names_and_those_of_the_shell_are_not_listed(executor: PythonExecutor) -> None:
    executor.execute("_hidden = 1\nshown = 2\nglobals()[3] = 4")
    assert executor.list_variables() == ["shown"]


@pytest.mark.parametrize("name", ["not a name", "", 3])
def test_a_name_that_is_none_is_refused(executor: PythonExecutor, name: Any) -> None:
    with pytest.raises(ValueError, match="must be a Python identifier"):
        executor.set_variable(name, 1)


def test_what_is_no_function_and_what_is_no_code_is_refused(executor: PythonExecutor) -> None:
    with pytest.raises(TypeError, match="f=3: must be callable"):
        executor.inject_function("f", 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="code=None: must be text"):
        executor.execute(None)  # type: ignore[arg-type]


def test_output_is_cut_with_a_line_that_says_how_long_it_was() -> None:
    executor = PythonExecutor(max_output_length=100)
    try:
        result = executor.execute("import sys\nprint('x' * 500, end='')\nprint('y' * 500, end='', file=sys.stderr)")
        assert result["stdout"] == "x" * 50 + "\n[... 400 of 500 characters left out ...]\n" + "x" * 50
        assert "of 500 characters left out" in result["stderr"]
        huge = executor.execute("print('BEGIN' + 'x' * 3_000_000 + 'END')")["stdout"]
        assert huge.startswith("BEGIN")
        assert huge.endswith("xEND\n")
        assert "of 3000009 characters left out" in huge
        assert executor.execute("print('x' * 99)")["stdout"] == "x" * 99 + "\n"
    finally:
        executor.close()


def test_surrogates_are_captured_as_they_are(executor: PythonExecutor) -> None:
    result = executor.execute("print('\\ud800')\n'\\ud801'")
    assert result["success"], result
    assert result["stdout"] == "\ud800\n'\\ud801'\n"


@pytest.mark.parametrize("value", [0, -1, 1.5, None, True])
def test_a_bad_length_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_output_length="):
        PythonExecutor(max_output_length=value)


# -- imports


def test_other_imports_raise_and_say_which_are_allowed() -> None:
    executor = PythonExecutor(allowed_imports=["math", "collections.abc", "json"])
    try:
        assert executor.execute("import math, json.decoder\nfrom json import loads\nimport collections.abc")["success"]
        result = executor.execute("import os")
        assert result["exception"] == (
            "ImportError: import of 'os' is not allowed here; allowed imports: collections.abc, json, math"
        )
        assert "ImportError" in executor.execute("def f():\n    from subprocess import run\nf()")["exception"]
        assert "ImportError" in executor.execute("import collections")["exception"]
        assert "ImportError" in executor.execute("import jsonschema")["exception"]
    finally:
        executor.close()


def test_the_libraries_own_imports_and_other_threads_are_free() -> None:
    executor = PythonExecutor(allowed_imports=["json"])
    executor.inject_function("import_elsewhere", lambda: __import__("colorsys"))
    outside: list[Any] = []
    inside, go_on = threading.Event(), threading.Event()
    executor.set_variable("inside", inside)
    executor.set_variable("go_on", go_on)
    sys.modules.pop("colorsys", None)

    def meanwhile() -> None:
        inside.wait(10)
        import wave

        outside.append(wave)
        go_on.set()

    thread = threading.Thread(target=meanwhile)
    thread.start()
    try:
        assert executor.execute("inside.set()\ngo_on.wait(10)\nimport_elsewhere()\n!true\n%time 1")["success"]
        assert executor.execute("import wave")["exception"] is not None
    finally:
        thread.join()
        executor.close()
    assert outside


@pytest.mark.parametrize("value", ["os", [3], [""]])
def test_a_bad_list_of_imports_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="allowed_imports="):
        PythonExecutor(allowed_imports=value)


# -- time


def test_code_that_takes_too_long_is_interrupted_and_what_it_did_is_kept(executor: PythonExecutor, anywhere) -> None:
    result = anywhere(lambda: executor.execute("x = 1\nprint('before')\nwhile True: pass", timeout_s=0.05))
    assert not result["success"]
    assert "timeout_s=0.05" in result["exception"]
    assert result["exception"].startswith("TimeoutError: ")
    assert result["stdout"] == "before\n"
    assert result["execution_time"] < 10
    assert anywhere(lambda: executor.execute("x + 1", timeout_s=30))["stdout"] == "2\n"


def test_an_await_and_a_command_are_interrupted_too(executor: PythonExecutor, anywhere) -> None:
    code = "import asyncio\ntry:\n    await asyncio.sleep(60)\nfinally:\n    unwound = True"
    assert "TimeoutError" in anywhere(lambda: executor.execute(code, timeout_s=0.05))["exception"]
    assert executor.get_variable("unwound") is True
    assert "TimeoutError" in anywhere(lambda: executor.execute("!sleep 60", timeout_s=0.05))["exception"]
    assert anywhere(lambda: executor.execute("await asyncio.sleep(0, 'usable')"))["stdout"] == "'usable'\n"


def test_code_that_ends_in_time_is_not_touched_afterwards(executor: PythonExecutor, anywhere) -> None:
    def many() -> list[Any]:
        return [executor.execute("x = sum(range(2000))", timeout_s=0.002) for _ in range(100)]

    for result in anywhere(many):
        assert result["success"] or "TimeoutError" in result["exception"]
    assert anywhere(lambda: executor.execute("'alive'"))["stdout"] == "'alive'\n"
    assert [thread.name for thread in threading.enumerate() if thread.name == "rlm-timeout"] == []


def test_except_exception_does_not_catch_the_interruption(executor: PythonExecutor) -> None:
    code = "def spin():\n    while True: pass\ntry: spin()\nexcept Exception: caught = True"
    assert "TimeoutError" in executor.execute(code, timeout_s=0.05)["exception"]
    assert executor.get_variable("caught") is None


def test_code_that_catches_the_interruption_is_interrupted_again(executor: PythonExecutor, anywhere) -> None:
    # Not the endless loop itself in the try block: where a loop jumps back, exceptions need not be caught by it.
    executor.execute("def spin():\n    while True: pass")
    code = "n = 0\nwhile n < 3:\n    try: spin()\n    except BaseException: n += 1\nprint('came to the end')"
    result = anywhere(lambda: executor.execute(code, timeout_s=0.05))
    assert not result["success"]
    assert "had to be raised 3 times" in result["exception"]
    assert result["stdout"] == "came to the end\n"


def test_code_that_never_lets_go_is_left_alone_in_the_end_which_is_logged(
    executor: PythonExecutor, anywhere, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(deadline, "MAX_RAISES", 2)
    monkeypatch.setattr(deadline, "_AGAIN_S", 0.02)
    logged = threading.Event()
    monkeypatch.setattr(deadline._log, "error", lambda *args: logged.set())
    executor.set_variable("logged", logged)
    code = "n = 0\nwhile not logged.is_set():\n    try: logged.wait(0.01)\n    except BaseException: n += 1\nfor _ in range(10**5): pass"
    result = anywhere(lambda: executor.execute(code, timeout_s=0.02))
    assert "had to be raised 2 times" in result["exception"]
    assert logged.is_set()


def test_the_timer_that_was_there_before_is_put_back(executor: PythonExecutor) -> None:
    """A test runner's, for example."""
    handler, (remaining, interval) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 40, 7)
    try:
        executor.execute("while True: pass", timeout_s=0.05)
        assert 30 < signal.getitimer(signal.ITIMER_REAL)[0] < 40
        assert signal.getitimer(signal.ITIMER_REAL)[1] == 7
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, remaining, interval)
    assert signal.getsignal(signal.SIGALRM) is handler


def test_a_timer_that_is_due_earlier_fires_in_time_and_what_it_raises_passes_through(executor: PythonExecutor) -> None:
    class Outer(BaseException):
        pass

    def fire(*_: object) -> None:
        raise Outer

    remaining, interval = signal.getitimer(signal.ITIMER_REAL)
    before = signal.signal(signal.SIGALRM, fire)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(Outer):
            executor.execute("while True: pass", timeout_s=50)
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, remaining, interval)


def test_the_time_of_a_step_around_this_one_is_not_taken_for_ours(executor: PythonExecutor, anywhere) -> None:
    inner = PythonExecutor()
    executor.set_variable("inner", inner)
    try:
        code = "result = inner.execute('while True: pass', timeout_s=50)"
        result = anywhere(lambda: executor.execute(code, timeout_s=0.1))
        assert "timeout_s=0.1" in result["exception"]
        assert executor.get_variable("result") is None
        assert inner.execute("1")["success"]
    finally:
        inner.close()


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), "1", True])
def test_a_bad_timeout_is_refused(executor: PythonExecutor, value: Any) -> None:
    with pytest.raises(ConfigurationError, match="timeout_s="):
        executor.execute("1", timeout_s=value)


def test_closing_twice_is_fine() -> None:
    executor = PythonExecutor()
    executor.execute("import asyncio\nawait asyncio.sleep(0)\ntask = asyncio.ensure_future(asyncio.sleep(60))")
    executor.close()
    executor.close()
