"""Settings: traitlets configuration, then the environment, then ``%rlm config``; each later one wins.

The class is called `RLM`, so ``c.RLM.model = "openai/gpt-5-mini"`` in the kernel's usual config files sets the model.
Every value, wherever
it comes from, meets the same checks: those of `ManagedChildConfig`.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from traitlets import Any as AnyTrait
from traitlets.config import Configurable

from rlm_kernel.errors import ConfigurationError
from rlm_kernel.values import ManagedChildConfig

JUPYTER_SHUTDOWN_WAIT_S = 5.0
"""Jupyter's default wait for a shutdown; half of it passes before SIGTERM is sent (`KernelManager.shutdown_wait_time`)."""

SHUTDOWN_WAIT_VARIABLE = "RLM_KERNEL_SHUTDOWN_WAIT"
"""Variable by which a launcher tells the kernel that it waits longer: ``PID:SECONDS``, with the launcher's pid."""

KEEP_ALIVE_S = (0.5, 3600.0)
"""Bounds of ``keep_alive_s``. jupyter_client takes a kernel for ready when nothing has come for 0.2 s: signs in quick succession
would hold it up."""


def _text(text: str) -> str | None:
    return None if text.strip().lower() in ("", "none") else text.strip()


def _whole(text: str) -> int | None:
    return None if _text(text) is None else int(text.replace("_", ""))


def _number(text: str) -> float | None:
    return None if _text(text) is None else float(text)


def _dotted(text: str) -> Callable[..., Any] | None:
    """Import ``module:callable``."""
    if _text(text) is None:
        return None
    module, colon, name = text.strip().partition(":")
    try:
        found = functools.reduce(getattr, name.split("."), importlib.import_module(module)) if colon else None
    except (ImportError, AttributeError):
        found = None
    if not callable(found):
        raise ValueError(text)
    return found


def _switch(text: str) -> bool:
    word = text.strip().lower()
    if word not in (*_YES, *_NO):
        raise ValueError(text)
    return word in _YES


_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "none", "")


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: how text becomes its value, and which environment variable sets it."""

    parse: Callable[[str], Any]
    what: str
    help: str
    env: str | None = None


SETTINGS: dict[str, Setting] = {
    "model": Setting(_text, "a model spec", "model, as provider/model, or demo", "RLM_MODEL"),
    "client_factory": Setting(
        _text, '"module:callable"', "builds the model client in each process, instead of model", "RLM_CLIENT_FACTORY"
    ),
    "max_depth": Setting(_whole, "a whole number", "children exist at depths 1 … max_depth-1", "RLM_MAX_DEPTH"),
    "max_iterations": Setting(_whole, "a whole number", "model turns per run", "RLM_MAX_ITERATIONS"),
    "max_children_total": Setting(
        _whole, "a whole number", "children that an episode may start", "RLM_MAX_CHILDREN_TOTAL"
    ),
    "max_children_per_batch": Setting(_whole, "a whole number or none", "children that one batch may start"),
    "max_concurrent_children": Setting(
        _whole, "a whole number", "children that run at once; more are queued", "RLM_MAX_CONCURRENT_CHILDREN"
    ),
    "per_child_timeout_s": Setting(
        _number, "a number of seconds", "wall-clock seconds per child", "RLM_PER_CHILD_TIMEOUT_S"
    ),
    "memory_limit_bytes": Setting(
        _whole, "a whole number or none", "private memory that a child may use, in bytes", "RLM_MEMORY_LIMIT_BYTES"
    ),
    "max_total_tokens": Setting(_whole, "a whole number or none", "token budget of an episode, children included"),
    "max_concurrent_model_calls": Setting(
        _whole, "a whole number or none", "model calls under way at once, children included"
    ),
    "on_subcall_start": Setting(_dotted, '"module:callable" or none', "called as (depth, model, prompt_preview)"),
    "on_subcall_complete": Setting(_dotted, '"module:callable" or none', "called as (depth, model, seconds, error)"),
    "result_truncation_limit": Setting(_whole, "a whole number or none", "characters after which an answer is cut"),
    "shutdown_grace_s": Setting(
        _number, "a number of seconds", "seconds for the cooperative stop", "RLM_SHUTDOWN_GRACE_S"
    ),
    "terminate_grace_s": Setting(_number, "a number of seconds", "seconds after SIGTERM", "RLM_TERMINATE_GRACE_S"),
    "kill_grace_s": Setting(_number, "a number of seconds", "seconds after SIGKILL", "RLM_KILL_GRACE_S"),
    "child_env_keep": Setting(
        _names, "names, separated by commas", "variables that children keep although they look like secrets"
    ),
    "preload": Setting(_names, "names, separated by commas", "modules that the nursery imports before it forks"),
    "run_dir": Setting(_text, "a directory", "where trajectories and logs are kept", "RLM_RUN_DIR"),
    "keep_runs": Setting(_whole, "a whole number", "episodes whose files are kept"),
    "keep_alive_s": Setting(
        _number,
        "a number of seconds or none",
        "seconds between signs of live children to a culling server",
        "RLM_KEEP_ALIVE_S",
    ),
    "warm_openai": Setting(
        _switch,
        "true or false",
        "whether children find openai imported; false saves time at the start with a client_factory that does not use it",
        "RLM_WARM_OPENAI",
    ),
    "live_views": Setting(
        _switch,
        "true or false",
        "whether cells that wait for children show a live table",
        "RLM_LIVE_VIEWS",
    ),
    "limits_locked": Setting(_switch, "true or false", "whether notebooks may lower limits only, not raise them"),
}

LOCKABLE = (
    "max_depth",
    "max_iterations",
    "max_children_total",
    "max_children_per_batch",
    "max_concurrent_children",
    "per_child_timeout_s",
    "memory_limit_bytes",
    "max_total_tokens",
    "max_concurrent_model_calls",
    "shutdown_grace_s",
    "terminate_grace_s",
    "kill_grace_s",
    "keep_runs",
)
"""What ``limits_locked`` holds at its value of the moment at which it was locked, or below. None is no limit, so above all others."""

_DEFAULTS: dict[str, Any] = {
    "model": None,
    "client_factory": None,
    "run_dir": None,
    "keep_runs": 100,
    "keep_alive_s": 10.0,
    "warm_openai": True,
    "live_views": True,
    "limits_locked": False,
    **{
        name: ManagedChildConfig.__dataclass_fields__[name].default
        for name in SETTINGS
        if name in ManagedChildConfig.__dataclass_fields__ and name not in ("model", "client_factory")
    },
}


_traits: dict[str, Any] = {
    name: AnyTrait(_DEFAULTS[name], help=f"{setting.help} ({setting.what})").tag(config=True)
    for name, setting in SETTINGS.items()
}

_make_class: Any = type(Configurable)
RLM: type[Configurable] = _make_class(
    "RLM", (Configurable,), {"__doc__": "Settings of the RLM kernel.", "__module__": __name__, **_traits}
)
"""The settings as config files see them: ``c.RLM.name = value``. One trait for each entry of `SETTINGS`."""


class Settings:
    """The settings in force. Changing one validates all of them together; a refused change changes nothing.

    Args:
        configured: values from config files, by name.
        environ: the environment to read ``RLM_*`` from.

    Raises:
        ConfigurationError: names the setting (or the variable) and the value.
    """

    def __init__(self, configured: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ) -> None:
        self._values = dict(_DEFAULTS)
        self._shutdown_wait_s = _announced_wait_s(environ)
        self._caps: dict[str, Any] | None = None
        self.warnings: list[str] = []
        self._change(dict(configured or {}))
        variables = {n: s.env for n, s in SETTINGS.items() if s.env and environ.get(s.env, "").strip()}
        # All at once: whether a model name must be a spec depends on whether there is a factory.
        self._change({n: _parsed(v, SETTINGS[n], environ[v]) for n, v in variables.items()}, shown=variables)
        self._lock()

    def _lock(self) -> None:
        """Hold the limits at what is in force now, if they are to be locked. Who starts the kernel decides: files and environment count."""
        if self._values["limits_locked"] and self._caps is None:
            self._caps = {name: self._values[name] for name in LOCKABLE}

    @classmethod
    def from_traitlets(cls, rlm: Configurable, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read what config files set. A text (which is what ``--RLM.name=value`` gives) is read like one that a user typed."""
        given = {}
        for name, setting in SETTINGS.items():
            value = getattr(rlm, name)
            if value != _DEFAULTS[name]:
                given[name] = _parsed(name, setting, value) if isinstance(value, str) else value
        return cls(given, environ)

    @classmethod
    def read(
        cls, rlm: Configurable, environ: Mapping[str, str] = os.environ
    ) -> tuple[Settings, ConfigurationError | None]:
        """Read them like `from_traitlets`, where a bad value must not keep a kernel from starting: nobody would see why.

        Returns:
            the settings, and what was wrong. Then they are those of the config files alone, or the defaults; locked they are in any case
            if the config files say so, lest a bad variable be a way around it.
        """
        try:
            return cls.from_traitlets(rlm, environ), None
        except ConfigurationError as error:
            try:
                return cls.from_traitlets(rlm, {}), error
            except ConfigurationError:
                return cls({"limits_locked": bool(rlm.trait_values()["limits_locked"])}, {}), error

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def items(self) -> dict[str, Any]:
        """Return all settings with their values."""
        return dict(self._values)

    @property
    def factory(self) -> Any:
        """The client factory that is configured: a callable, ``"module:callable"``, or None."""
        if self._values["client_factory"] is not None:
            return self._values["client_factory"]
        if self._values["model"] is None:
            return None
        from rlm_kernel.clients.specs import SpecFactory

        return SpecFactory(self._values["model"])

    @property
    def warms_openai(self) -> bool:
        """Whether the nursery is to import ``openai``: the client may use it, and nobody says otherwise."""
        return bool(self._values["warm_openai"] and getattr(self.factory, "uses_openai", True))

    @property
    def call_model(self) -> str | None:
        """The model name that calls pass on. A spec's model is the client's own default, so it is None then."""
        return self._values["model"] if self._values["client_factory"] is not None else None

    def set_text(self, name: str, text: str) -> Any:
        """Set a setting from text that a user typed. Returns the value.

        Raises:
            ConfigurationError: unknown name or illegal value; nothing was changed.
        """
        value = _parsed(name, self._setting(name, text), text)
        self.set(name, value)
        return value

    def set_model_text(self, text: str) -> str | None:
        """Set the model from text that a user typed, in place of a client factory, which would otherwise win.

        Raises:
            ConfigurationError: it is no model spec; nothing was changed.
        """
        value: str | None = _parsed("model", SETTINGS["model"], text)
        self._change({"model": value, "client_factory": None})
        return value

    def set(self, name: str, value: Any) -> None:
        """Set a setting. A factory takes the place of a model that was named before: its client has models of its own.

        Raises:
            ConfigurationError: unknown name or illegal value; nothing was changed.
        """
        self._change({"client_factory": value, "model": None} if name == "client_factory" and value else {name: value})
        self._lock()

    def _setting(self, name: str, value: object) -> Setting:
        if name not in SETTINGS:
            import difflib

            close = difflib.get_close_matches(name, SETTINGS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(SETTINGS)}"
            raise ConfigurationError(name, value, f"there is no such setting; {hint}")
        return SETTINGS[name]

    def _change(self, changes: Mapping[str, Any], shown: Mapping[str, str] | None = None) -> None:
        for name in changes:
            self._setting(name, changes[name])
        values = {**self._values, **changes}
        try:
            _check(values)
        except ConfigurationError as error:
            if shown is None or error.field not in shown:
                raise
            raise ConfigurationError(shown[error.field], error.value, error.reason) from None
        if self._caps is not None:
            _check_caps(values, self._caps)
        self._values = values
        self._warn_about_graces()

    def _warn_about_graces(self) -> None:
        total = sum(self._values[n] for n in ("shutdown_grace_s", "terminate_grace_s", "kill_grace_s"))
        wait_s = self._shutdown_wait_s / 2
        warning = (
            f"the graces add up to {total:g} s; a Jupyter server sends SIGTERM {wait_s:g} s after a "
            "shutdown request unless its wait is raised, which `rlm-kernel install --provisioner` does for graces that "
            "environment variables set"
        )
        self.warnings = [warning] if total >= wait_s else []

    def managed(self) -> ManagedChildConfig | None:
        """Return the configuration of children, None if no model is configured."""
        factory = self.factory
        return None if factory is None else replace(_managed(self._values), client_factory=factory)

    def bounds(self) -> ManagedChildConfig:
        """Return the bounds alone; its factory is a placeholder that raises when called."""
        return _managed(self._values)


def _parsed(shown: str, setting: Setting, text: str) -> Any:
    try:
        return setting.parse(text)
    except ValueError:
        raise ConfigurationError(shown, text, f"must be {setting.what}") from None


def _managed(values: Mapping[str, Any]) -> ManagedChildConfig:
    names = [n for n in ManagedChildConfig.__dataclass_fields__ if n in values and n not in ("model", "client_factory")]
    return ManagedChildConfig(
        client_factory=values["client_factory"] or _not_configured,
        model=values["model"],
        **{name: values[name] for name in names},
    )


def _check(values: Mapping[str, Any]) -> None:
    if values["model"] is not None and values["client_factory"] is None:
        from rlm_kernel.clients.specs import parse_spec

        parse_spec(values["model"])
    keep = values["keep_runs"]
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ConfigurationError("keep_runs", keep, "must be a whole number of at least 1")
    _check_keep_alive(values["keep_alive_s"])
    for name in ("limits_locked", "warm_openai", "live_views"):
        if not isinstance(values[name], bool):
            raise ConfigurationError(name, values[name], "must be true or false")
    if values["run_dir"] is not None and not isinstance(values["run_dir"], str | os.PathLike):
        raise ConfigurationError("run_dir", values["run_dir"], "must be a directory")
    _managed(values)


def _check_caps(values: Mapping[str, Any], caps: Mapping[str, Any]) -> None:
    if not values["limits_locked"]:
        raise ConfigurationError("limits_locked", False, "limits that are locked stay so until the kernel starts anew")
    for name, cap in caps.items():
        value = values[name]
        if cap is not None and (value is None or value > cap):
            raise ConfigurationError(
                name, value, f"limits are locked in this kernel (limits_locked), and this one may be at most {cap!r}"
            )


def _check_keep_alive(seconds: Any) -> None:
    if seconds is None:
        return
    shortest, longest = KEEP_ALIVE_S
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not shortest <= seconds <= longest:
        reason = (
            f"must be {shortest:g} to {longest:g} seconds, or none (then servers may cull a kernel with live children)"
        )
        raise ConfigurationError("keep_alive_s", seconds, reason)


def _announced_wait_s(environ: Mapping[str, str]) -> float:
    """Return how long this kernel's launcher waits for its shutdown.

    Kernels further down inherit the variable, and it does not speak of them: so it names the launcher.
    """
    pid, _, seconds = environ.get(SHUTDOWN_WAIT_VARIABLE, "").partition(":")
    try:
        return float(seconds) if int(pid) == os.getppid() else JUPYTER_SHUTDOWN_WAIT_S
    except ValueError:
        return JUPYTER_SHUTDOWN_WAIT_S


def _not_configured() -> None:
    from rlm_kernel.errors import ModelNotConfigured

    raise ModelNotConfigured
