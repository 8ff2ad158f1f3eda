"""Record the final answer of one run: ``FINAL``, ``FINAL_VAR``, the ``answer`` dict, and lines of output.

An answer counts when the cell that gave it has ended well. So a cell's finalization is *pending* until `end_cell`,
which keeps it, or drops it if the cell raised. The first answer that counts stays; later ones are ignored until the run
is reset.

Cells of several threads may be under way at once (Jupyter's subshells). Each has a pending answer of its own; what a
thread without a cell gives belongs to the cell that began last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from rlm_kernel.errors import UsageMistake
from rlm_kernel.final_text import FinalCall, find_final
from rlm_kernel.values import FinalAnswer

_NAMES_IN_MESSAGE = 30


class UnknownVariable(UsageMistake, NameError):
    """``FINAL_VAR`` names a variable that does not exist; the message lists those that do."""


class Finalization:
    """The final answer of one run, and the functions that give it.

    Args:
        namespace: gives the namespace in which ``FINAL_VAR`` looks names up.
        hidden: names that are not the user's own variables.
    """

    def __init__(self, namespace: Callable[[], Mapping[str, Any]], hidden: Callable[[], frozenset[str]]) -> None:
        self._namespace = namespace
        self._hidden = hidden
        self.answer_dict: dict[str, Any] = {"content": "", "ready": False}
        self.final: FinalAnswer | None = None
        self._pending: dict[int, FinalAnswer | None] = {}  # by thread, in the order in which the cells began

    # -- the functions that code calls

    def FINAL(self, value: Any) -> str:
        """Record the final answer.

        Returns:
            the text ``FINAL(...)``, so that ``print(FINAL(x))`` works as in other runtimes.
        """
        answer = FinalAnswer(value)
        here = threading.get_ident()
        self._pending[here if here in self._pending else next(reversed(self._pending), here)] = answer
        return f"FINAL({answer.text})"

    def FINAL_VAR(self, name: str) -> str:
        """Record the value of the variable called ``name`` as the final answer.

        Raises:
            UnknownVariable: there is no such variable; the message names those that exist.
        """
        if not isinstance(name, str):
            # FINAL_VAR(x) instead of FINAL_VAR("x"): what is meant is plain.
            return self.FINAL(name)
        return self.FINAL(self._lookup(name))

    def SHOW_VARS(self) -> str:
        """Return the names and types of the variables that exist, one per line."""
        return "\n".join(f"{name}: {type(value).__name__}" for name, value in self.variables().items()) or "(none)"

    def variables(self) -> dict[str, Any]:
        """Return the user's own variables: no leading underscore, none of the helpers."""
        hidden = self._hidden()
        # A copy: another thread may bind names meanwhile. A name need not be a text (``globals()[1] = 2``).
        names = dict(self._namespace())
        return {n: v for n, v in names.items() if isinstance(n, str) and not n.startswith("_") and n not in hidden}

    def _lookup(self, name: str) -> Any:
        key = name.strip().strip("\"'")
        namespace = self._namespace()
        if key in namespace:
            return namespace[key]
        names = sorted(self.variables())
        shown = ", ".join(names[:_NAMES_IN_MESSAGE]) or "none"
        more = f" and {len(names) - _NAMES_IN_MESSAGE} more" if len(names) > _NAMES_IN_MESSAGE else ""
        raise UnknownVariable(f"FINAL_VAR: there is no variable {key!r}. Variables that exist: {shown}{more}")

    # -- cells

    def begin_cell(self) -> None:
        """A cell begins in this thread: nothing is pending."""
        self._pending.pop(threading.get_ident(), None)
        self._pending[threading.get_ident()] = None

    def end_cell(self, *, success: bool, output: str | None = None) -> FinalAnswer | None:
        """This thread's cell has ended: keep its finalization, or drop it.

        Args:
            success: whether the cell ran to its end.
            output: what it printed, if lines of output count (model-driven cells), else None.

        Returns:
            the final answer that this cell gave, None if it gave none.

        Raises:
            UnknownVariable: a line of output names a variable that does not exist.
        """
        pending = self._pending.pop(threading.get_ident(), None)
        if not success:
            if self.final is None:
                self.answer_dict["ready"] = False
            return None
        if pending is None and self.answer_dict.get("ready"):
            pending = FinalAnswer(self.answer_dict.get("content"))
        if pending is None and output is not None and (call := find_final(output)) is not None:
            pending = self.resolve(call)
        if pending is None or self.final is not None:
            return None
        self.final = pending
        return pending

    def resolve(self, call: FinalCall) -> FinalAnswer:
        """Turn a final call found in text into the answer.

        Raises:
            UnknownVariable: it names a variable that does not exist.
        """
        return FinalAnswer(self._lookup(call.argument) if call.kind == "FINAL_VAR" else call.argument)

    def partial_answer(self) -> str | None:
        """Return the non-empty ``answer["content"]``, None if there is none."""
        content = self.answer_dict.get("content")
        # Compared by type first: an array or a table would answer ``== ""`` element by element.
        return None if content is None or (isinstance(content, str) and not content) else str(content)

    def reset(self) -> None:
        """Begin anew: no answer, a fresh ``answer`` dict."""
        self.answer_dict = {"content": "", "ready": False}
        self.final = None
        self._pending.update(dict.fromkeys(self._pending))
