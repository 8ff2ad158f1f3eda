"""Promises of `rlm_kernel.errors`."""

from __future__ import annotations

import inspect
import pickle

import pytest

from rlm_kernel import errors
from rlm_kernel.errors import (
    ChildCleanupError,
    ChildFailedError,
    ChildLimitError,
    ConfigurationError,
    ManagedModeRequired,
    ModelNotConfigured,
    RLMError,
)
from rlm_kernel.values import ChildState, ChildStatus, CleanupReport

STATUS = ChildStatus("c1", "c1", 1, None, ChildState.FAILED, error="no luck")
SPECIAL = {
    "ConfigurationError": ConfigurationError("max_depth", 0, "must be more"),
    "ChildLimitError": ChildLimitError("max_depth", 2),
    "ChildFailedError": ChildFailedError("c1 failed", STATUS),
    "ChildCleanupError": ChildCleanupError("left", (1, 2), CleanupReport("close", survivors=(1, 2))),
}
CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, RLMError)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling_with_all_that_it_says(kind: type[RLMError]) -> None:
    """They travel out of child processes and thread pools."""
    error = SPECIAL.get(kind.__name__) or kind("what happened")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_every_error_of_ours_is_an_rlm_error() -> None:
    found = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, BaseException)]
    assert found
    assert all(issubclass(c, RLMError) for c in found)


def test_errors_can_be_caught_as_what_python_would_have_raised() -> None:
    assert issubclass(ConfigurationError, ValueError)
    assert issubclass(errors.UnknownHandleError, LookupError)


def test_a_lookup_error_of_ours_does_not_quote_its_message() -> None:
    """``KeyError`` would."""
    assert str(errors.UnknownHandleError("no child 'c9' here")) == "no child 'c9' here"


@pytest.mark.parametrize("kind", [ModelNotConfigured, ManagedModeRequired])
def test_what_is_missing_comes_with_the_line_to_type(kind: type[RLMError]) -> None:
    assert "%rlm model openai/gpt-5-mini" in str(kind())
    assert "RLM_MODEL" in str(kind())


def test_a_bad_setting_is_named_with_its_value_and_what_is_legal() -> None:
    error = ConfigurationError("max_depth", 0, "must be at least 1")
    assert str(error) == "max_depth=0: must be at least 1"
    assert (error.field, error.value, error.reason) == ("max_depth", 0, "must be at least 1")


def test_a_limit_is_named_with_its_value() -> None:
    error = ChildLimitError("max_children_total", 256)
    assert str(error) == "max_children_total exceeded (limit: 256)"
    assert (error.limit, error.value) == ("max_children_total", 256)
    assert str(ChildLimitError("max_depth", 2, "own words")) == "own words"
