"""Promises of the stand-in server: tests in other processes rely on them."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.model_script import code, parse_turns, reply, script
from tests.support.model_server import ModelServer, Reply


def ask(server: ModelServer, *messages: str, role: str = "user") -> str:
    """Send messages (user and assistant in turns) and return the reply's text."""
    roles = [role, "assistant"]
    body = {"model": "m", "messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(messages)]}
    request = urllib.request.Request(
        f"{server.base_url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def test_a_script_is_played_by_the_number_of_assistant_messages() -> None:
    task = script(code("x = [[1, 2], [3]]; y = x[x[0][0]]"), code("print(x)") + code("print(y)"), reply("FINAL(x[0])"))
    with ModelServer() as server:
        assert ask(server, task) == "```repl\nx = [[1, 2], [3]]; y = x[x[0][0]]\n```"
        assert ask(server, task, "a", "more") == "```repl\nprint(x)\n```\n```repl\nprint(y)\n```"
        assert ask(server, task, "a", task, "b", "more") == "FINAL(x[0])"
        assert ask(server, task, "a", "x", "b", "x", "c", "x") == "FINAL(x[0])"


def test_a_script_survives_being_previewed_repeated_and_cut() -> None:
    task = script(code(f"h = rlm_query({script(reply('42'))!r})"), reply("done"))
    repeated = f"Context (preview): {task[:40]}...\nContext: {task}\nYour task: {task}"
    assert parse_turns(repeated) == parse_turns(task)
    assert len(parse_turns(task)) == 2


def test_a_script_inside_a_script_reaches_the_child_as_it_was() -> None:
    inner = script(code("print('[')"), reply("FINAL(1)"))
    block = parse_turns(script(code(f"prompt = {inner!r}"), reply("FINAL(2)")))[0].texts[0]
    namespace: dict[str, str] = {}
    exec(block.removeprefix("```repl\n").removesuffix("\n```"), namespace)
    assert namespace["prompt"] == inner


TEXTS = st.text(alphabet=st.sampled_from("[]:/ \nax'\"turn"), max_size=40).map(str.strip)


@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_any_text_comes_back_as_it_was_written(texts) -> None:
    turns = parse_turns(script(*map(reply, texts)))
    assert [turn.texts for turn in turns] == [[text] for text in texts]


@pytest.mark.parametrize("text", ["", "plain", "x = [[1, 2], [3]]", "[[unknown]]", "[[reply: never closed", "[[delay"])
def test_ordinary_text_has_no_directives(text) -> None:
    assert parse_turns(text) == []


def test_only_the_first_user_message_with_directives_steers() -> None:
    with ModelServer() as server:
        assert ask(server, "hello", "a", "[[reply: 1]]", "b", "[[reply: 2]]") == "1"
        assert ask(server, "[[reply: from the system]]", role="system") == "from the system"


def test_without_directives_the_handler_decides() -> None:
    with ModelServer(lambda body: Reply(body["messages"][0]["content"] + "!")) as server:
        assert ask(server, "hello") == "hello!"
        assert ask(server, "[[reply: directed]]") == "directed"
    with ModelServer("always") as server:
        assert ask(server, "hello") == "always"


def test_a_blocked_request_is_in_flight_until_it_is_released() -> None:
    with ModelServer() as server:
        answers: list[str] = []
        threads = [
            threading.Thread(target=lambda text=text: answers.append(ask(server, text)))
            for text in ("[[block a]] [[reply: a]]", "[[block b]] [[reply: b]]")
        ]
        for thread in threads:
            thread.start()
        server.wait_until(lambda: server.in_flight == 2)
        server.release("b")
        threads[1].join(10)
        assert answers == ["b"]
        server.wait_until(lambda: server.in_flight == 1)  # the client may have its answer a moment before that
        assert server.max_in_flight == 2
        server.release("a")
        threads[0].join(10)
        server.wait_until_idle()
        assert answers == ["b", "a"]


def test_a_delayed_reply_comes_after_its_delay() -> None:
    with ModelServer() as server:
        began = time.monotonic()
        assert ask(server, "[[delay 0.1]] [[reply: late]]") == "late"
        assert time.monotonic() - began >= 0.1


def test_stopping_lets_go_what_is_held_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    failures: list[Exception] = []

    def blocked() -> None:
        try:
            ask(server, "[[block]]")
        except OSError as exc:
            failures.append(exc)

    with ModelServer() as server:
        asking = [threading.Thread(target=blocked) for _ in range(3)]
        for thread in asking:
            thread.start()
        server.wait_for_request("[[block]]", count=3)
        began = time.monotonic()
    assert time.monotonic() - began < 2
    for thread in asking:
        thread.join(10)
    assert len(failures) == 3
    assert set(threading.enumerate()) == before


def test_once_means_the_first_time_for_each_prompt() -> None:
    with ModelServer() as server:
        for name in ("x", "y"):
            prompt = f"{name} [[status 500 once]] [[reply: {name}]]"
            with pytest.raises(urllib.error.HTTPError) as caught:
                ask(server, prompt)
            caught.value.close()
            assert ask(server, prompt) == name


def test_waiting_for_a_request_that_does_not_come_says_which_came() -> None:
    with ModelServer() as server:
        ask(server, "this one")
        with pytest.raises(TimeoutError, match="this one"):
            server.wait_for_request("another", timeout_s=0.01)
        assert server.wait_for_request(lambda request: request.path.endswith("completions")).text == "this one"


def test_another_path_is_not_found() -> None:
    with ModelServer() as server, pytest.raises(urllib.error.HTTPError, match="404") as caught:
        urllib.request.urlopen(f"{server.base_url}/embeddings", timeout=10)
    caught.value.close()
