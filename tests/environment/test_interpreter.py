"""Promises of `rlm_kernel.environment.interpreter`, on the shell that children use."""

from __future__ import annotations

import asyncio
import atexit
import io
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rlm_kernel.environment.interpreter import REPR_LIMIT, Interpreter, make_shell, short_repr
from rlm_kernel.values import CodeResult


@pytest.fixture(scope="module")
def shell() -> Iterator[Any]:
    from IPython.core.async_helpers import get_asyncio_loop
    from IPython.core.interactiveshell import InteractiveShell

    made = make_shell()
    made.run_cell("import asyncio\nawait asyncio.sleep(0)")  # the shell keeps the loop that its first await makes
    yield made
    get_asyncio_loop().close()
    made.restore_sys_module_state()
    atexit.unregister(made.atexit_operations)
    made.atexit_operations()
    InteractiveShell.clear_instance()


@pytest.fixture
def repl(shell: Any) -> Iterator[Interpreter]:
    kept = dict(shell.user_ns)
    yield Interpreter(shell, echo=False)
    shell.user_ns.clear()
    shell.user_ns.update(kept)


def ok(result: CodeResult) -> str:
    assert result.success, result
    assert result.exception is None
    return result.stdout


def test_a_block_shows_what_it_prints_and_the_repr_of_its_trailing_expression(repl: Interpreter) -> None:
    assert ok(repl.execute("print('a')\nx = [1, 2]\nx")) == "a\n[1, 2]\n"
    assert ok(repl.execute("x;")) == ""
    assert ok(repl.execute("None")) == ""
    assert ok(repl.execute("")) == ""


def test_display_and_rich_objects_become_plain_text(repl: Interpreter) -> None:
    assert ok(repl.execute("display({'a': 1})")) == "{'a': 1}\n"
    assert (
        ok(repl.execute("from IPython.display import HTML\nHTML('<b>x</b>')")) == "<IPython.core.display.HTML object>\n"
    )


def test_an_error_is_a_traceback_without_colours_and_one_line(repl: Interpreter) -> None:
    result = repl.execute("def f():\n    return 1 / 0\nprint('before')\nf()")
    assert not result.success
    assert result.exception == "ZeroDivisionError: division by zero"
    assert result.stdout == "before\n"
    assert "return 1 / 0" in result.stderr
    assert "\x1b" not in result.stderr


def test_a_notebook_with_colours_gives_the_model_none(repl: Interpreter, shell: Any) -> None:
    try:
        shell.colors = "linux"
        result = repl.execute("1 / 0")
    finally:
        shell.colors = "nocolor"
    assert "ZeroDivisionError: division by zero" in result.stderr
    assert "\x1b" not in result.stderr


def test_an_error_without_text_is_its_name(repl: Interpreter) -> None:
    assert repl.execute("raise ValueError").exception == "ValueError"


def test_a_syntax_error_is_shown_like_any_other(repl: Interpreter) -> None:
    result = repl.execute("x = )\n")
    assert not result.success
    assert result.exception is not None
    assert result.exception.startswith("SyntaxError")
    assert "SyntaxError" in result.stderr


def test_an_error_in_the_middle_keeps_the_assignments_before_it(repl: Interpreter) -> None:
    result = repl.execute("a = 1\nb = a + 1\nraise KeyError('x')\nc = 3")
    assert result.new_locals == {"a": "1", "b": "2"}
    assert ok(repl.execute("a + b")) == "3\n"


def test_new_names_are_listed_with_short_reprs_and_private_ones_are_not(repl: Interpreter) -> None:
    result = repl.execute("text = 'x' * 10**6\nnumbers = list(range(10**6))\n_hidden = 1\n")
    assert set(result.new_locals) == {"text", "numbers"}
    assert all(len(shown) <= REPR_LIMIT for shown in result.new_locals.values())
    assert repl.execute("text = 2\nmore = 3").new_locals == {"more": "3"}


def test_a_repr_that_raises_or_is_huge_breaks_nothing(repl: Interpreter) -> None:
    result = repl.execute("class Bad:\n    def __repr__(self): raise RuntimeError('no repr')\nbad = Bad()\nbad")
    assert result.new_locals["bad"] == "<Bad; its repr raised RuntimeError>" or "Bad" in result.new_locals["bad"]
    assert "RuntimeError: no repr" in result.stderr
    result = repl.execute("class Big:\n    def __repr__(self): return 'y' * 10**7\nbig = Big()\nbig")
    assert len(result.new_locals["big"]) <= REPR_LIMIT
    assert len(result.stdout) < 300_000
    assert "characters left out" in result.stdout


def test_short_repr_survives_whatever_a_repr_does() -> None:
    class Bad:
        def __repr__(self) -> str:
            raise ValueError

    assert "Bad" in short_repr(Bad())
    recursive: list[Any] = []
    recursive.append(recursive)
    assert short_repr(recursive).startswith("[")


def test_output_is_bounded_with_head_tail_and_count(repl: Interpreter) -> None:
    out = ok(repl.execute("print('BEGIN')\nfor i in range(100_000): print('x' * 50)\nprint('END')"))
    assert len(out) < 300_000
    assert out.startswith("BEGIN\nxxx")
    assert out.endswith("xxx\nEND\n")
    assert "of 5100010 characters left out" in out


def test_magics_and_shell_commands_work(repl: Interpreter) -> None:
    assert ok(repl.execute("!echo from-the-shell")).strip() == "from-the-shell"
    assert ok(repl.execute("lines = !printf 'a\\nb'\nlist(lines)")) == "['a', 'b']\n"
    assert "per loop" in ok(repl.execute("%timeit -n1 -r1 1"))
    assert ok(repl.execute("%%capture caught\nprint('inside')")) == ""
    assert ok(repl.execute("caught.stdout")) == "'inside\\n'\n"


def test_top_level_await_works(repl: Interpreter) -> None:
    assert ok(repl.execute("import asyncio\nx = await asyncio.sleep(0, 'done')\nx")) == "'done'\n"


def test_top_level_await_works_while_a_loop_is_running(repl: Interpreter) -> None:
    """In the notebook a cell runs inside the kernel's own loop."""

    async def main() -> list[CodeResult]:
        code = "import asyncio\nprint('a')\nx = await asyncio.sleep(0, 'done')\nx"
        return [repl.execute(code), repl.execute("x + '!'"), repl.execute("await asyncio.sleep(0)\n1 / 0")]

    awaited, plain, failed = asyncio.run(main())
    assert ok(awaited) == "a\n'done'\n"
    assert ok(plain) == "'done!'\n"
    assert failed.exception == "ZeroDivisionError: division by zero"
    assert not [t for t in threading.enumerate() if t.name == "rlm-await"]


def test_context_variables_reach_a_block_that_awaits(repl: Interpreter) -> None:
    import contextvars

    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    repl.namespace["variable"] = variable

    async def main() -> CodeResult:
        variable.set("set")
        return repl.execute("import asyncio\nawait asyncio.sleep(0)\nvariable.get()")

    assert ok(asyncio.run(main())) == "'set'\n"


def test_exit_ends_nothing_and_says_what_to_do(repl: Interpreter) -> None:
    assert "FINAL" in ok(repl.execute("exit()"))
    assert "FINAL" in ok(repl.execute("quit"))
    assert ok(repl.execute("'alive'")) == "'alive'\n"


@pytest.mark.filterwarnings("ignore:To exit")
def test_sys_exit_is_an_error_of_the_block_alone(repl: Interpreter) -> None:
    result = repl.execute("import sys\nx = 1\nsys.exit(3)")
    assert not result.success
    assert result.exception == "SystemExit: 3"
    assert ok(repl.execute("x")) == "1\n"


def test_input_raises_at_once_where_there_is_nobody_to_ask(repl: Interpreter, monkeypatch) -> None:
    with open("/dev/null") as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        result = repl.execute("input('your name? ')")
    assert not result.success
    assert "EOFError" in str(result.exception)


def test_code_in_a_block_cannot_enter_the_same_repl(repl: Interpreter) -> None:
    repl.namespace["repl"] = repl
    result = repl.execute("repl.execute('x = 1')")
    assert not result.success
    assert "running a block already" in str(result.exception)
    assert ok(repl.execute("1")) == "1\n"


def test_an_interrupt_passes_through_and_leaves_the_repl_usable(repl: Interpreter) -> None:
    stdout = sys.stdout
    with pytest.raises(KeyboardInterrupt):
        repl.execute("import signal\nx = 1\nsignal.raise_signal(signal.SIGINT)\nx = 2")
    assert sys.stdout is stdout
    assert ok(repl.execute("x")) == "1\n"


def test_a_subclass_of_keyboard_interrupt_passes_through_as_itself(repl: Interpreter) -> None:
    """A child's cooperative stop is one."""

    class Stop(KeyboardInterrupt):
        pass

    repl.namespace["Stop"] = Stop
    with pytest.raises(Stop):
        repl.execute("raise Stop('asked to')")


def test_an_interrupt_of_a_block_that_awaits_unwinds_the_coroutine_first(repl: Interpreter) -> None:
    unwound = repl.namespace["unwound"] = []

    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    repl.namespace["interrupt"] = interrupt
    code = "import asyncio\ntry:\n    interrupt()\n    await asyncio.sleep(30)\nfinally:\n    unwound.append(1)"

    async def main() -> None:
        repl.execute(code)

    # Not asyncio.run: its own handler of SIGINT would take the signal.
    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(main())
    finally:
        loop.close()
    assert unwound == [1]
    for thread in threading.enumerate():
        if thread.name == "rlm-await":
            thread.join(5)
    assert ok(repl.execute("1")) == "1\n"


def test_a_task_that_the_code_cancelled_itself_is_an_error_of_the_code(repl: Interpreter) -> None:
    result = repl.execute("import asyncio\nt = asyncio.ensure_future(asyncio.sleep(9))\nt.cancel()\nawait t")
    assert not result.success
    assert result.exception == "CancelledError"


def attributes(shell: Any) -> dict[str, object]:
    names = ("displayhook", "display_pub", "_showtraceback", "ask_exit")
    return {name: getattr(shell, name, None) for name in names} | {
        "hook": shell.display_trap.hook,
        "set": sorted(vars(shell)),
    }


@pytest.mark.parametrize("code", ["1", "1/0", "import signal; signal.raise_signal(signal.SIGINT)", "x = ("])
def test_the_shell_and_the_streams_are_put_back(repl: Interpreter, shell: Any, code: str) -> None:
    repl.execute("1")
    before, streams, hook = attributes(shell), (sys.stdout, sys.stderr), sys.displayhook
    try:
        repl.execute(code)
    except KeyboardInterrupt:
        pass
    assert attributes(shell) == before
    assert (sys.stdout, sys.stderr) == streams
    assert sys.displayhook is hook


def test_attributes_that_were_set_on_the_shell_itself_are_put_back_too(repl: Interpreter, shell: Any) -> None:
    """Kernels and debuggers set some on the instance."""
    own = {"_showtraceback": lambda *_: None, "ask_exit": lambda: None}
    try:
        for name, value in own.items():
            setattr(shell, name, value)
        repl.execute("1/0")
        assert {name: vars(shell)[name] for name in own} == own
    finally:
        for name in own:
            delattr(shell, name)


def test_streams_are_put_back_when_the_code_replaces_them(repl: Interpreter) -> None:
    streams = (sys.stdout, sys.stderr)
    repl.execute("import sys, io\nsys.stdout = io.StringIO()\nprint('lost')")
    assert (sys.stdout, sys.stderr) == streams


def test_the_last_results_of_the_notebook_survive_a_block(repl: Interpreter) -> None:
    repl.namespace.update({"_": "mine", "__": "older", "___": "oldest"})
    ok(repl.execute("1 + 1"))
    assert [repl.namespace[name] for name in ("_", "__", "___")] == ["mine", "older", "oldest"]


def test_a_block_may_use_an_underscore_that_an_earlier_block_set(repl: Interpreter) -> None:
    ok(repl.execute("_ = str.upper"))
    assert ok(repl.execute("_('a')")) == "'A'\n"


def test_the_binary_side_of_stdout_can_be_used(repl: Interpreter, monkeypatch, tmp_path) -> None:
    with (tmp_path / "out").open("w") as below:
        monkeypatch.setattr(sys, "stdout", below)
        result = repl.execute(
            "import sys, subprocess\nn = sys.stdout.buffer.write(b'raw\\n')\nsys.stdout.flush()\nfd = sys.stdout.fileno()\n"
            "sys.stdout.buffer.flush()\ncode = subprocess.run(['echo', 'sub'], stdout=sys.stdout).returncode"
        )
        monkeypatch.undo()
    assert result.success, result
    assert (tmp_path / "out").read_text() == "raw\nsub\n"


def test_output_goes_on_to_the_stream_below_if_wanted(shell: Any, monkeypatch) -> None:
    below = io.StringIO()
    monkeypatch.setattr(sys, "stdout", below)
    result = Interpreter(shell).execute("print('the key')")
    monkeypatch.undo()
    assert (result.stdout, below.getvalue()) == ("the key\n", "the key\n")


def test_nothing_is_kept_in_a_history(repl: Interpreter, shell: Any) -> None:
    before = shell.execution_count
    repl.execute("x = 1")
    assert shell.execution_count == before
    assert not shell.history_manager.enabled
