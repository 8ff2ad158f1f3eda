"""Promises of `rlm_kernel.environment.rubrics`."""

from __future__ import annotations

from typing import Any

import pytest

from rlm_kernel.environment.models import CodeBlockResult, REPLAction, REPLObservation
from rlm_kernel.environment.rubrics import (
    CodeExecutionRubric,
    CustomMetricRubric,
    ExactMatchRubric,
    FuzzyMatchRubric,
    REPLRubric,
    Rubric,
)

ACTION = REPLAction(code="")


def seen(answer: str | None = None, *, done: bool = True, success: bool = True) -> REPLObservation:
    return REPLObservation(result=CodeBlockResult(success=success), done=done, metadata={"final_answer": answer})


def score(rubric: Rubric, expected: Any, answer: str | None, *, done: bool = True) -> float:
    rubric.set_expected(expected)
    return rubric(ACTION, seen(answer, done=done))


@pytest.mark.parametrize(
    ("expected", "answer", "reward"),
    [("Paris", " paris\n", 1.0), ("straße", "STRASSE", 1.0), ("Paris", "Rome", 0.0), (42, "42", 1.0), ("", "", 1.0)],
)
def test_exact_match_ignores_case_and_surrounding_whitespace(expected: Any, answer: str, reward: float) -> None:
    assert score(ExactMatchRubric(), expected, answer) == reward


def test_exact_match_can_be_literal() -> None:
    assert score(ExactMatchRubric(normalize=False), "Paris", "paris") == 0.0
    assert score(ExactMatchRubric(normalize=False), "Paris", "Paris") == 1.0


@pytest.mark.parametrize("rubric", [ExactMatchRubric(), FuzzyMatchRubric(), CustomMetricRubric(lambda *_: 1.0)])
def test_an_outcome_is_zero_without_expectation_or_answer_and_before_the_end(rubric: Rubric) -> None:
    assert score(rubric, None, "x") == 0.0
    assert score(rubric, "x", None) == 0.0
    assert score(rubric, "x", "x", done=False) == 0.0
    assert score(rubric, "x", "x") == 1.0
    rubric.reset()
    assert rubric(ACTION, seen("x")) == 0.0


@pytest.mark.parametrize(
    ("expected", "answer", "reward"),
    [
        *[("42", "42", 1.0), ("42", "it is 42", 0.5), ("it is 42", "42", 0.5), ("42", "7", 0.0)],
        *[("42", "", 0.0), ("", "42", 0.0), ("", "", 1.0)],
    ],
)
def test_fuzzy_match_gives_half_for_containment_and_nothing_for_an_empty_text(
    expected: str, answer: str, reward: float
) -> None:
    assert score(FuzzyMatchRubric(), expected, answer) == reward


def test_a_custom_metric_gets_expected_and_predicted() -> None:
    calls: list[tuple[str, str]] = []

    def metric(expected: str, predicted: str) -> float:
        calls.append((expected, predicted))
        return 0.25

    assert score(CustomMetricRubric(metric), 7, "8") == 0.25
    assert calls == [("7", "8")]
    with pytest.raises(TypeError, match="metric_fn=3"):
        CustomMetricRubric(3)  # type: ignore[arg-type]


def test_code_execution_pays_for_success_and_takes_for_errors() -> None:
    assert CodeExecutionRubric()(ACTION, seen(success=True)) == 0.0
    assert CodeExecutionRubric()(ACTION, seen(success=False)) == -0.05
    assert CodeExecutionRubric(0.1, -1)(ACTION, seen(success=True)) == 0.1
    assert CodeExecutionRubric(0.1, -1)(ACTION, seen(success=False)) == -1.0


def test_the_whole_reward_is_process_first_and_outcome_or_failure_at_the_end() -> None:
    rubric = REPLRubric()
    rubric.set_expected("42")
    assert rubric(ACTION, seen(done=False, success=False)) == -0.05
    assert rubric(ACTION, seen(done=False)) == 0.0
    assert rubric(ACTION, seen("42")) == 1.0
    assert rubric(ACTION, seen("41")) == 0.0
    assert rubric(ACTION, seen(None)) == -0.1
    assert rubric(ACTION, seen("")) == 0.0  # the empty answer is an answer
    assert REPLRubric(failure_reward=-2)(ACTION, seen(None)) == -2.0


def test_the_parts_of_the_whole_reward_can_be_replaced() -> None:
    rubric = REPLRubric(outcome=FuzzyMatchRubric(), process=CodeExecutionRubric(error_penalty=-3))
    rubric.set_expected("42")
    assert rubric(ACTION, seen("it is 42")) == 0.5
    assert rubric(ACTION, seen(done=False, success=False)) == -3.0
    assert rubric.last_score == -3.0
    rubric.reset()
    assert rubric(ACTION, seen("42")) == 0.0
