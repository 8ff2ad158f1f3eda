"""An IPython shell that leaves the process around it alone: the shell of in-process environments.

`ThreadShell` runs code as every IPython shell does (magics, ``!cmd``, top-level await, the value of a trailing
expression), but is no singleton and puts nothing into ``sys`` or ``builtins``: no ``__main__``, no display hook, no exception
hook, no prompt, no exit hook, no history, no profile folder, no thread. What IPython would put into ``builtins`` is in the
``__builtins__`` of its own namespace. While its code runs, ``IPython.get_ipython()`` and ``IPython.display.display()`` find this
shell in the threads that run this code, and only there, also beside the shell of a kernel.

Who runs it: whichever thread calls it, one at a time. It owns its event loop (made by the first cell that awaits; tasks stay
alive between cells) and, through `Commands`, the process of a ``!cmd``. `close` releases them.
"""

from __future__ import annotations

import ast
import asyncio
import atexit
import builtins
import contextlib
import linecache
import subprocess
import sys
import types
import weakref
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from typing import Any, cast

from IPython.core.builtin_trap import BuiltinTrap
from IPython.core.display_functions import display
from IPython.core.display_trap import DisplayTrap
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from IPython.utils.text import LSString, SList
from traitlets.config import Config

from rlm_kernel.environment.commands import Commands, start_process
from rlm_kernel.environment.routing import SharedHook, current_scope
from rlm_kernel.errors import ConfigurationError

_SHOW = "__rlm_show__"
"""Name, in the shell's own builtins, of what shows the value of a trailing expression."""

_UNWIND_S = 0.5
"""Seconds that interrupted tasks are given to unwind."""


class _NoBuiltinTrap(BuiltinTrap):
    def activate(self) -> None:
        pass

    def deactivate(self) -> None:
        pass


class _NoDisplayTrap(DisplayTrap):
    def set(self) -> None:
        pass

    def unset(self) -> None:
        pass


def make_thread_shell(allowed_imports: Collection[str] | None = None) -> ThreadShell:
    """Build a shell for one in-process environment.

    Args:
        allowed_imports: names of the modules that code may import, None for all. No security boundary: code that wants to
            get around it can.
    """
    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryManager.hist_file = ":memory:"
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.cache_size = 0
    return ThreadShell(allowed_imports, config=config)


class ThreadShell(InteractiveShell):
    """See the module; made by `make_thread_shell`."""

    by_thread = True
    """Tells an `Interpreter` to capture by scope and not for the whole process."""

    spared = (start_process,)
    """What a timeout lets finish."""

    def __init__(self, allowed_imports: Collection[str] | None, **kwargs: Any) -> None:
        self._allowed_imports = None if allowed_imports is None else check_allowed_imports(allowed_imports)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_finalizer: Callable[[], object] | None = None
        self._commands = Commands()
        self._code_names: set[str] = set()
        self._last_error: tuple[Any, Any, Any] = (None, None, None)
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        atexit.unregister(self.atexit_operations)
        self.loop_runner = self._run_coroutine

    # -- what the base class would do to the process

    def init_ipython_dir(self, ipython_dir: Any) -> None:
        """No folder is made or read."""

    def init_profile_dir(self, profile_dir: Any) -> None:
        """No profile."""

    def init_virtualenv(self) -> None:
        """``sys.path`` stays as it is."""

    def save_sys_module_state(self) -> None:
        """Nothing in ``sys`` is changed."""

    def restore_sys_module_state(self) -> None:
        """Nothing in ``sys`` was changed."""

    def init_sys_modules(self) -> None:
        """``__main__`` stays whose it is."""

    def init_prompts(self) -> None:
        """No ``sys.ps1``."""

    def init_completer(self) -> None:
        """Nobody types here."""

    def init_builtins(self) -> None:
        self.builtin_trap = _NoBuiltinTrap(shell=self)

    def init_displayhook(self) -> None:
        super().init_displayhook()  # type: ignore[no-untyped-call]
        self.display_trap = _NoDisplayTrap(hook=self.displayhook)  # type: ignore[no-untyped-call]

    def init_user_ns(self) -> None:
        super().init_user_ns()  # type: ignore[no-untyped-call]
        self.furnish()

    def furnish(self) -> None:
        """Give the namespace its own ``__builtins__``, should it have lost them."""
        own = vars(builtins).copy()
        own.update(
            {
                "get_ipython": self.get_ipython,
                "display": display,
                "input": _no_input,
                "__IPYTHON__": True,
                _SHOW: lambda value: self.displayhook(value),
            }
        )
        if self._allowed_imports is not None:
            own["__import__"] = _guarded_import(self._allowed_imports)
        self.user_global_ns["__builtins__"] = own

    def renew_namespace(self) -> None:
        """Begin with a fresh module and namespace. What old code still refers to stays intact."""
        self.init_create_namespaces(None, None)  # type: ignore[no-untyped-call]
        self.init_user_ns()
        self._last_error = (None, None, None)
        self._forget_code()

    def hidden_names(self) -> frozenset[str]:
        """Return the names in the namespace that this shell put there."""
        return frozenset(self.user_ns_hidden)

    # -- running code

    async def run_ast_nodes(
        self,
        nodelist: list[ast.stmt],
        cell_name: str,
        interactivity: str = "last_expr",
        compiler: Any = compile,
        result: Any = None,
    ) -> Any:
        self._code_names.add(cell_name)
        shown = {"all": nodelist, "last": nodelist[-1:], "last_expr": nodelist[-1:]}.get(interactivity)
        if shown is not None:
            # Not by the "single" mode of compiling, which calls the process's one sys.displayhook.
            nodes = [*nodelist[: len(nodelist) - len(shown)], *map(_showing, shown)]
            nodelist, interactivity = nodes, "none"
        return await super().run_ast_nodes(nodelist, cell_name, interactivity, compiler, result)

    async def run_code(
        self, code_obj: types.CodeType, result: ExecutionResult | None = None, *, async_: bool = False
    ) -> bool:
        """Run a code object; an error is shown and kept in ``result``. ``sys.excepthook`` is left alone."""
        try:
            if async_:
                await eval(code_obj, self.user_global_ns, self.user_ns)
            else:
                exec(code_obj, self.user_global_ns, self.user_ns)
        except BaseException as error:
            if result is not None:
                result.error_in_exec = error
            frames = error.__traceback__
            if frames is not None and frames.tb_next is not None:
                error.__traceback__ = frames.tb_next  # this frame is none of the user's
            self.showtraceback(exception_only=isinstance(error, SystemExit), running_compiled_code=True)
            return True
        return False

    def _get_exc_info(self, exc_tuple: Any = None) -> Any:
        """The same as in the base class, without ``sys.last_value`` and its like."""
        found = sys.exc_info() if exc_tuple is None else exc_tuple
        if found[0] is None:
            found = self._last_error
        if found[0] is None:
            raise ValueError("there is no exception")
        self._last_error = found
        return found

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run the coroutine of a cell in this shell's own loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop_finalizer = weakref.finalize(self, self._loop.close)
        loop = self._loop
        task = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(task)
        except BaseException:
            self._cancel(loop, [task])
            if task.done() and not task.cancelled():
                task.exception()  # asked for, so that the loop does not log it
            raise

    def _cancel(self, loop: asyncio.AbstractEventLoop, tasks: Collection[asyncio.Task[Any]]) -> None:
        tasks = [task for task in tasks if not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=_UNWIND_S))

    # -- commands of the system

    def system(self, cmd: str) -> None:
        """Run ``!cmd``; what it prints is printed as it comes. The exit code is left in ``_exit_code``."""
        command = self._expanded(cmd)
        self.user_ns["_exit_code"] = self._commands.run(command, lambda text: sys.stdout.write(text))
        self._check_exit(cmd)

    system_piped = system_raw = system

    def getoutput(self, cmd: str, split: bool = True, depth: int = 0) -> Any:
        """Run ``x = !cmd`` and return what it printed."""
        command = self._expanded(cmd, depth)
        parts: list[str] = []
        self.user_ns["_exit_code"] = self._commands.run(command, parts.append)
        self._check_exit(cmd)
        text = "".join(parts)
        return SList(text.splitlines()) if split else LSString(text)

    def _expanded(self, cmd: str, depth: int = 0) -> str:
        if cmd.rstrip().endswith("&"):
            raise OSError(f"{cmd!r}: a command cannot be left running in the background here; use subprocess.Popen")
        return cast(str, self.var_expand(cmd, depth=depth + 2))  # type: ignore[no-untyped-call]

    def _check_exit(self, cmd: str) -> None:
        code = self.user_ns["_exit_code"]
        if self.system_raise_on_error and code:
            raise subprocess.CalledProcessError(code, cmd)

    # -- from other threads

    def wake(self) -> None:
        """End what keeps a thread that runs code here from its next bytecode: a command, an idle event loop."""
        loop = self._loop
        self._commands.kill()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                loop.call_soon_threadsafe(_nothing)

    def cancel_tasks(self) -> None:
        """Cancel the tasks of a cell that runs on another thread."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])

    @contextlib.contextmanager
    def found_by_its_code(self) -> Iterator[None]:
        """Let ``get_ipython()`` and ``display()`` of libraries find the shell whose code they run for."""
        with _instance_hook:
            yield

    # -- the end

    def close(self) -> None:
        """Release the event loop, the namespace, and what magics and tracebacks keep. The shell is not used again."""
        loop, self._loop = self._loop, None
        if loop is not None and self._loop_finalizer is not None:
            with contextlib.suppress(RuntimeError):  # one loop cannot run inside another; the tasks are dropped
                self._cancel(loop, asyncio.all_tasks(loop))
            self._loop_finalizer()
        for magics in list(self.magics_manager.registry.values()):
            if hasattr(magics, "kill_bg_processes"):
                atexit.unregister(magics.kill_bg_processes)
                magics.kill_bg_processes()
            if hasattr(magics, "stop_event_loop"):
                magics.stop_event_loop()
        self._forget_code()
        self._last_error = (None, None, None)
        self.init_create_namespaces(None, None)  # type: ignore[no-untyped-call]
        if self.history_manager is not None:
            self.history_manager.close()

    def _forget_code(self) -> None:
        for name in self._code_names:
            linecache.cache.pop(name, None)
        self._code_names.clear()


def _showing(node: ast.stmt) -> ast.stmt:
    """Turn an expression statement into one that shows its value."""
    if not isinstance(node, ast.Expr):
        return node
    call = ast.Call(ast.Name(_SHOW, ast.Load()), [node.value], [])
    return ast.fix_missing_locations(ast.copy_location(ast.Expr(ast.copy_location(call, node)), node))


def _no_input(prompt: object = "", /) -> str:
    raise EOFError("input() has nobody to ask here")


def _nothing() -> None:
    pass


def check_allowed_imports(names: Collection[str]) -> tuple[str, ...]:
    """Return the names as a tuple.

    Raises:
        ConfigurationError: it is no collection of names.
    """
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise ConfigurationError("allowed_imports", names, "must be a collection of module names, or None for all")
    return tuple(names)


def _guarded_import(allowed: Sequence[str]) -> Callable[..., Any]:
    """Build an ``__import__`` for the code of one namespace; the libraries' own imports do not come this way."""

    def guarded(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> types.ModuleType:
        if level == 0 and not any(name == each or name.startswith(f"{each}.") for each in allowed):
            listed = ", ".join(sorted(allowed)) or "none"
            raise ImportError(f"import of {name!r} is not allowed here; allowed imports: {listed}", name=name)
        return builtins.__import__(name, globals, locals, fromlist, level)

    return guarded


class _Instance:
    """`InteractiveShell.instance` and `initialized`, asked first for the shell of the code that the calling thread runs."""

    def install(self) -> None:
        # They are inherited; so they can be shadowed on this class, and the shadow taken away.
        InteractiveShell.initialized = classmethod(_initialized)  # type: ignore[assignment]
        InteractiveShell.instance = classmethod(_instance)  # type: ignore[assignment]

    def remove(self) -> None:
        for name in ("initialized", "instance"):
            if name in vars(InteractiveShell):
                delattr(InteractiveShell, name)


def _shell_of_caller() -> Any:
    scope = current_scope()
    return None if scope is None else scope.shell


def _initialized(cls: type[InteractiveShell]) -> bool:
    shell = _shell_of_caller()
    if shell is not None and isinstance(shell, cls):
        return True
    return bool(super(InteractiveShell, cls).initialized())


def _instance(cls: type[InteractiveShell], *args: Any, **kwargs: Any) -> Any:
    shell = _shell_of_caller()
    if shell is not None and isinstance(shell, cls):
        return shell
    return super(InteractiveShell, cls).instance(*args, **kwargs)


_instances = _Instance()
_instance_hook = SharedHook(_instances.install, _instances.remove)
