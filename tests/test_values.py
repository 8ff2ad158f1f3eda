"""Promises of `rlm_kernel.values`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.errors import ConfigurationError
from rlm_kernel.values import ChildState, ChildStatus, CleanupReport, FinalAnswer, Graces, ManagedChildConfig, Usage


def factory() -> object:
    return object()


def config(**options: Any) -> ManagedChildConfig:
    return ManagedChildConfig(**{"client_factory": factory, **options})


GOOD: dict[str, list[Any]] = {
    "client_factory": [factory, "module:callable", "package.module:Class.method"],
    "model": [None, "x"],
    "max_depth": [1, 5],
    "max_iterations": [1],
    "max_total_tokens": [None, 1],
    "max_concurrent_model_calls": [None, 1],
    "child_env_keep": [(), ["A"], ("A", "B")],
    "max_children_total": [0, 1],
    "max_children_per_batch": [None, 1],
    "max_concurrent_children": [1],
    "per_child_timeout_s": [0.001, 10],
    "result_truncation_limit": [None, 1],
    "shutdown_grace_s": [0, 0.5, 100],
    "terminate_grace_s": [0],
    "kill_grace_s": [0],
    "memory_limit_bytes": [None, 1],
    "preload": [(), ["json"]],
    "on_subcall_start": [None, print],
    "on_subcall_complete": [None, print],
}
BAD: dict[str, list[Any]] = {
    "client_factory": [None, 5, "", "module", ":callable", "module:"],
    "model": ["", " ", 5],
    "max_depth": [0, -1, True, 1.5, "2", None],
    "max_iterations": [0, None],
    "max_total_tokens": [0, 1.5],
    "max_concurrent_model_calls": [0],
    "child_env_keep": ["A_TOKEN", [5], [""]],
    "max_children_total": [-1, None],
    "max_children_per_batch": [0],
    "max_concurrent_children": [0, None, True],
    "per_child_timeout_s": [0, -1, float("inf"), float("nan"), None, "5", True],
    "result_truncation_limit": [0],
    "shutdown_grace_s": [-0.1, float("inf"), None, "1"],
    "terminate_grace_s": [-1],
    "kill_grace_s": [-1, float("nan")],
    "memory_limit_bytes": [0, 1.5],
    "preload": ["json", [None]],
    "on_subcall_start": [5, "print"],
    "on_subcall_complete": [5],
}


def pairs(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


def test_the_tables_of_this_test_cover_every_setting() -> None:
    names = {field.name for field in dataclasses.fields(ManagedChildConfig)}
    assert set(GOOD) == set(BAD) == names


@pytest.mark.parametrize(("name", "value"), pairs(GOOD))
def test_a_legal_value_is_taken(name: str, value: Any) -> None:
    taken = getattr(config(**{name: value}), name)
    assert taken == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(("name", "value"), pairs(BAD))
def test_an_illegal_value_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as raised:
        config(**{name: value})
    assert raised.value.field == name
    assert str(raised.value).startswith(f"{name}={value!r}: must ")


def test_defaults_are_those_of_the_contract() -> None:
    made = config()
    assert (made.max_depth, made.max_iterations, made.max_children_total, made.max_concurrent_children) == (
        2,
        30,
        256,
        8,
    )
    assert made.per_child_timeout_s == 3600.0
    assert made.graces == Graces(0.5, 0.5, 1.0)
    assert made.graces.total_s == 2.0


def test_a_configuration_is_immutable_and_takes_names_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().max_depth = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        ManagedChildConfig(factory)  # type: ignore[call-arg]


def test_a_list_of_names_is_copied() -> None:
    names = ["A"]
    made = config(child_env_keep=names)
    names.append("B")
    assert made.child_env_keep == ("A",)


@pytest.mark.parametrize("name", ["shutdown_s", "terminate_s", "kill_s"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True, None, "1"])
def test_graces_are_seconds(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=name.replace("_s", "_grace_s")):
        Graces(**{name: value})


def test_a_stop_that_follows_a_failed_one_begins_at_sigkill() -> None:
    assert Graces(1, 2, 3).from_kill() == Graces(0, 0, 3)


usages = st.builds(Usage, st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9))


@given(usages, usages, usages)
def test_usage_adds_up_in_any_order(a: Usage, b: Usage, c: Usage) -> None:
    assert (a + b) + c == a + (b + c) == (c + a) + b
    assert a + Usage() == a
    assert (a + b).total_tokens == a.total_tokens + b.total_tokens
    assert sum([a, b, c], Usage()) == a + b + c


def test_the_last_four_states_are_the_end() -> None:
    assert [state for state in ChildState if state.done] == [
        ChildState.COMPLETED,
        ChildState.FAILED,
        ChildState.TIMED_OUT,
        ChildState.CANCELLED,
    ]
    assert [str(state) for state in ChildState] == [
        "queued", "running", "waiting", "completed", "failed", "timed_out", "cancelled",
    ]  # fmt: skip


@pytest.mark.parametrize("state", list(ChildState))
def test_the_truth_value_of_a_status_is_whether_it_is_done(state: ChildState) -> None:
    status = ChildStatus("c1", "c1", 1, None, state)
    assert bool(status) is status.done is state.done
    assert status.exited is False


@pytest.mark.parametrize(
    ("value", "text"), [("a", "a"), (0, "0"), (None, "None"), (False, "False"), ("", ""), ([1], "[1]")]
)
def test_an_answer_has_a_text(value: object, text: str) -> None:
    assert FinalAnswer(value).text == text


def test_a_report_is_one_line_that_names_what_is_left() -> None:
    clean = CleanupReport("close", 0.126, ("c1", "c2"), asked=2, terminated=1, killed=1)
    assert clean.ok
    assert clean.summary() == "close: c1, c2 stopped in 0.13 s (asked 2, terminated 1, killed 1)"
    left = CleanupReport("reset", 2.0, survivors=(5, 7))
    assert not left.ok
    assert left.summary() == (
        "reset: no child stopped in 2.00 s (asked 0, terminated 0, killed 0); NOT confirmed gone: pid 5, 7"
    )
