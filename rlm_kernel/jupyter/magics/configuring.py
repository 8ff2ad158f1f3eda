"""Commands that show and change settings."""

from __future__ import annotations

from argparse import Namespace

from IPython.core.magic_arguments import argument

from rlm_kernel.errors import ConfigurationError
from rlm_kernel.jupyter.magics.commands import Here, command
from rlm_kernel.jupyter.views.base import Table
from rlm_kernel.session.config import SETTINGS
from rlm_kernel.session.session import RLMSession

_QUOTES = ('"', "'")


@command(
    "model",
    argument(
        "spec", nargs="?", metavar="SPEC", help="provider/model, or demo: a stand-in that works offline; none for none"
    ),
)
def model(here: Here, args: Namespace) -> None:
    """Show or set the model."""
    session = here.session
    if args.spec is not None:
        session.configure("model", args.spec)
        if session.is_managed:
            session.prepare()
    name = session.model_name
    print(f"model: {name}" if name else "no model is configured; type `%rlm model demo` or `%rlm model provider/model`")
    if name == "demo":
        from rlm_kernel.clients.demo import DEMO_NOTICE

        print(DEMO_NOTICE)


@command(
    "config",
    argument("setting", nargs="?", metavar="NAME[=VALUE]", help="a setting, and its new value: the rest of the line"),
    tail="setting",
)
def config(here: Here, args: Namespace) -> Table | None:
    """Show all settings, show one, or set one. It holds for children started from now on.

    client_factory=NAME takes module:callable, or a callable variable of this notebook."""
    session = here.session
    name, equals, text = (args.setting or "").partition("=")
    name = name.strip()
    if equals:
        _set(session, name, _unquoted(text.strip()))
        return None
    if name and name not in SETTINGS:
        session.settings.set_text(name, "")  # raises, and says which settings there are
    values = session.settings.items()
    names = [name] if name else list(values)
    rows = tuple((n, repr(values[n]), _meaning(n)) for n in names)
    return Table("Settings; set one with %rlm config NAME=VALUE", ("name", "value", "meaning (variable)"), rows)


def _meaning(name: str) -> str:
    setting = SETTINGS[name]
    return f"{setting.help} ({setting.env})" if setting.env else setting.help


def _set(session: RLMSession, name: str, text: str) -> None:
    if name == "client_factory" and text.isidentifier() and text.lower() != "none":
        _set_factory(session, text)
        shown = text
    else:
        shown = repr(session.configure(name, text))
    print(f"{name} = {shown}")
    for warning in session.settings.warnings:
        print(f"note: {warning}")


def _unquoted(text: str) -> str:
    """Take off quotes around the whole, which whoever writes Python types out of habit."""
    quote = text[:1]
    return text[1:-1] if quote in _QUOTES and len(text) > 1 and text[-1] == quote and text.count(quote) == 2 else text


def _set_factory(session: RLMSession, variable: str) -> None:
    """Take a variable of the user's as the client factory: what it is bound to now, not what it is bound to later."""
    namespace = session.namespace
    if variable not in namespace:
        raise ConfigurationError(
            "client_factory", variable, "there is no such variable; give module:callable, or the name of a callable"
        )
    factory = namespace[variable]
    if not callable(factory):
        kind = type(factory).__name__
        raise ConfigurationError(
            "client_factory",
            variable,
            f"is of type {kind}, which cannot be called; give a function without arguments that returns a client",
        )
    session.configure_value("client_factory", factory)
    session.prepare()
