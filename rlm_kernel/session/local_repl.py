"""The REPL of one run in this process: a shell of its own, with the functions that its code may call.

Who runs it: the thread of the run. It owns the shell, from `open_local_repl` to the end of that block.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlm_kernel.environment.finalization import Finalization
from rlm_kernel.environment.interpreter import Interpreter
from rlm_kernel.session.model_repl import ModelREPL
from rlm_kernel.session.models import ModelAccess
from rlm_kernel.values import CodeResult

_LEAST_S = 0.001
"""Seconds that a block is given at least: it is for the loop to notice that the time is up."""


class BoundedInterpreter(Interpreter):
    """An interpreter that is bounded in time and in the number of blocks.

    Args:
        shell: the shell.
        max_blocks: how many blocks may run.
        deadline: gives the `time.monotonic` value at which the time is up, None for never.
    """

    def __init__(self, shell: Any, *, max_blocks: int, deadline: Callable[[], float | None]) -> None:
        super().__init__(shell, echo=False)
        self._max_blocks = max_blocks
        self._deadline = deadline
        self._blocks = 0

    def execute(self, code: str, *, timeout_s: float | None = None) -> CodeResult:
        if self._blocks >= self._max_blocks:
            note = f"LimitReached: this run may run {self._max_blocks} blocks of code, and has; hand in the answer"
            return CodeResult(stderr=f"{note}\n", success=False, exception=note)
        self._blocks += 1
        due = self._deadline()
        if timeout_s is None and due is not None:
            timeout_s = max(_LEAST_S, due - time.monotonic())
        return super().execute(code, timeout_s=timeout_s)


@contextlib.contextmanager
def open_local_repl(
    context: Any,
    functions: Mapping[str, Callable[..., Any]],
    models: ModelAccess,
    *,
    task: str | None,
    max_blocks: int,
    deadline: Callable[[], float | None],
) -> Iterator[ModelREPL]:
    """Make a REPL, and release it at the end of the block.

    Args:
        context: what the code finds in ``context``.
        functions: what it can call.
        models: whose calls are recorded per block.
        task: what the code finds in ``task``, None for no such variable.
        max_blocks, deadline: see `BoundedInterpreter`.
    """
    from rlm_kernel.environment.thread_shell import make_thread_shell  # IPython takes its time to import

    shell = make_thread_shell()
    interpreter = BoundedInterpreter(shell, max_blocks=max_blocks, deadline=deadline)
    try:
        extra = {} if task is None else {"task": task}
        names = {*functions, *extra, "FINAL", "FINAL_VAR", "SHOW_VARS", "context", "answer"}
        hidden = frozenset(names) | shell.hidden_names()
        finalization = Finalization(lambda: interpreter.namespace, lambda: hidden)
        restore = {
            **functions,
            "FINAL": finalization.FINAL,
            "FINAL_VAR": finalization.FINAL_VAR,
            "SHOW_VARS": finalization.SHOW_VARS,
        }
        interpreter.namespace.update(extra, context=context, answer=finalization.answer_dict, **restore)
        yield ModelREPL(interpreter, finalization, models, context, restore)
    finally:
        interpreter.forget_shell()
        shell.close()
