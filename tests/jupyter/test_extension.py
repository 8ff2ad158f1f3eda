"""``%load_ext`` in a shell without a kernel: what comes in, what goes out again, and what a cell may not do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import rlm_kernel
from rlm_kernel.environment.interpreter import make_shell
from rlm_kernel.errors import UsageMistake
from rlm_kernel.jupyter import extension
from rlm_kernel.jupyter.extension import load_ipython_extension, unload_ipython_extension
from rlm_kernel.session.session import RLMSession
from rlm_kernel.values import CleanupReport


@pytest.fixture
def shell(monkeypatch, tmp_path) -> Iterator[InteractiveShell]:
    """A shell of the test's own, from which the extension is gone again afterwards."""
    for name in [n for n in os.environ if n.startswith("RLM_") and n != "RLM_KERNEL_TESTS"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RLM_RUN_DIR", str(tmp_path))
    InteractiveShell.clear_instance()  # one that another test has worked in
    made = make_shell()
    yield made
    unload_ipython_extension(made)
    InteractiveShell.clear_instance()


def session_of(shell: InteractiveShell) -> RLMSession:
    session: RLMSession = getattr(shell, extension._KEPT_AS).cells.rlm
    return session


def surroundings(shell: InteractiveShell) -> list[Any]:
    """Return what the extension touches, to be compared."""
    wake_up = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wake_up)
    return [
        dict(shell.user_ns),
        dict(shell.user_ns_hidden),
        {kind: set(named) for kind, named in shell.magics_manager.magics.items()},
        {name: list(calls) for name, calls in shell.events.callbacks.items()},
        list(shell.ast_transformers),
        [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        wake_up,
        set(vars(shell)) - {extension._KEPT_AS},
        {thread.name for thread in threading.enumerate() if thread.name == "rlm-signals"},
    ]


def test_unloading_undoes_everything_that_loading_did_and_both_can_be_repeated(shell) -> None:
    before = surroundings(shell)
    for _ in range(2):
        load_ipython_extension(shell)
        assert callable(shell.user_ns["rlm_query"])
        assert "rlm" in shell.magics_manager.magics["line"]
        assert "rlm_query" in shell.user_ns_hidden
        assert surroundings(shell) != before
        unload_ipython_extension(shell)
        assert surroundings(shell) == before
    unload_ipython_extension(shell)  # not loaded: nothing happens


def test_loading_twice_changes_nothing_and_says_so(shell, capsys) -> None:
    load_ipython_extension(shell)
    session, before = session_of(shell), surroundings(shell)
    assert capsys.readouterr().out == ""
    load_ipython_extension(shell)
    assert capsys.readouterr().out == "The RLM extension is loaded already.\n"
    assert session_of(shell) is session
    assert surroundings(shell) == before


def test_what_the_user_has_bound_to_our_names_stays_and_is_named(shell, capsys) -> None:
    shell.user_ns.update(context="mine", FINAL=5)
    load_ipython_extension(shell)
    assert (shell.user_ns["context"], shell.user_ns["FINAL"]) == ("mine", 5)
    line = capsys.readouterr().err
    assert "FINAL" in line
    assert "context" in line
    shell.run_cell("rlm_wait = 'rebound'; del FINAL")
    shell.run_cell("gave = FINAL(6)")
    assert shell.user_ns["gave"] == "FINAL(6)"
    unload_ipython_extension(shell)
    assert (shell.user_ns["context"], shell.user_ns["rlm_wait"]) == ("mine", "rebound")
    assert "FINAL" not in shell.user_ns


def test_a_magic_of_the_users_comes_back(shell) -> None:
    def mine(_line: str) -> str:
        return "mine"

    shell.register_magic_function(mine, "line", "rlm")
    load_ipython_extension(shell)
    assert shell.run_line_magic("rlm", "") != "mine"
    unload_ipython_extension(shell)
    assert shell.run_line_magic("rlm", "") == "mine"


def test_settings_come_from_the_shells_configuration_and_then_from_the_environment(shell, monkeypatch) -> None:
    shell.config.RLM.max_depth = 7
    shell.config.RLM.max_iterations = 8
    monkeypatch.setenv("RLM_MAX_ITERATIONS", "9")
    load_ipython_extension(shell)
    settings = session_of(shell).settings
    assert (settings["max_depth"], settings["max_iterations"]) == (7, 9)


def test_a_bad_setting_is_reported_with_the_first_cell(shell, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RLM_MAX_DEPTH", "deep")
    load_ipython_extension(shell)
    assert shell.run_cell("x = 1").success
    assert "RLM_MAX_DEPTH" in capsys.readouterr().err
    assert shell.run_cell("x = 2").success
    assert "RLM_MAX_DEPTH" not in capsys.readouterr().err


def test_it_loads_and_unloads_on_the_main_thread_only(shell) -> None:
    assert isinstance(from_another_thread(load_ipython_extension, shell), UsageMistake)
    assert not hasattr(shell, extension._KEPT_AS)
    load_ipython_extension(shell)
    assert isinstance(from_another_thread(unload_ipython_extension, shell), UsageMistake)
    assert hasattr(shell, extension._KEPT_AS)


def from_another_thread(call: Callable[[Any], None], shell: InteractiveShell) -> BaseException | None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call(shell)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_in_our_own_kernel_there_is_nothing_to_load(shell, capsys) -> None:
    extension.mark_built_in(shell)
    before = surroundings(shell)
    load_ipython_extension(shell)
    unload_ipython_extension(shell)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all("built in" in line for line in lines)
    assert surroundings(shell) == before
    delattr(shell, extension._KEPT_AS)


def fail_once(session: RLMSession, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """Let the next stops report a survivor."""
    real = session.supervisor.stop
    left = [CleanupReport("stop", survivors=(4194000,)) for _ in range(times)]
    monkeypatch.setattr(session.supervisor, "stop", lambda *args: left.pop() if left else real(*args))


def test_cells_are_refused_after_a_failed_cleanup_and_rlm_lines_are_not(shell, monkeypatch, capsys) -> None:
    load_ipython_extension(shell)
    fail_once(session_of(shell), monkeypatch)
    assert shell.run_cell("kept = 1; FINAL(2)").success
    assert "4194000" in capsys.readouterr().err
    refused = shell.run_cell("kept = 2")
    assert type(refused.error_before_exec).__name__ == "CellRefused"
    shown = capsys.readouterr().out
    assert shown.strip().startswith("ChildCleanupError: ")
    assert "%rlm cleanup" in shown
    assert shell.user_ns["kept"] == 1
    assert shell.run_cell("%rlm cleanup").success
    assert shell.run_cell("kept = 3").success
    assert session_of(shell).final_answer is not None


def test_unloading_is_refused_while_a_cleanup_fails_and_works_after_abandoning(shell, monkeypatch, capsys) -> None:
    load_ipython_extension(shell)
    fail_once(session_of(shell), monkeypatch, times=3)
    with pytest.raises(rlm_kernel.ChildCleanupError):
        unload_ipython_extension(shell)
    assert session_of(shell) is not None
    shell.run_cell("%rlm cleanup --abandon")
    unload_ipython_extension(shell)
    assert "4194000" in capsys.readouterr().err
    assert "rlm_query" not in shell.user_ns


def test_only_the_outermost_cell_gives_the_final_answer(shell) -> None:
    """A magic that runs cells of its own (``%run``, ``%%capture``) is no end of the cell."""
    load_ipython_extension(shell)
    shell.run_cell("FINAL(1)\nget_ipython().run_cell('x = 5')\n1 / 0")
    assert session_of(shell).final_answer is None
    shell.run_cell("FINAL(2)\nget_ipython().run_cell('1 / 0')")
    assert session_of(shell).finalization.final.value == 2  # type: ignore[union-attr]


def test_an_interrupt_between_two_statements_of_a_cell_stops_the_children_too(shell, monkeypatch) -> None:
    """IPython compiles one statement after the other; there the interrupt is no error of the cell's code."""
    load_ipython_extension(shell)
    closed: list[str] = []

    def close() -> CleanupReport:
        closed.append("close")
        return CleanupReport("close")

    monkeypatch.setattr(session_of(shell), "close", close)

    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(shell.compile), "__call__", interrupted)
        shell.run_cell("x = 1")
    assert closed == ["close"]


# -- the short name

OTHER = "whose = 'theirs'\nclass RLM: pass\n"


def python(code: str, *paths: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def site(tmp_path) -> Path:
    """A directory as ``site-packages`` is when both are installed: their package beside our module."""
    checkout = Path(rlm_kernel.__file__).resolve().parents[1]
    (tmp_path / "rlm").mkdir()
    (tmp_path / "rlm" / "__init__.py").write_text(OTHER)
    (tmp_path / "rlm.py").write_bytes((checkout / "rlm.py").read_bytes())
    (tmp_path / "rlm_kernel").symlink_to(checkout / "rlm_kernel")
    return tmp_path


def test_a_package_of_another_distribution_goes_before_our_short_name(site) -> None:
    assert python("import rlm; print(rlm.whose, hasattr(rlm, 'load_ipython_extension'))", site) == "theirs False"


def test_the_short_name_is_ours_where_nobody_else_has_it_and_imports_nothing_heavy(site) -> None:
    (site / "rlm" / "__init__.py").unlink()
    (site / "rlm").rmdir()
    code = "import rlm, sys; print(rlm.load_ipython_extension.__module__, 'IPython' in sys.modules)"
    assert python(code, site) == "rlm_kernel False"
