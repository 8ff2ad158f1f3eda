"""``%rlm config client_factory=NAME`` takes a callable of the user's notebook."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from IPython.core.error import UsageError

from rlm_kernel.clients.scripted import ScriptedClient
from rlm_kernel.environment.interpreter import make_shell
from rlm_kernel.jupyter.magics import RLMMagics
from rlm_kernel.session.config import Settings
from rlm_kernel.session.session import RLMSession


class SessionWithoutProcesses(RLMSession):
    """A real session, but for the nursery, which it only counts the calls for."""

    prepared = 0

    def prepare(self) -> None:
        self.prepared += 1


@pytest.fixture
def session() -> Iterator[SessionWithoutProcesses]:
    session = SessionWithoutProcesses(Settings(environ={}), {})
    yield session
    session.shutdown()


@pytest.fixture
def magics(session: SessionWithoutProcesses) -> RLMMagics:
    return RLMMagics(make_shell(), session)


def test_a_function_of_the_notebook_becomes_the_client_factory(session, magics, capsys):
    """The next model call goes to the client that the function returns, and what is printed holds no address."""
    session.namespace["make_client"] = lambda: ScriptedClient("scripted")
    assert magics.rlm("config client_factory=make_client") is None
    assert capsys.readouterr().out == "client_factory = make_client\n"
    assert session.functions["llm_query"]("hello") == "scripted"


def test_setting_a_factory_starts_the_nursery_so_that_the_first_child_need_not_wait(session, magics):
    session.namespace["make_client"] = lambda: ScriptedClient("scripted")
    magics.rlm("config client_factory = make_client")
    assert session.prepared == 1


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (ScriptedClient("a client, not a factory"), "of type ScriptedClient, which cannot be called"),
        (3, "of type int, which cannot be called"),
    ],
)
def test_a_variable_that_cannot_be_called_is_refused_and_nothing_changes(session, magics, value, complaint):
    session.namespace["thing"] = value
    with pytest.raises(UsageError, match=complaint):
        magics.rlm("config client_factory=thing")
    assert session.settings["client_factory"] is None
    assert session.prepared == 0


def test_an_unknown_name_is_refused_by_name(magics):
    with pytest.raises(UsageError, match=r"client_factory='make_clent'.*no such variable"):
        magics.rlm("config client_factory=make_clent")


def test_a_dotted_name_is_still_looked_up_in_its_module_and_none_still_unsets(session, magics, capsys):
    session.namespace["none"] = lambda: ScriptedClient("must not be taken")
    magics.rlm("config client_factory=rlm_kernel.clients.demo:DemoClient")
    assert session.settings["client_factory"] == "rlm_kernel.clients.demo:DemoClient"
    magics.rlm("config client_factory=none")
    assert session.settings["client_factory"] is None
    assert "client_factory = None" in capsys.readouterr().out


def test_the_help_says_so(magics, capsys):
    magics.rlm("config --help")
    assert "callable variable of this notebook" in capsys.readouterr().out
    assert "callable variable of this notebook" in (RLMMagics.rlm.__doc__ or "")
