"""Run Python in this process, in a namespace of its own: the thin face of the interpreter that the whole project uses.

This is no sandbox. Code runs with all rights of this process; ``allowed_imports`` keeps a model on its task and stops
nobody who wants to get around it. Magics, ``!cmd`` and top-level ``await`` work. What a subprocess writes to the
inherited descriptors, and not through a pipe, goes to the process's own output and not into the result.

Who runs it: whichever thread calls, one at a time; several executors can run in several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from rlm_kernel.environment.capture import CAPTURE_LIMIT, shorten
from rlm_kernel.environment.interpreter import Interpreter
from rlm_kernel.errors import ConfigurationError
from rlm_kernel.values import CodeResult


class PythonExecutor:
    """A persistent namespace in which code runs.

    Args:
        max_output_length: characters of stdout, and of stderr, that one result shows.
        allowed_imports: names of the modules that code may import (with what lies below them), None for all.
    """

    def __init__(self, max_output_length: int = 8192, allowed_imports: Collection[str] | None = None) -> None:
        self.max_output_length = check_count("max_output_length", max_output_length)
        # Here, since it brings IPython with it.
        from rlm_kernel.environment.thread_shell import make_thread_shell

        self._shell = make_thread_shell(allowed_imports)
        self._interpreter = Interpreter(self._shell, capture_limit=max(CAPTURE_LIMIT, max_output_length))

    @property
    def namespace(self) -> dict[str, Any]:
        """The namespace itself."""
        return self._interpreter.namespace

    def execute(self, code: str, timeout_s: float | None = None) -> dict[str, Any]:
        """Run a block of code.

        Args:
            timeout_s: seconds after which it is interrupted, None for never.

        Returns:
            ``stdout, stderr, locals_snapshot, execution_time, success, exception``.

        Raises:
            KeyboardInterrupt: the block was interrupted from outside.
            RuntimeError: this executor is running code already.
        """
        return self.shown(self.run(code, timeout_s))

    def run(self, code: str, timeout_s: float | None = None) -> CodeResult:
        """The same, with the output as it was captured."""
        if not isinstance(code, str):
            raise TypeError(f"code={code!r}: must be text")
        return self._interpreter.execute(code, timeout_s=timeout_s)

    def shown(self, result: CodeResult) -> dict[str, Any]:
        """Return a result as `execute` does, its output cut to ``max_output_length``."""
        return {
            "stdout": shorten(result.stdout, self.max_output_length, result.stdout_length),
            "stderr": shorten(result.stderr, self.max_output_length, result.stderr_length),
            "locals_snapshot": dict(result.new_locals),
            "execution_time": result.duration_s,
            "success": result.success,
            "exception": result.exception,
        }

    def set_context(self, context: Any, variable_name: str = "context") -> None:
        """Bind the context."""
        self.set_variable(variable_name, context)

    def set_variable(self, name: str, value: Any) -> None:
        """Bind a name."""
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"name={name!r}: must be a Python identifier")
        self.namespace[name] = value

    def get_variable(self, name: str) -> Any:
        """Return the value of a name, None if it is not bound."""
        return self.namespace.get(name)

    def hidden_names(self) -> frozenset[str]:
        """Return the names in the namespace that come from the shell."""
        return self._shell.hidden_names()

    def list_variables(self) -> list[str]:
        """Return the names that are bound, functions that were injected included; none with a leading underscore."""
        hidden = self._shell.hidden_names()
        names = list(self.namespace)
        return [name for name in names if isinstance(name, str) and not name.startswith("_") and name not in hidden]

    def inject_function(self, name: str, func: Callable[..., Any]) -> None:
        """Bind a function that code may call."""
        if not callable(func):
            raise TypeError(f"{name}={func!r}: must be callable")
        self.set_variable(name, func)

    def reset(self) -> None:
        """Begin with an empty namespace: variables, the context and injected functions are gone."""
        self._shell.renew_namespace()

    def close(self) -> None:
        """Release what the executor holds. May be called twice; no code runs in it any more."""
        self._interpreter.forget_shell()
        self._shell.close()


def check_count(name: str, value: object, *, minimum: int = 1) -> int:
    """Return a whole number.

    Raises:
        ConfigurationError: it is none, or below the minimum.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigurationError(name, value, f"must be a whole number of at least {minimum}")
    return value
