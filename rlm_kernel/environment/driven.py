"""End a cell that a model wrote: its finalization counts, and so do lines of its output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlm_kernel.environment.finalization import Finalization
from rlm_kernel.errors import UsageMistake
from rlm_kernel.values import CodeResult, FinalAnswer


def conclude_cell(
    finalization: Finalization,
    result: CodeResult,
    accept: Callable[[FinalAnswer], FinalAnswer] | None = None,
) -> CodeResult:
    """Keep the final answer that a cell gave, if it gave one and ran to its end.

    Args:
        finalization: whose `begin_cell` was called before the cell ran.
        result: what running it gave, with its output whole.
        accept: returns an answer as it counts, or raises `UsageMistake`.

    Returns:
        the result; an error, if the answer names a variable that does not exist or is not accepted.
    """
    try:
        given = finalization.end_cell(success=result.success, output=result.stdout)
        if given is not None and accept is not None:
            finalization.final = None  # until it is accepted
            finalization.final = accept(given)
    except UsageMistake as error:
        note = f"{type(error).__name__}: {error}"
        return replace(result, stderr=f"{result.stderr}{note}\n", success=False, exception=note)
    return result
