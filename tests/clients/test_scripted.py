"""Promises of `rlm_kernel.clients.scripted`."""

from __future__ import annotations

import pickle
import threading
import time
from typing import Any

import cloudpickle
import pytest

from rlm_kernel.clients.base import as_client, build_client, complete_batch
from rlm_kernel.clients.scripted import ScriptedClient
from rlm_kernel.errors import ConfigurationError, ModelCallError
from rlm_kernel.values import Completion, Message, Usage


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def upper(messages):
    return messages[-1]["content"].upper()


def test_replies_are_given_in_turn_and_calls_are_recorded() -> None:
    client = ScriptedClient(["one", upper, Completion("three", Usage(1, 5, 6))])
    messages = user("two")
    assert [client.complete(messages, "m").text for _ in range(3)] == ["one", "TWO", "three"]
    messages.append({"role": "assistant", "content": "later"})
    messages[0]["content"] = "changed"
    assert client.calls == [(user("two"), "m")] * 3


def test_a_script_that_is_used_up_fails_and_says_how_long_it_was() -> None:
    client = ScriptedClient(["one", "two"])
    client.complete(user("x"))
    client.complete(user("x"))
    with pytest.raises(ModelCallError, match="used up its 2 replies"):
        client.complete(user("x"))
    assert len(client.calls) == 3
    with pytest.raises(ModelCallError, match="used up its 0 replies"):
        ScriptedClient().complete(user("x"))


def test_a_script_may_begin_again() -> None:
    client = ScriptedClient(["a", "b"], loop=True)
    assert [client.complete(user("x")).text for _ in range(5)] == ["a", "b", "a", "b", "a"]


@pytest.mark.parametrize(("reply", "text"), [("always", "always"), (upper, "X"), (Completion("c"), "c")])
def test_a_single_reply_is_given_every_time(reply, text) -> None:
    client = ScriptedClient(reply)
    assert [client.complete(user("x")).text for _ in range(3)] == [text] * 3


@pytest.mark.parametrize("error", [ValueError("planned"), ValueError, KeyboardInterrupt])
def test_an_exception_among_the_replies_is_raised_and_the_next_call_goes_on(error) -> None:
    client = ScriptedClient([error, "after"])
    with pytest.raises(error if isinstance(error, type) else type(error)):
        client.complete(user("x"))
    assert client.complete(user("x")).text == "after"


def test_a_function_may_take_the_model_and_must_give_text() -> None:
    nothing: Any = lambda messages: None  # noqa: E731
    client = ScriptedClient([lambda messages, model: model, nothing])
    assert client.complete(user("x"), "m").text == "m"
    with pytest.raises(ModelCallError, match="None"):
        client.complete(user("x"))


def test_rules_decide_by_the_last_user_message_and_the_rest_falls_to_the_replies() -> None:
    client = ScriptedClient(["fallback"], rules={r"part (\d)": ["first", "second"], "sum.*up": "always"})
    conversation = [*user("part 1"), {"role": "assistant", "content": "sum up"}, *user("sum\nup")]
    asked = [user("part 1"), conversation, user("part 2"), conversation, user("else")]
    assert [client.complete(messages).text for messages in asked] == ["first", "always", "second", "always", "fallback"]
    with pytest.raises(ModelCallError, match=r"used up its 2 replies for the rule 'part"):
        client.complete(user("part 3"))


def test_a_prompt_that_no_rule_matches_is_named() -> None:
    with pytest.raises(ModelCallError, match="no rule of the scripted client matches 'something else'"):
        ScriptedClient(rules={"part": "x"}).complete(user("something else"))


def test_usage_is_what_was_asked_for() -> None:
    client = ScriptedClient(["a", upper, Completion("c", Usage(1, 9, 9))], usage=Usage(1, 2, 3))
    used = [client.complete(user("x")).usage for _ in range(3)]
    assert used == [Usage(1, 2, 3), Usage(1, 2, 3), Usage(1, 9, 9)]
    assert ScriptedClient("a").complete(user("x")).usage == Usage(calls=1)


def test_a_delay_is_kept_and_does_not_hold_up_other_calls() -> None:
    client = ScriptedClient("x", delay_s=0.2)
    began = time.monotonic()
    complete_batch(client, [user("x")] * 8, None, 8)
    assert 0.2 <= time.monotonic() - began < 1.2  # 1.6 one after the other


def test_each_reply_is_given_once_however_many_threads_ask() -> None:
    client = ScriptedClient([str(n) for n in range(400)])
    together = threading.Barrier(8)
    seen: list[str] = []

    def ask() -> None:
        together.wait()
        seen.extend([client.complete(user("x")).text for _ in range(50)])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(int, seen)) == list(range(400))


@pytest.mark.parametrize("travel", [lambda f: f, lambda f: pickle.loads(pickle.dumps(f))])
def test_a_factory_travels_and_gives_a_fresh_script_each_time(travel) -> None:
    factory = travel(ScriptedClient.factory(["one", ValueError("two"), upper], rules={"part": ["p"]}, loop=True))
    for _ in range(2):
        client = build_client(factory)
        assert client.complete(user("x")).text == "one"
        assert client.complete(user("part")).text == "p"
        assert as_client(client) is client


def test_a_factory_with_functions_from_a_notebook_travels_by_cloudpickle() -> None:
    factory = cloudpickle.loads(cloudpickle.dumps(ScriptedClient.factory([lambda messages: "from a lambda"])))
    assert factory().complete(user("x")).text == "from a lambda"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"replies": [3]}, "replies"),
        ({"replies": None}, "replies"),
        ({"replies": "x", "rules": {"(": "x"}}, "rules"),
        ({"replies": "x", "rules": {"x": [None]}}, "replies"),
        ({"replies": "x", "delay_s": -1}, "delay_s"),
    ],
)
def test_a_mistake_in_a_script_shows_when_it_is_written(arguments, field) -> None:
    for make in (ScriptedClient, ScriptedClient.factory):
        with pytest.raises(ConfigurationError) as caught:
            make(**arguments)
        assert caught.value.field == field
