"""Promises of `rlm_kernel.environment.thread_shell` and `routing`: environments in one process do not mix, and change nothing in it."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import contextvars
import gc
import linecache
import logging
import os
import select
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell

from rlm_kernel.environment.commands import Commands
from rlm_kernel.environment.executor import PythonExecutor


@pytest.fixture
def executor() -> Iterator[PythonExecutor]:
    made = PythonExecutor()
    yield made
    made.close()


@pytest.fixture
def other() -> Iterator[PythonExecutor]:
    made = PythonExecutor()
    yield made
    made.close()


def out(executor: PythonExecutor, code: str) -> str:
    result = executor.execute(code)
    assert result["success"], result
    return result["stdout"]


def globals_of_the_process() -> dict[str, Any]:
    return {
        "builtins": dict(vars(builtins)),
        "sys": {
            name: getattr(sys, name, None)
            for name in ("displayhook", "excepthook", "stdout", "stderr", "stdin", "ps1", "last_value", "last_exc")
        },
        "main": sys.modules["__main__"],
        "path": list(sys.path),
        "shell": InteractiveShell.__dict__.keys() & {"instance", "initialized", "_instance"},
        "instance": InteractiveShell._instance,
        "thread": threading.Thread.start,
    }


def test_a_shell_leaves_the_process_as_it_was(executor: PythonExecutor) -> None:
    before = globals_of_the_process()
    made = PythonExecutor()
    seen: list[Any] = []
    made.inject_function("look", lambda: seen.append(globals_of_the_process()))
    made.execute("look()\nx = 1\nx\n'shown'")
    made.execute("1/0")
    made.execute("x = (")
    made.execute("_ = 3\nexit()")
    made.execute("%time 1")
    assert globals_of_the_process() == before
    during = seen[0]
    for name in ("builtins", "main", "path", "instance"):
        assert during[name] == before[name], name
    for name in ("displayhook", "excepthook", "stdin", "ps1", "last_value"):
        assert during["sys"][name] is before["sys"][name], name
    made.close()
    assert globals_of_the_process() == before


def test_no_code_is_left_behind() -> None:
    lines = set(linecache.cache)
    made = PythonExecutor()
    made.execute("def f(): 1/0\nf()")
    made.reset()
    made.execute("2/0")
    made.close()
    assert {name for name in set(linecache.cache) - lines if name.startswith("<ipython")} == set()


def test_a_closed_shell_is_collected_though_a_thread_of_its_code_lives_on() -> None:
    made = PythonExecutor()
    go_on = threading.Event()
    made.set_variable("wait", go_on.wait)
    made.execute("import threading\nt = threading.Thread(target=wait)\nt.start()")
    made.execute("%%bash\necho hi")  # its magics have an exit hook and a thread
    made.execute("1/0")
    thread, shell = made.get_variable("t"), weakref.ref(made._shell)
    made.close()
    del made
    gc.collect()
    assert shell() is None
    go_on.set()
    thread.join()


def test_no_folder_and_no_history_is_made(executor: PythonExecutor, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("HOME", str(tmp_path))
    made = PythonExecutor()
    made.execute("x = 1")
    made.close()
    assert list(tmp_path.iterdir()) == []


# -- what its code finds


def test_code_finds_its_own_shell_and_what_it_displays_is_captured(executor: PythonExecutor, capsys) -> None:
    code = "from IPython import get_ipython as g\nfrom IPython.display import display as d\nd('x')\ndisplay({1: 2})\ng() is get_ipython()"
    assert out(executor, code) == "'x'\n{1: 2}\nTrue\n"
    assert out(executor, "__name__") == "'__main__'\n"
    assert out(executor, "import sys\nsys.modules['__main__'].__dict__ is globals()") == "False\n"
    assert capsys.readouterr() == ("", "")
    assert get_ipython() is None


def test_magics_commands_and_await_work(executor: PythonExecutor) -> None:
    assert out(executor, "!echo out; echo err >&2; exit 3") == "out\nerr\n"
    assert out(executor, "_exit_code") == "3\n"
    assert out(executor, "name = 'x'\nlines = !printf '{name}\\nb'\nlist(lines)") == "['x', 'b']\n"
    assert "per loop" in out(executor, "%timeit -n1 -r1 1")
    assert out(executor, "%%capture caught\nprint('inside')\n") == ""
    assert out(executor, "caught.stdout") == "'inside\\n'\n"
    assert out(executor, "import asyncio\nawait asyncio.sleep(0, 'done')") == "'done'\n"
    assert out(executor, "x = 1;\nx;") == ""
    assert executor.execute("!sleep 1 &")["exception"].startswith("OSError: ")


def test_script_magics_print_into_the_block_that_runs_them(executor: PythonExecutor) -> None:
    """Their event loop lives on a thread that the first one starts."""
    for word in ("first", "second"):
        result = executor.execute(f"%%bash\necho {word}\necho {word} >&2")
        assert (result["stdout"], result["stderr"]) == (f"{word}\n", f"{word}\n")


def test_exit_ends_nothing_and_input_raises_at_once(executor: PythonExecutor) -> None:
    assert "FINAL" in out(executor, "exit()")
    assert executor.execute("import sys\nx = 1\nsys.exit(3)")["exception"] == "SystemExit: 3"
    assert executor.execute("input('name? ')")["exception"].startswith("EOFError: ")
    assert out(executor, "x") == "1\n"


def test_tasks_stay_alive_between_blocks(executor: PythonExecutor) -> None:
    out(executor, "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 'from before'")
    out(executor, "t = asyncio.create_task(f())\nawait asyncio.sleep(0)")
    assert out(executor, "await t") == "'from before'\n"


def test_await_works_while_a_loop_is_running_and_can_be_timed_out_there(executor: PythonExecutor) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    executor.set_variable("variable", variable)

    async def main() -> list[dict[str, Any]]:
        variable.set("set")
        return [
            executor.execute("import asyncio\nprint('a')\nx = await asyncio.sleep(0, variable.get())\nx"),
            executor.execute("x"),
            executor.execute("await asyncio.sleep(60)", timeout_s=0.05),
            executor.execute("await asyncio.sleep(0, 'usable')"),
        ]

    awaited, plain, late, usable = asyncio.run(main())
    assert awaited["stdout"] == "a\n'set'\n"
    assert plain["stdout"] == "'set'\n"
    assert late["exception"].startswith("TimeoutError: ")
    assert usable["stdout"] == "'usable'\n"


def test_an_interrupt_from_outside_passes_through(executor: PythonExecutor) -> None:
    stdout = sys.stdout
    with pytest.raises(KeyboardInterrupt):
        executor.execute("import signal\nx = 1\nsignal.raise_signal(signal.SIGINT)")
    code = "import asyncio\nsoon = asyncio.get_running_loop().call_soon\nh = soon(signal.raise_signal, signal.SIGINT)\n"
    with pytest.raises(KeyboardInterrupt):
        executor.execute(f"{code}await asyncio.sleep(60)")
    assert sys.stdout is stdout
    assert out(executor, "x") == "1\n"
    assert out(executor, "await asyncio.sleep(0, 2)") == "2\n"


@pytest.mark.parametrize(
    "code",
    [
        *("x = 'lone \udc80 surrogate'", "x = 1\x00", "%no_such_magic", "%%no_such_cell_magic\nx", "for", "(" * 500),
        *(
            "raise SystemExit",
            "raise GeneratorExit",
            "return 1",
            "globals().clear()",
            "del __builtins__",
            "__builtins__ = 3",
        ),
        *("class E(Exception):\n    def __str__(self): raise ValueError\nraise E"),
        *("import sys; sys.stdout = None; sys.stderr = None\nprint('into nothing')", "get_ipython().user_ns = {}"),
    ],
)
def test_no_code_harms_what_comes_after_it(executor: PythonExecutor, code: str) -> None:
    executor.execute(code)
    assert out(executor, "import sys\nprint('usable')\nlen('abc')") == "usable\n3\n"


def test_an_ordinary_error_group_is_shown(executor: PythonExecutor) -> None:
    result = executor.execute("raise ExceptionGroup('several', [ValueError('one')])")
    assert "ValueError: one" in result["stderr"]
    assert result["exception"].startswith("ExceptionGroup: several")


def test_an_executor_that_is_busy_refuses_further_code(executor: PythonExecutor) -> None:
    executor.set_variable("again", executor.execute)
    assert "running a block already" in executor.execute("again('1')")["exception"]
    inside, go_on = threading.Event(), threading.Event()
    executor.set_variable("inside", inside)
    executor.set_variable("go_on", go_on)
    thread = threading.Thread(target=lambda: executor.execute("inside.set()\ngo_on.wait(10)"))
    thread.start()
    inside.wait(10)
    with pytest.raises(RuntimeError, match="running a block already"):
        executor.execute("1")
    go_on.set()
    thread.join()


def test_an_interrupt_of_a_command_kills_it_with_what_it_started() -> None:
    said: list[str] = []

    def interrupted(text: str) -> None:
        said.append(text)
        raise KeyboardInterrupt

    commands = Commands()
    with pytest.raises(KeyboardInterrupt):
        commands.run("sleep 60 & echo $!; wait", interrupted)
    assert gone(int(said[0]))
    assert commands.run("exit 3", said.append) == 3


def gone(pid: int) -> bool:
    """Tell whether a process ends within some seconds; it is no child of ours."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with contextlib.closing(os.fdopen(fd)):
        return bool(select.select([fd], [], [], 10)[0])


# -- whose output it is


def test_two_executors_in_two_threads_do_not_mix(executor: PythonExecutor, other: PythonExecutor) -> None:
    meet = threading.Barrier(2, timeout=20)
    code = """
import sys, asyncio
from IPython.display import display as shown
from IPython import get_ipython as found
for n in range(20):
    meet()
    print(me, n)
    print(me, 'err', n, file=sys.stderr)
    shown(me)
    assert found() is get_ipython()
    !echo {me}
await asyncio.sleep(0)
meet()
me
"""
    results: dict[str, dict[str, Any]] = {}

    def run(each: PythonExecutor, me: str) -> None:
        each.inject_function("meet", meet.wait)
        each.set_variable("me", me)
        results[me] = each.execute(code)

    threads = [threading.Thread(target=run, args=pair) for pair in ((executor, "one"), (other, "two"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for me in ("one", "two"):
        lines = [line for n in range(20) for line in (f"{me} {n}", repr(me), me)]
        assert results[me]["stdout"].splitlines() == [*lines, repr(me)]
        assert results[me]["stderr"].splitlines() == [f"{me} err {n}" for n in range(20)]


def test_threads_without_a_block_print_where_they_would(executor: PythonExecutor, capsys) -> None:
    inside, go_on = threading.Event(), threading.Event()
    executor.set_variable("inside", inside)
    executor.set_variable("go_on", go_on)
    results: list[Any] = []
    code = "inside.set()\ngo_on.wait(10)\nprint('mine')"
    thread = threading.Thread(target=lambda: results.append(executor.execute(code)))
    thread.start()
    inside.wait(10)
    print("outside")
    sys.stdout.write("more\n")
    print("to stderr", file=sys.stderr)
    go_on.set()
    thread.join()
    assert capsys.readouterr() == ("outside\nmore\n", "to stderr\n")
    assert results[0]["stdout"] == "mine\n"


def test_threads_that_code_starts_belong_to_it(executor: PythonExecutor, capsys) -> None:
    code = """
import threading, asyncio
from concurrent.futures import ThreadPoolExecutor
t = threading.Thread(target=lambda: (print('thread'), display('shown')))
t.start(); t.join()
with ThreadPoolExecutor(1) as pool: pool.submit(print, 'pool').result()
await asyncio.to_thread(print, 'to_thread')
"""
    assert out(executor, code) == "thread\n'shown'\npool\nto_thread\n"
    assert capsys.readouterr() == ("", "")


def test_a_thread_that_lives_on_prints_into_its_own_environment_or_nowhere_in_another(
    executor: PythonExecutor, other: PythonExecutor, capsys
) -> None:
    class Steps:
        go_on, done = threading.Semaphore(0), threading.Semaphore(0)

        def let(self) -> None:
            self.go_on.release()
            self.done.acquire(timeout=10)

    steps = Steps()
    executor.set_variable("steps", steps)
    other.set_variable("steps", steps)
    out(
        executor,
        "import threading\ndef run():\n    for n in range(3):\n        steps.go_on.acquire(timeout=10)\n        print(n)\n"
        "        steps.done.release()\nt = threading.Thread(target=run)\nt.start()",
    )
    assert out(executor, "steps.let()") == "0\n"
    steps.let()
    assert capsys.readouterr().out == "1\n"
    assert out(other, "steps.let()") == ""
    assert capsys.readouterr().out == "2\n"
    executor.get_variable("t").join()


def test_a_handler_that_kept_the_stream_goes_on_to_work(executor: PythonExecutor, capsys) -> None:
    out(executor, "import logging, sys\nhandler = logging.StreamHandler(sys.stderr)")
    handler: logging.Handler = executor.get_variable("handler")
    record = logging.makeLogRecord({"msg": "hello"})
    executor.set_variable("record", record)
    assert executor.execute("handler.emit(record)")["stderr"] == "hello\n"
    handler.emit(record)
    assert capsys.readouterr().err == "hello\n"


def test_code_that_redirects_or_replaces_the_stream_gets_what_it_asked_for(executor: PythonExecutor) -> None:
    stdout = sys.stdout
    out(executor, "import contextlib, io\nbuffer = io.StringIO()")
    code = "with contextlib.redirect_stdout(buffer): print('in')\nprint('after')\nbuffer.getvalue()"
    assert out(executor, code) == "after\n'in\\n'\n"
    assert out(executor, "import sys\nsys.stdout = io.StringIO()\nprint('lost')") == ""
    assert sys.stdout is stdout
    assert out(executor, "sys.stdout.close()\nprint('still there')") == "still there\n"
    assert (
        out(executor, "sys.stdout.isatty(), sys.stdout.encoding.lower(), sys.stdout.writable()")
        == "(False, 'utf-8', True)\n"
    )


def test_the_stream_is_put_back_for_the_others_when_a_block_that_replaced_it_ends(
    executor: PythonExecutor, other: PythonExecutor
) -> None:
    inside, go_on = threading.Event(), threading.Event()
    executor.set_variable("inside", inside)
    executor.set_variable("go_on", go_on)
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(executor.execute("inside.set()\ngo_on.wait(10)\nprint('mine')"))
    )
    thread.start()
    inside.wait(10)
    other.execute("import sys, io\nsys.stdout = io.StringIO()")
    go_on.set()
    thread.join()
    assert results[0]["stdout"] == "mine\n"


def test_a_block_that_begins_while_another_one_has_replaced_the_stream_is_captured(
    executor: PythonExecutor, other: PythonExecutor
) -> None:
    inside, go_on = threading.Event(), threading.Event()
    executor.set_variable("inside", inside)
    executor.set_variable("go_on", go_on)
    code = "import sys, io\nsys.stdout = io.StringIO()\ninside.set()\ngo_on.wait(10)"
    thread = threading.Thread(target=executor.execute, args=(code,))
    thread.start()
    inside.wait(10)
    seen = out(other, "print('mine')")
    go_on.set()
    thread.join()
    assert seen == "mine\n"


def test_an_environment_inside_the_code_of_another_one_keeps_its_output(
    executor: PythonExecutor, other: PythonExecutor
) -> None:
    executor.set_variable("other", other)
    assert out(executor, "print('before')\nr = other.execute('print(1)')\nprint('after')\nr['stdout']") == (
        "before\nafter\n'1\\n'\n"
    )


# -- many


def test_many_threads_at_once_leave_the_process_as_it_was() -> None:
    before = globals_of_the_process()
    failures: list[Any] = []

    def work(me: int) -> None:
        made = PythonExecutor()
        try:
            for n in range(5):
                result = made.execute(f"print({me}, {n})\n{me}", timeout_s=30)
                if result["stdout"] != f"{me} {n}\n{me}\n":
                    failures.append(result)
        finally:
            made.close()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert globals_of_the_process() == before
