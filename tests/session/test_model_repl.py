"""Promises of `rlm_kernel.session.model_repl` and `rlm_kernel.session.models`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlm_kernel.clients.scripted import ScriptedClient
from rlm_kernel.clients.specs import SpecFactory
from rlm_kernel.environment.finalization import Finalization
from rlm_kernel.errors import ChildLimitError, ModelCallError
from rlm_kernel.final_text import FinalCall
from rlm_kernel.session.model_repl import ModelREPL
from rlm_kernel.session.models import ModelAccess, describe_model
from rlm_kernel.values import CodeResult, Completion, FinalAnswer, Usage


class FakeInterpreter:
    """Runs code with ``exec``; what it calls ``out`` is its output."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {}

    def execute(self, code: str) -> CodeResult:
        try:
            exec(code, self.namespace)
        except Exception as error:
            return CodeResult(success=False, exception=repr(error))
        return CodeResult(stdout=self.namespace.pop("out", ""))


class Meter:
    """Keeps what it was told, and refuses calls if it is told to."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended: list[Usage] = []
        self.refuses = False

    def begin_call(self) -> None:
        if self.refuses:
            raise ChildLimitError("max_total_tokens", 100)
        self.begun += 1

    def end_call(self, usage: Usage, model: str = "", duration_s: float = 0.0) -> None:
        self.ended.append(usage)


class Rig:
    def __init__(self, client: ScriptedClient) -> None:
        self.interpreter = FakeInterpreter()
        namespace = self.interpreter.namespace
        self.meter = Meter()
        self.finalization = Finalization(lambda: namespace, lambda: frozenset())
        self.models = ModelAccess(lambda: client, model="usual", meter=self.meter)
        restore: dict[str, Callable[..., Any]] = {"FINAL": self.finalization.FINAL, "ask": self.models.ask}
        self.repl = ModelREPL(self.interpreter, self.finalization, self.models, "the context", restore)  # type: ignore[arg-type]


@pytest.fixture
def client() -> ScriptedClient:
    return ScriptedClient(lambda messages: messages[-1]["content"].upper(), usage=Usage(1, 10, 2))


@pytest.fixture
def rig(client: ScriptedClient) -> Rig:
    return Rig(client)


def test_a_block_may_give_the_answer(rig: Rig) -> None:
    assert rig.repl.final_answer is None
    assert rig.repl.execute("FINAL(0)").success
    assert rig.repl.final_answer == FinalAnswer(0)


def test_a_block_that_raises_gives_none(rig: Rig) -> None:
    assert not rig.repl.execute("FINAL(0)\n1/0").success
    assert rig.repl.final_answer is None


def test_a_line_of_output_may_give_the_answer(rig: Rig) -> None:
    rig.repl.execute("out = 'FINAL(from output)\\n'")
    assert rig.repl.final_answer == FinalAnswer("from output")


def test_a_line_of_output_with_an_unknown_variable_fails_the_block(rig: Rig) -> None:
    result = rig.repl.execute("x = 1\nout = 'FINAL_VAR(y)\\n'")
    assert not result.success
    assert "no variable 'y'" in result.stderr
    assert str(result.exception).startswith("UnknownVariable")
    assert rig.repl.final_answer is None


def test_the_first_answer_stays(rig: Rig) -> None:
    rig.repl.execute("FINAL(1)")
    assert rig.repl.resolve_final(FinalCall("FINAL", "2")) == FinalAnswer("2")
    assert rig.repl.final_answer == FinalAnswer(1)


def test_helpers_are_put_back_before_each_block(rig: Rig) -> None:
    rig.repl.execute("FINAL = 5\ndel ask")
    assert rig.repl.execute("FINAL(ask('x'))").success
    assert rig.repl.final_answer == FinalAnswer("X")


def test_each_block_lists_its_own_model_calls(rig: Rig, client: ScriptedClient) -> None:
    rig.models.ask("before any block")
    result = rig.repl.execute("ask('a'); ask('b', 'other')")
    assert [(call.prompt, call.response, call.usage) for call in result.model_calls] == [
        ("a", "A", Usage(1, 10, 2)),
        ("b", "B", Usage(1, 10, 2)),
    ]
    assert rig.repl.execute("1").model_calls == ()
    assert [model for _, model in client.calls] == ["usual", "usual", "other"]


def test_a_failed_call_is_listed_with_its_error() -> None:
    rig = Rig(ScriptedClient(ModelCallError("no luck")))
    result = rig.repl.execute("ask('a')")
    assert not result.success
    (call,) = result.model_calls
    assert (call.prompt, call.response, call.error) == ("a", "", "ModelCallError: no luck")
    assert rig.models.usage == Usage()
    assert (rig.meter.begun, rig.meter.ended) == (1, [Usage()])


def test_a_refused_call_is_not_made(rig: Rig, client: ScriptedClient) -> None:
    rig.meter.refuses = True
    with pytest.raises(ChildLimitError):
        rig.models.ask("a")
    assert rig.models.ask_batch(["a"])[0].startswith("Error: ChildLimitError: max_total_tokens exceeded")
    assert client.calls == []


def test_the_loops_own_calls_are_counted_and_not_listed(rig: Rig) -> None:
    assert rig.models.complete([{"role": "user", "content": "a"}]).text == "A"
    assert rig.models.take_calls() == ()
    assert rig.models.usage == Usage(1, 10, 2)
    assert (rig.meter.begun, rig.meter.ended) == (1, [Usage(1, 10, 2)])


def test_a_batch_is_counted_and_listed_in_order(rig: Rig) -> None:
    assert rig.models.ask_batch([f"p{i}" for i in range(20)]) == [f"P{i}" for i in range(20)]
    assert [call.prompt for call in rig.models.take_calls()] == [f"p{i}" for i in range(20)]
    assert rig.models.usage == Usage(20, 200, 40)


def test_a_batch_puts_failures_in_place_whatever_they_are() -> None:
    def chat(messages: list[dict[str, str]]) -> Completion:
        if messages[0]["content"] == "bad":
            raise ZeroDivisionError("odd")
        return Completion("fine")

    rig = Rig(ScriptedClient(chat))
    assert rig.models.ask_batch(["a", "bad", "b"]) == ["fine", "Error: ZeroDivisionError: odd", "fine"]
    assert [call.error for call in rig.models.take_calls()] == [None, "ZeroDivisionError: odd", None]


def test_the_client_is_built_once_and_not_before_it_is_needed() -> None:
    built: list[int] = []

    def build() -> ScriptedClient:
        built.append(1)
        return ScriptedClient("x")

    models = ModelAccess(build)
    assert built == []
    models.ask("a")
    models.ask("b")
    assert built == [1]


def test_long_prompts_and_replies_are_cut_in_the_record_only(rig: Rig) -> None:
    assert len(rig.models.ask("x" * 100_000)) == 100_000
    (call,) = rig.models.take_calls()
    assert len(call.prompt) == len(call.response) == 20_000


def test_the_context_is_described(rig: Rig) -> None:
    assert rig.repl.context_metadata().context_total_length == len("the context")
    assert rig.repl.partial_answer() is None


def test_a_model_is_called_by_its_spec_its_factory_or_its_own_name() -> None:
    assert describe_model(SpecFactory("openai/x"), None) == "openai/x"
    assert describe_model("module:make", None) == "module:make"
    assert describe_model(test_the_context_is_described, None) == "test_the_context_is_described"
    assert describe_model(ScriptedClient.factory("x"), None) == "ScriptedFactory"
    assert describe_model("module:make", "my-model") == "my-model"
