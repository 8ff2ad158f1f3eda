"""Promises of `rlm_kernel.environment.models`: the published models keep their fields and defaults."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from rlm_kernel.environment.models import CodeBlockResult, REPLAction, REPLObservation, REPLState, StepResult


def test_an_action_has_its_published_defaults() -> None:
    action = REPLAction(code="x = 1")
    assert (action.code, action.is_final, action.final_answer) == ("x = 1", False, None)
    assert REPLAction().code == ""
    assert REPLAction(is_final=True, final_answer="42").final_answer == "42"


def test_a_result_names_its_published_fields() -> None:
    result = CodeBlockResult(
        stdout="out", stderr="err", locals_snapshot={"x": "1"}, execution_time=0.5, success=False, exception="E: e"
    )
    assert result.model_dump() == {
        "stdout": "out",
        "stderr": "err",
        "locals_snapshot": {"x": "1"},
        "execution_time": 0.5,
        "success": False,
        "exception": "E: e",
    }


def test_an_observation_has_its_published_fields() -> None:
    observation = REPLObservation(result=CodeBlockResult(), context_length=100, available_variables=["x"], iteration=5)
    assert set(REPLObservation.model_fields) == {
        *("result", "context_preview", "context_length", "available_variables", "iteration", "max_iterations"),
        *("done", "reward", "metadata"),
    }
    assert (observation.context_preview, observation.max_iterations, observation.done) == (None, 30, False)


def test_a_state_has_its_published_fields() -> None:
    state = REPLState(
        episode_id="e", step_count=5, context="hello", task_prompt="count", iteration=3, max_iterations=30
    )
    assert (state.namespace_keys, state.final_answer, state.total_execution_time) == ([], None, 0.0)


def test_a_wrong_field_is_named() -> None:
    with pytest.raises(ValidationError, match="cod"):
        REPLAction(cod="x")  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="execution_time"):
        CodeBlockResult(execution_time=-1)


def test_lone_surrogates_do_not_keep_an_observation_from_becoming_json() -> None:
    observation = REPLObservation(result=CodeBlockResult(stdout="\ud800 é", locals_snapshot={"x": "\udfff"}))
    observation.result.stderr = "\ud801"
    shown = json.loads(observation.model_dump_json())["result"]
    assert (shown["stdout"], shown["stderr"], shown["locals_snapshot"]) == ("\\ud800 é", "\\ud801", {"x": "\\udfff"})


def test_a_step_result_is_built_by_name_or_position() -> None:
    observation = REPLObservation()
    assert StepResult(observation, 1.0, True) == StepResult(observation=observation, reward=1.0, done=True)
    assert StepResult[REPLObservation](observation).done is False
