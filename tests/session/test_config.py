"""Promises of `rlm_kernel.session.config`."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
from traitlets.config import Config, Configurable

from rlm_kernel.clients.scripted import ScriptedClient
from rlm_kernel.clients.specs import SpecFactory
from rlm_kernel.errors import ConfigurationError, ModelNotConfigured
from rlm_kernel.session.config import LOCKABLE, RLM, SETTINGS, Settings
from rlm_kernel.values import ManagedChildConfig


def make_client() -> ScriptedClient:
    return ScriptedClient("x")


def test_config_files_give_way_to_the_environment_and_that_to_what_is_typed() -> None:
    config = Config()
    config.RLM.max_depth = 3
    config.RLM.max_iterations = 4
    config.RLM.max_children_total = 5
    environ = {"RLM_MAX_ITERATIONS": "40", "RLM_MAX_CHILDREN_TOTAL": "50"}
    settings = Settings.from_traitlets(RLM(config=config), environ)
    settings.set_text("max_children_total", "500")
    assert [settings[n] for n in ("max_depth", "max_iterations", "max_children_total")] == [3, 40, 500]
    assert settings["max_concurrent_children"] == 8


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("RLM_MODEL", "demo", "model", "demo"),
        ("RLM_CLIENT_FACTORY", "some.module:make", "client_factory", "some.module:make"),
        ("RLM_MAX_DEPTH", "3", "max_depth", 3),
        ("RLM_MAX_ITERATIONS", "7", "max_iterations", 7),
        ("RLM_MAX_CHILDREN_TOTAL", "1_000", "max_children_total", 1000),
        ("RLM_MAX_CONCURRENT_CHILDREN", "2", "max_concurrent_children", 2),
        ("RLM_PER_CHILD_TIMEOUT_S", "1.5", "per_child_timeout_s", 1.5),
        ("RLM_SHUTDOWN_GRACE_S", "0", "shutdown_grace_s", 0.0),
        ("RLM_TERMINATE_GRACE_S", "0.25", "terminate_grace_s", 0.25),
        ("RLM_KILL_GRACE_S", "2", "kill_grace_s", 2.0),
        ("RLM_RUN_DIR", "/tmp/x", "run_dir", "/tmp/x"),
        ("RLM_KEEP_ALIVE_S", "60", "keep_alive_s", 60.0),
        ("RLM_KEEP_ALIVE_S", "none", "keep_alive_s", None),
    ],
)
def test_each_variable_sets_its_setting(variable: str, text: str, name: str, value: object) -> None:
    assert Settings(environ={variable: text})[name] == value


def test_an_empty_variable_is_no_variable() -> None:
    assert Settings(environ={"RLM_MODEL": "", "RLM_MAX_DEPTH": " "}).items() == Settings(environ={}).items()


def test_every_bound_has_the_same_default_as_the_configuration_of_children() -> None:
    assert Settings(environ={}).bounds() == ManagedChildConfig(
        client_factory=Settings(environ={}).bounds().client_factory
    )


BAD = [
    ("max_depth", "0"),
    ("max_depth", "x"),
    ("max_depth", "1.5"),
    ("max_depth", "none"),
    ("max_iterations", "-1"),
    ("max_children_total", "many"),
    ("max_children_per_batch", "0"),
    ("max_concurrent_children", "0"),
    ("per_child_timeout_s", "0"),
    ("per_child_timeout_s", "inf"),
    ("per_child_timeout_s", "soon"),
    ("result_truncation_limit", "0"),
    ("shutdown_grace_s", "-1"),
    ("terminate_grace_s", "nan"),
    ("kill_grace_s", "none"),
    ("model", "opnai/gpt"),
    ("model", "openai/"),
    ("client_factory", "no-colon"),
    ("keep_runs", "0"),
    ("keep_runs", "none"),
    ("keep_alive_s", "0.2"),
    ("keep_alive_s", "inf"),
    ("keep_alive_s", "nan"),
]


@pytest.mark.parametrize(("name", "text"), BAD)
def test_a_bad_value_is_refused_by_name_and_value_and_changes_nothing(name: str, text: str) -> None:
    settings = Settings({"max_depth": 4}, environ={})
    before = settings.items()
    with pytest.raises(ConfigurationError) as raised:
        settings.set_text(name, text)
    assert str(raised.value).startswith(f"{name}=")
    assert raised.value.field == name
    assert settings.items() == before


@pytest.mark.parametrize(
    ("variable", "text"), [("RLM_MAX_DEPTH", "-3"), ("RLM_KILL_GRACE_S", "fast"), ("RLM_MODEL", "opnai/x")]
)
def test_a_bad_variable_is_named_as_the_variable_that_it_is(variable: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{variable}='?{text}") as raised:
        Settings(environ={variable: text})
    assert raised.value.field == variable


@pytest.mark.parametrize(("name", "value"), [("max_depth", True), ("max_depth", "3"), ("model", 5), ("run_dir", 5)])
def test_a_value_of_the_wrong_type_is_refused(name: str, value: object) -> None:
    settings = Settings(environ={})
    with pytest.raises(ConfigurationError, match=rf"^{name}="):
        settings.set(name, value)
    assert settings.items() == Settings(environ={}).items()


def test_an_unknown_setting_suggests_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="did you mean max_depth"):
        Settings(environ={}).set_text("max_dept", "1")
    with pytest.raises(ConfigurationError, match="there are: model, "):
        Settings(environ={}).set_text("zzz", "1")
    with pytest.raises(ConfigurationError, match="did you mean"):
        Settings({"max_dephth": 2}, environ={})


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_setting_is_a_trait_with_help(name: str) -> None:
    assert name in RLM.class_trait_names(config=True)
    assert f"--RLM.{name}" in RLM.class_get_help()


def test_what_the_command_line_gives_is_read_as_text() -> None:
    """``--RLM.max_depth=5`` arrives as a text, which would otherwise be refused as no number."""
    from traitlets.config.loader import KVArgParseConfigLoader

    arguments = ["--RLM.max_depth=5", "--RLM.kill_grace_s=0.5", "--RLM.preload=json,csv", "--RLM.model=demo"]
    settings = Settings.from_traitlets(RLM(config=KVArgParseConfigLoader(arguments, classes=[RLM]).load_config()), {})
    assert [settings[n] for n in ("max_depth", "kill_grace_s", "preload", "model")] == [5, 0.5, ("json", "csv"), "demo"]
    with pytest.raises(ConfigurationError, match="max_depth='x': must be a whole number"):
        Settings.from_traitlets(
            RLM(config=KVArgParseConfigLoader(["--RLM.max_depth=x"], classes=[RLM]).load_config()), {}
        )


def test_names_are_separated_by_commas() -> None:
    settings = Settings(environ={})
    assert settings.set_text("child_env_keep", " A_TOKEN, ,B ") == ("A_TOKEN", "B")
    assert settings.bounds().child_env_keep == ("A_TOKEN", "B")


@pytest.mark.parametrize(("name", "text"), [("max_children_per_batch", "none"), ("result_truncation_limit", "None")])
def test_none_takes_an_optional_limit_away(name: str, text: str) -> None:
    settings = Settings({name: 5}, environ={})
    assert settings.set_text(name, text) is None


def test_graces_too_long_for_jupyter_are_warned_of_and_the_warning_goes_when_they_are_shorter() -> None:
    settings = Settings(environ={})
    assert settings.warnings == []
    settings.set_text("kill_grace_s", "1.5")
    (warning,) = settings.warnings
    assert "add up to 2.5 s" in warning
    assert "SIGTERM 2.5 s after" in warning
    settings.set_text("kill_grace_s", "1")
    assert settings.warnings == []


def test_without_a_model_there_is_no_managed_mode_but_there_are_bounds() -> None:
    settings = Settings(environ={})
    assert settings.factory is None
    assert settings.managed() is None
    with pytest.raises(ModelNotConfigured):
        settings.bounds().client_factory()  # type: ignore[operator]


def test_a_model_spec_is_a_factory_with_its_own_default_model() -> None:
    settings = Settings({"model": "openai/gpt-x"}, environ={})
    assert settings.factory == SpecFactory("openai/gpt-x")
    assert settings.call_model is None
    managed = settings.managed()
    assert managed is not None
    assert managed.client_factory == SpecFactory("openai/gpt-x")


def test_beside_a_factory_the_model_is_a_name_for_its_calls() -> None:
    settings = Settings({"client_factory": make_client, "model": "my model"}, environ={})
    assert settings.factory is make_client
    assert settings.call_model == "my model"
    with_variables = Settings(environ={"RLM_MODEL": "my-model", "RLM_CLIENT_FACTORY": "m:f"})
    assert (with_variables.factory, with_variables.call_model) == ("m:f", "my-model")


def test_naming_a_model_replaces_the_factory_and_a_refused_name_keeps_it() -> None:
    settings = Settings({"client_factory": make_client, "model": "my model"}, environ={})
    with pytest.raises(ConfigurationError, match="unknown provider"):
        settings.set_model_text("opnai/x")
    assert settings.factory is make_client
    assert settings.call_model == "my model"
    assert settings.set_model_text("demo") == "demo"
    assert settings.factory == SpecFactory("demo")
    assert settings.set_model_text("none") is None
    assert settings.factory is None


def test_the_settings_do_not_change_under_a_reader() -> None:
    settings = Settings(environ={})
    items: dict[str, Any] = settings.items()
    items["max_depth"] = 99
    assert settings["max_depth"] == 2


def locked(**configured: Any) -> Configurable:
    config = Config()
    config.RLM.limits_locked = True
    config.RLM.update(configured)
    return RLM(config=config)


def test_locked_limits_can_be_lowered_and_raised_again_but_not_above_what_the_kernel_started_with() -> None:
    settings = Settings.from_traitlets(locked(max_depth=3), {"RLM_MAX_CONCURRENT_CHILDREN": "4"})
    assert settings.set_text("max_depth", "2") == 2
    assert settings.set_text("max_depth", "3") == 3
    assert settings.set_text("max_concurrent_children", "4") == 4
    for name, value, cap in [("max_depth", 4, 3), ("max_concurrent_children", 5, 4), ("max_children_total", 257, 256)]:
        with pytest.raises(ConfigurationError, match=rf"^{name}={value}: .*locked.*at most {cap}$"):
            settings.set_text(name, str(value))
        with pytest.raises(ConfigurationError, match="locked"):
            settings.set(name, value)
    assert [settings[n] for n in ("max_depth", "max_concurrent_children", "max_children_total")] == [3, 4, 256]


def test_no_limit_at_all_is_above_a_locked_one_and_a_missing_one_may_be_set() -> None:
    settings = Settings.from_traitlets(locked(max_total_tokens=1000), {})
    with pytest.raises(ConfigurationError, match=r"max_total_tokens=None: .*at most 1000"):
        settings.set_text("max_total_tokens", "none")
    assert settings.set_text("memory_limit_bytes", "1_000_000_000") == 1_000_000_000
    assert settings.set_text("memory_limit_bytes", "none") is None  # whoever started the kernel has set none


def test_what_is_no_limit_stays_free_when_limits_are_locked() -> None:
    settings = Settings.from_traitlets(locked(), {})
    assert settings.set_model_text("demo") == "demo"
    settings.set("client_factory", make_client)
    assert settings.set_text("result_truncation_limit", "1000000") == 1_000_000


def test_a_lock_can_be_closed_in_a_notebook_but_not_opened() -> None:
    settings = Settings(environ={})
    assert settings.set_text("max_depth", "5") == 5
    assert settings.set_text("limits_locked", "yes") is True
    with pytest.raises(ConfigurationError, match=r"max_depth=6: .*at most 5"):
        settings.set_text("max_depth", "6")
    with pytest.raises(ConfigurationError, match=r"limits_locked=False: .*until the kernel starts anew"):
        settings.set_text("limits_locked", "no")
    with pytest.raises(ConfigurationError, match="limits_locked='maybe': must be true or false"):
        settings.set_text("limits_locked", "maybe")


def test_every_number_that_bounds_what_children_may_use_can_be_locked() -> None:
    numbers = {field.name for field in fields(ManagedChildConfig) if re.match(r"(int|float)\b", str(field.type))}
    assert numbers - set(LOCKABLE) == {"result_truncation_limit"}  # how much of an answer is shown
    assert set(LOCKABLE) - numbers == {"keep_runs"}


def test_a_bad_value_leaves_the_files_or_the_defaults_in_force_and_is_no_way_around_the_lock() -> None:
    settings, error = Settings.read(locked(max_depth=3), {"RLM_MAX_ITERATIONS": "many"})
    assert (settings["max_depth"], error and error.field) == (3, "RLM_MAX_ITERATIONS")
    settings, error = Settings.read(locked(max_depth=0), {"RLM_MAX_ITERATIONS": "5"})
    assert (settings["max_depth"], settings["max_iterations"], error and error.field) == (2, 30, "max_depth")
    with pytest.raises(ConfigurationError, match="at most 2"):
        settings.set_text("max_depth", "3")
    assert Settings.read(RLM(), {})[1] is None


@pytest.mark.parametrize(
    ("values", "warms"),
    [
        ({"model": "openai/x"}, True),
        ({"model": "ollama/x"}, True),
        ({"model": "demo"}, False),
        ({"model": "litellm/x"}, False),
        ({"client_factory": "some.module:factory"}, True),
        ({"client_factory": ScriptedClient.factory("x")}, False),
        ({"client_factory": "some.module:factory", "warm_openai": False}, False),
        ({"model": "openai/x", "warm_openai": False}, False),
    ],
)
def test_children_find_openai_imported_unless_their_client_does_without(values: dict[str, Any], warms: bool) -> None:
    assert Settings(values, environ={}).warms_openai is warms
