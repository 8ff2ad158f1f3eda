"""Rewards: a rubric looks at an action and the observation that followed, and gives a number.

Pure. An outcome rubric compares the final answer with what was expected and speaks on the terminal step only; a process
rubric speaks on every step. Answers are compared as text, since an observation holds them as text.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any


class Rubric(abc.ABC):
    """Base of all rubrics. Subclasses implement `forward`; callers call the rubric itself."""

    last_score: float | None = None

    def __call__(self, action: Any, observation: Any) -> float:
        """Return the reward.

        Args:
            action: the `REPLAction` of the step.
            observation: the `REPLObservation` that followed.
        """
        self.last_score = float(self.forward(action, observation))
        return self.last_score

    @abc.abstractmethod
    def forward(self, action: Any, observation: Any) -> float:
        """Compute the reward."""

    def set_expected(self, expected: Any) -> None:  # noqa: B027  # most rubrics expect nothing
        """Say which answer is expected in this episode; None for no expectation."""

    def reset(self) -> None:
        """Begin a new episode: forget what was expected."""
        self.set_expected(None)
        self.last_score = None


class _OutcomeRubric(Rubric):
    """Compare the final answer with the expected one; 0.0 without either, and before the end."""

    def __init__(self) -> None:
        self._expected: str | None = None

    def set_expected(self, expected: Any) -> None:
        self._expected = None if expected is None else str(expected)

    def forward(self, action: Any, observation: Any) -> float:
        predicted = _final_answer(observation)
        if self._expected is None or predicted is None or not observation.done:
            return 0.0
        return self.compare(self._expected, predicted)

    @abc.abstractmethod
    def compare(self, expected: str, predicted: str) -> float:
        """Score an answer."""


class _TextRubric(_OutcomeRubric):
    """Compare the two as texts.

    Args:
        normalize: ignore case and surrounding whitespace.
    """

    def __init__(self, normalize: bool = True) -> None:
        super().__init__()
        self.normalize = normalize

    def compare(self, expected: str, predicted: str) -> float:
        if self.normalize:
            expected, predicted = _normalized(expected), _normalized(predicted)
        return self.compare_texts(expected, predicted)

    @abc.abstractmethod
    def compare_texts(self, expected: str, predicted: str) -> float:
        """Score an answer, now that what is to be ignored has been taken out."""


class ExactMatchRubric(_TextRubric):
    """1.0 if the answer is the expected one, else 0.0.

    Args:
        normalize: ignore case and surrounding whitespace.
    """

    def compare_texts(self, expected: str, predicted: str) -> float:
        return 1.0 if expected == predicted else 0.0


class FuzzyMatchRubric(_TextRubric):
    """1.0 if the answer is the expected one, 0.5 if one of them contains the other, else 0.0.

    An empty text is contained in every other, and so earns nothing by it.

    Args:
        normalize: ignore case and surrounding whitespace.
    """

    def compare_texts(self, expected: str, predicted: str) -> float:
        if expected == predicted:
            return 1.0
        return 0.5 if expected and predicted and (expected in predicted or predicted in expected) else 0.0


class CustomMetricRubric(_OutcomeRubric):
    """What a function of the user's says.

    Args:
        metric_fn: called as ``(expected, predicted)`` with two texts.
    """

    def __init__(self, metric_fn: Callable[[str, str], float]) -> None:
        if not callable(metric_fn):
            raise TypeError(f"metric_fn={metric_fn!r}: must be a function of (expected, predicted)")
        super().__init__()
        self._metric_fn = metric_fn

    def compare(self, expected: str, predicted: str) -> float:
        return self._metric_fn(expected, predicted)


class CodeExecutionRubric(Rubric):
    """A small reward for code that runs, a penalty for code that raises.

    Args:
        success_reward: for a block that ran to its end.
        error_penalty: for one that did not.
    """

    def __init__(self, success_reward: float = 0.0, error_penalty: float = -0.05) -> None:
        self.success_reward = success_reward
        self.error_penalty = error_penalty

    def forward(self, action: Any, observation: Any) -> float:
        result = getattr(observation, "result", None)
        if result is None:
            return 0.0
        return self.success_reward if getattr(result, "success", True) else self.error_penalty


class REPLRubric(Rubric):
    """The whole reward: the outcome on a terminal step with an answer, the process on the steps before.

    Args:
        outcome: None for `ExactMatchRubric`.
        process: None for `CodeExecutionRubric`.
        failure_reward: for a terminal step without an answer.
    """

    def __init__(
        self, outcome: Rubric | None = None, process: Rubric | None = None, failure_reward: float = -0.1
    ) -> None:
        # Not `or`: a rubric of the user's may be falsy.
        self.outcome = ExactMatchRubric() if outcome is None else outcome
        self.process = CodeExecutionRubric() if process is None else process
        self.failure_reward = failure_reward

    def set_expected(self, expected: Any) -> None:
        for rubric in (self.outcome, self.process):
            if hasattr(rubric, "set_expected"):
                rubric.set_expected(expected)

    def forward(self, action: Any, observation: Any) -> float:
        if not observation.done:
            return self.process(action, observation)
        if _final_answer(observation) is None:
            return self.failure_reward
        return self.outcome(action, observation)

    def reset(self) -> None:
        for rubric in (self.outcome, self.process):
            if hasattr(rubric, "reset"):
                rubric.reset()
        self.last_score = None


def _final_answer(observation: Any) -> str | None:
    answer = (getattr(observation, "metadata", None) or {}).get("final_answer")
    return None if answer is None else str(answer)


def _normalized(text: str) -> str:
    return text.strip().casefold()
