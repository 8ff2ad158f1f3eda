"""The REPL that a model drives: an interpreter, a finalization, and the record of model calls, as the loop wants to see them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlm_kernel.environment.driven import conclude_cell
from rlm_kernel.environment.finalization import Finalization
from rlm_kernel.environment.interpreter import Interpreter
from rlm_kernel.final_text import FinalCall
from rlm_kernel.loop.prompts import QueryMetadata
from rlm_kernel.session.models import ModelAccess
from rlm_kernel.session.structured import AnswerCheck, InvalidAnswer
from rlm_kernel.values import CodeResult, FinalAnswer


class ModelREPL:
    """One model-driven run's REPL.

    Args:
        interpreter: runs the code.
        finalization: records the answer.
        models: whose calls are recorded per block.
        context: the run's context, for its description.
        restore: names that are put back before each block, should code have rebound or deleted them (the helpers).
        check: what an answer must fit, None if any will do. One that does not is an error of the block that gave it.
    """

    def __init__(
        self,
        interpreter: Interpreter,
        finalization: Finalization,
        models: ModelAccess,
        context: Any,
        restore: dict[str, Any],
        check: AnswerCheck | None = None,
    ) -> None:
        self._interpreter = interpreter
        self._finalization = finalization
        self._models = models
        self._metadata = QueryMetadata.of(context)
        self._restore = restore
        self._check = check

    @property
    def final_answer(self) -> FinalAnswer | None:
        return self._finalization.final

    def execute(self, code: str) -> CodeResult:
        """Run one block. Lines of its output that are final calls count."""
        self._interpreter.namespace.update(self._restore)
        self._finalization.begin_cell()
        self._models.take_calls()
        result = self._interpreter.execute(code)
        result = replace(result, model_calls=self._models.take_calls())
        return conclude_cell(self._finalization, result, self._accepted)

    def resolve_final(self, call: FinalCall) -> FinalAnswer:
        answer = self._accepted(self._finalization.resolve(call))
        if self._finalization.final is None:
            self._finalization.final = answer
        return answer

    def _accepted(self, answer: FinalAnswer) -> FinalAnswer:
        """Return the answer as it counts.

        Raises:
            InvalidAnswer: it does not fit; a draft that was marked ready is a draft again.
        """
        if self._check is None:
            return answer
        try:
            return self._check.accept(answer)
        except InvalidAnswer:
            self._finalization.answer_dict["ready"] = False
            raise

    def partial_answer(self) -> str | None:
        return self._finalization.partial_answer()

    def context_metadata(self) -> QueryMetadata:
        return self._metadata
