"""Promises of `rlm_kernel.clients.base`."""

from __future__ import annotations

import contextvars
import functools
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlm_kernel.clients.base import CheckedClient, ModelClient, as_client, build_client, complete_batch
from rlm_kernel.clients.scripted import ScriptedClient
from rlm_kernel.errors import ConfigurationError, ModelCallError
from rlm_kernel.values import Completion, Message, Usage

CHECKOUT = Path(__file__).resolve().parents[2]


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


HELLO = user("hello")


class Duck:
    """Looks like a client without inheriting from `ModelClient`."""

    def __init__(self, reply: object) -> None:
        self.reply = reply

    def complete(self, messages, model=None):
        return self.reply


class Callable2:
    def __call__(self, messages, model):
        return f"{messages[0]['content']}/{model}"


# --- chat functions


def two(messages, model):
    return f"{messages[0]['content']}/{model}"


def two_optional(messages, model=None):
    return f"{messages[0]['content']}/{model}"


def own_default(messages, model="own"):
    return f"{messages[0]['content']}/{model}"


def odd_names(chat, which):
    return f"{chat[0]['content']}/{which}"


def keyword_only(messages, *, model=None):
    return f"{messages[0]['content']}/{model}"


def keywords(messages, **options):
    return f"{messages[0]['content']}/{options.get('model', '-')}"


def anything(*args):
    return f"{args[0][0]['content']}/{args[1] if len(args) > 1 else '-'}"


def model_first(model, messages):
    return f"{messages[0]['content']}/{model}"


def one(messages):
    return messages[0]["content"]


def other_option(messages, temperature=0.5):
    return f"{messages[0]['content']}/{temperature}"


def option_then_model(messages, temperature=0.5, model=None):
    return f"{messages[0]['content']}/{temperature}/{model}"


@pytest.mark.parametrize(
    ("function", "with_model", "without_model"),
    [
        (two, "hello/m", "hello/None"),
        (two_optional, "hello/m", "hello/None"),
        (own_default, "hello/m", "hello/own"),
        (odd_names, "hello/m", "hello/None"),
        (keyword_only, "hello/m", "hello/None"),
        (keywords, "hello/m", "hello/-"),
        (anything, "hello/m", "hello/-"),
        (model_first, "hello/m", "hello/None"),
        (one, "hello", "hello"),
        (other_option, "hello/0.5", "hello/0.5"),
        (option_then_model, "hello/0.5/m", "hello/0.5/None"),
        (Callable2(), "hello/m", "hello/None"),
        (Callable2().__call__, "hello/m", "hello/None"),
        (functools.partial(two, model="fixed"), "hello/m", "hello/fixed"),
        (lambda messages: messages[0]["content"], "hello", "hello"),
    ],
)
def test_every_shape_of_chat_function_gets_what_it_takes(function, with_model, without_model) -> None:
    client = as_client(function)
    assert client.complete(HELLO, "m") == Completion(with_model)
    assert client.complete(HELLO) == Completion(without_model)


def test_a_type_error_inside_a_two_argument_function_is_its_own_and_it_is_called_once() -> None:
    calls = []

    def broken(messages, model):
        calls.append(model)
        raise TypeError("broken() takes 1 positional argument but 2 were given")

    with pytest.raises(TypeError, match="takes 1 positional"):
        as_client(broken).complete(HELLO, "m")
    assert calls == ["m"]


@pytest.mark.parametrize("reply", [None, 3, b"bytes", ["x"], {"content": "x"}, Completion(None)])  # type: ignore[arg-type]
@pytest.mark.parametrize("wrap", [lambda reply: lambda messages: reply, Duck])
def test_a_reply_that_is_no_text_is_a_failed_call_that_names_its_type(wrap, reply) -> None:
    name = "None" if reply is None or isinstance(reply, Completion) else type(reply).__name__
    with pytest.raises(ModelCallError, match=name):
        as_client(wrap(reply)).complete(HELLO)


@pytest.mark.parametrize("reply", ["", "text", Completion("text", Usage(1, 2, 3))])
def test_text_and_completions_pass(reply) -> None:
    expected = reply if isinstance(reply, Completion) else Completion(reply)
    assert as_client(lambda messages: reply).complete(HELLO) == expected
    assert as_client(Duck(reply)).complete(HELLO) == expected


def test_a_declared_client_is_used_as_it_is_and_a_lookalike_is_checked() -> None:
    declared = ScriptedClient(["x"])
    assert as_client(declared) is declared
    lookalike = Duck("x")
    wrapped = as_client(lookalike)
    assert isinstance(wrapped, CheckedClient)
    assert wrapped.wrapped is lookalike
    assert as_client(wrapped) is wrapped
    assert isinstance(wrapped, ModelClient)


async def asynchronous(messages):
    return "x"


def no_messages():
    return "x"


def too_many(messages, model, tools):
    return "x"


@pytest.mark.parametrize(
    ("thing", "reason"),
    [
        (3, "gives int, which is neither a client"),
        (None, "gives None, which is neither"),
        ("text", "gives str"),
        (ScriptedClient, "is a class"),
        (asynchronous, "async"),
        (no_messages, "is it a factory"),
        (too_many, "it also wants tools"),
    ],
)
def test_what_is_no_client_is_refused_when_wrapped(thing, reason) -> None:
    with pytest.raises(ConfigurationError, match=reason) as caught:
        as_client(thing)
    assert caught.value.field == "client_factory"
    with pytest.raises(ConfigurationError, match="llm_chat_fn"):
        as_client(thing, field="llm_chat_fn")


def test_a_coroutine_from_an_ordinary_function_is_refused_without_a_warning_elsewhere() -> None:
    with pytest.raises(ModelCallError, match="coroutine"):
        as_client(lambda messages: asynchronous(messages)).complete(HELLO)


# --- factories


class Namespace:
    @staticmethod
    def make():
        return one

    number = 3


def make_duck() -> Duck:
    return Duck("quack")


def make_failing() -> None:
    raise ValueError("no such region")


def make_keyless() -> None:
    raise ModelCallError("Set SOME_API_KEY")


def make_number() -> int:
    return 3


HERE = __name__


@pytest.mark.parametrize("factory", [make_duck, f"{HERE}:make_duck", f"{HERE}:Namespace.make", lambda: one])
def test_a_factory_may_be_a_callable_or_a_path_and_give_a_client_or_a_chat_function(factory) -> None:
    assert build_client(factory).complete(HELLO).text in ("quack", "hello")


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("no_such_module_here:make", "'no_such_module_here' cannot be imported: ModuleNotFoundError"),
        (f"{HERE}:make_dukc", "has no 'make_dukc'; did you mean 'make_duck'"),
        (f"{HERE}:Namespace.nothing", "'Namespace' has no 'nothing'"),
        (f"{HERE}:Namespace.number", "is int, which cannot be called"),
        (f"{HERE}:make_number", "gives int"),
        (f"{HERE}:one", "must take no arguments"),
        (two, "A chat function is what a factory returns"),
        (HERE, "module:callable"),
        (f"{HERE}:", "module:callable"),
        ("ollama/llama3:8b", "%rlm model ollama/llama3:8b"),
        (make_number, "gives int"),
    ],
)
def test_a_factory_that_cannot_be_used_says_why(factory, reason) -> None:
    with pytest.raises(ConfigurationError, match=reason) as caught:
        build_client(factory)
    assert caught.value.field == "client_factory"


def test_a_module_that_breaks_on_import_says_how(tmp_path, monkeypatch) -> None:
    (tmp_path / "breaks_on_import.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match="ZeroDivisionError: division by zero"):
        build_client("breaks_on_import:make")


def test_an_error_in_a_factory_is_a_failed_call_that_says_which() -> None:
    with pytest.raises(
        ModelCallError, match="client factory 'make_failing' failed: ValueError: no such region"
    ) as caught:
        build_client(make_failing)
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_of_ours_in_a_factory_comes_through_as_it_is() -> None:
    with pytest.raises(ModelCallError, match=r"^Set SOME_API_KEY$"):
        build_client(make_keyless)


# --- batches


def test_a_batch_keeps_the_order_and_one_failure_loses_no_other() -> None:
    second_done = threading.Event()

    def chat(messages):
        text = messages[0]["content"]
        if text == "0":
            assert second_done.wait(10)  # the first can only end after a later one has
        if text == "2":
            second_done.set()
        if text == "1":
            raise ValueError("one")
        return text * 2

    done = complete_batch(as_client(chat), [user(str(n)) for n in range(4)], None, max_workers=3)
    assert [d if isinstance(d, Completion) else repr(d) for d in done] == [
        Completion("00"),
        "ValueError('one')",
        Completion("22"),
        Completion("33"),
    ]


def test_a_batch_runs_as_many_calls_at_once_as_allowed_and_no_more() -> None:
    together = threading.Barrier(3, timeout=10)
    running, most, lock = 0, 0, threading.Lock()

    def chat(messages):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait()
        with lock:
            running -= 1
        return "x"

    done = complete_batch(as_client(chat), [HELLO] * 6, None, max_workers=3)
    assert done == [Completion("x")] * 6
    assert most == 3


@pytest.mark.parametrize("max_workers", [1, 4])
def test_context_variables_of_the_caller_are_seen_and_not_changed(max_workers) -> None:
    variable = contextvars.ContextVar("variable", default="unset")

    def chat(messages):
        seen = variable.get()
        variable.set("changed by a call")
        return seen

    variable.set("the caller's")
    done = complete_batch(as_client(chat), [HELLO] * 8, None, max_workers=max_workers)
    assert done == [Completion("the caller's")] * 8
    assert variable.get() == "the caller's"


@pytest.mark.parametrize("max_workers", [1, 4])
def test_a_batch_passes_the_model_and_may_be_empty(max_workers) -> None:
    client = ScriptedClient("x")
    assert complete_batch(client, [], "m", max_workers) == []
    complete_batch(client, [HELLO, HELLO], "m", max_workers)
    assert [model for _, model in client.calls] == ["m", "m"]


def test_a_batch_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="max_workers=0"):
        complete_batch(ScriptedClient("x"), [HELLO], None, 0)


@pytest.mark.parametrize("max_workers", [1, 2])
def test_an_exit_inside_a_call_ends_the_batch_instead_of_hanging_it(max_workers) -> None:
    def chat(messages):
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        complete_batch(as_client(chat), [HELLO] * 4, None, max_workers)


def test_an_interrupt_of_the_waiting_caller_comes_at_once_and_no_further_call_starts() -> None:
    started: queue.SimpleQueue[str] = queue.SimpleQueue()
    let_go = threading.Event()
    threads: list[threading.Thread] = []
    both_run = threading.Barrier(2, action=lambda: os.kill(os.getpid(), signal.SIGINT))

    def chat(messages):
        threads.append(threading.current_thread())
        started.put(messages[0]["content"])
        both_run.wait(10)
        assert let_go.wait(10)
        return "x"

    try:
        with pytest.raises(KeyboardInterrupt):
            complete_batch(as_client(chat), [user(str(n)) for n in range(6)], None, max_workers=2)
    finally:
        let_go.set()
        for thread in threads:
            thread.join(10)
    assert sorted(started.get_nowait() for _ in range(started.qsize())) == ["0", "1"]
    assert not any(thread.is_alive() for thread in threads)


def test_a_hanging_call_does_not_keep_the_interpreter_from_exiting() -> None:
    program = """
import os, signal, threading
from rlm_kernel.clients.base import as_client, complete_batch
both = threading.Barrier(2, action=lambda: os.kill(os.getpid(), signal.SIGINT))
def chat(messages):
    both.wait()
    threading.Event().wait()
try:
    complete_batch(as_client(chat), [[{"role": "user", "content": "x"}]] * 2)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_too_few_threads_to_be_had_only_make_a_batch_slower(monkeypatch) -> None:
    real_start = threading.Thread.start
    started: list[threading.Thread] = []

    def start(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real_start(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert complete_batch(as_client(one), [HELLO] * 5) == [Completion("hello")] * 5
    assert len(started) == 1
