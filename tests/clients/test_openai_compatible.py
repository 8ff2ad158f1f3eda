"""Promises of `rlm_kernel.clients.openai_compatible`, against a real HTTP server."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from rlm_kernel.clients import openai_compatible
from rlm_kernel.clients.base import as_client, complete_batch
from rlm_kernel.clients.openai_compatible import OpenAICompatibleClient, prewarm
from rlm_kernel.clients.replies import origin_of
from rlm_kernel.clients.specs import SpecFactory
from rlm_kernel.errors import ConfigurationError, ModelCallError
from rlm_kernel.values import Completion, Message, Usage
from tests.support.model_server import ModelServer, Reply

CHECKOUT = Path(__file__).resolve().parents[2]
QUICK_S = 3.0
"""Within this a child that cannot reach its model has to have failed, with the client's defaults."""


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer() as running:
        yield running


@pytest.fixture
def client(server) -> Iterator[OpenAICompatibleClient]:
    made = OpenAICompatibleClient(server.base_url, server.api_key, "test-model", key_variable="TEST_API_KEY")
    yield made
    made.close()


def failure_of(client: OpenAICompatibleClient, prompt: str) -> str:
    """Make a call that must fail, check what holds for every failure, and return the error's text."""
    with pytest.raises(ModelCallError) as caught:
        client.complete(user(prompt))
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 700
    assert origin_of(client.base_url) in text
    assert client._key == "no-key" or client._key not in text
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    return text


# --- replies


def test_a_completion_has_the_text_and_the_tokens(client, server) -> None:
    assert client.complete(user("[[reply: Hällo\n]] [[usage 100 20]]")) == Completion("Hällo", Usage(1, 100, 20))
    assert server.requests[0].body["model"] == "test-model"
    assert server.requests[0].body["messages"] == user("[[reply: Hällo\n]] [[usage 100 20]]")
    assert server.requests[0].headers["authorization"] == f"Bearer {server.api_key}"


def test_missing_usage_counts_as_a_call_without_tokens(client) -> None:
    assert client.complete(user("[[no-usage]] [[reply: x]]")) == Completion("x", Usage(1, 0, 0))


def test_a_reply_with_reasoning_only_is_an_empty_text(client) -> None:
    assert client.complete(user("[[null-content]]")).text == ""


def test_a_call_may_name_its_model_and_extra_body_passes_through(server) -> None:
    with_extra = OpenAICompatibleClient(
        server.base_url, "k", "m", extra_body={"grammar": "root ::= x", "temperature": 0}
    )
    with_extra.complete(user("x"), "other")
    with_extra.close()
    body = server.requests[0].body
    assert (body["model"], body["grammar"], body["temperature"]) == ("other", "root ::= x", 0)


def test_without_any_model_the_error_says_to_name_one(server) -> None:
    nameless = OpenAICompatibleClient(server.base_url, "k")
    with pytest.raises(ConfigurationError, match="no default model"):
        nameless.complete(user("x"))
    assert server.requests == []


def test_the_models_of_a_server_can_be_listed() -> None:
    with ModelServer(models=("a", "b/c")) as server:
        client = OpenAICompatibleClient(server.base_url, "k")
        assert client.models() == ["a", "b/c"]
        client.close()


# --- failures: every one a ModelCallError with one readable line, quickly


@pytest.mark.parametrize(
    ("directive", "expected"),
    [
        ("[[status 400]]", ["HTTP 400 Bad Request", "told to answer 400", "extra_body"]),
        ("[[status 401]]", ["HTTP 401 Unauthorized", "the key was not accepted", "Check TEST_API_KEY"]),
        ("[[status 402]]", ["HTTP 402 Payment Required"]),
        ("[[status 403]]", ["HTTP 403 Forbidden", "access denied", "test-model"]),
        ("[[status 404]]", ["HTTP 404 Not Found", "Check the model name 'test-model'"]),
        ("[[status 429]]", ["HTTP 429", "rate limit", "max_concurrent_model_calls"]),
        ("[[status 500]]", ["HTTP 500", "told to answer 500", "server's log"]),
        ("[[status 503]]", ["HTTP 503", "the server failed"]),
        ("[[status 599]]", ["HTTP 599, the server failed"]),
        ("[[garbage]]", ["malformed reply", "It works!", "base URL of an OpenAI-compatible server?"]),
        ("[[bad-json]]", ["malformed reply", "not a JSON object"]),
        ("[[empty-choices]]", ["malformed reply", "no `choices`"]),
        ("[[no-choices]]", ["malformed reply", "no `choices`"]),
        ("[[close]]", ["no connection", "Server disconnected", "Is the server running at http://127.0.0.1"]),
        ("[[truncate]]", ["no connection", "RemoteProtocolError"]),
    ],
)
def test_a_failed_call_says_in_one_line_what_happened_where_and_what_to_do(server, directive, expected) -> None:
    client = OpenAICompatibleClient(
        server.base_url, server.api_key, "test-model", max_retries=0, key_variable="TEST_API_KEY"
    )
    text = failure_of(client, directive)
    assert [part for part in expected if part not in text] == []
    assert "<" not in text
    assert client.complete(user("[[reply: still usable]]")).text == "still usable"
    client.close()


@pytest.mark.parametrize(
    ("directive", "attempts"), [("[[status 500]]", 3), ("[[close]]", 3), ("[[garbage]]", 1), ("[[status 401]]", 1)]
)
def test_with_the_defaults_a_broken_server_is_asked_again_and_yet_fails_quickly(
    client, server, directive, attempts
) -> None:
    began = time.monotonic()
    failure_of(client, directive)
    assert time.monotonic() - began < QUICK_S
    assert len(server.requests) == attempts


def test_a_refused_connection_fails_quickly_and_asks_whether_the_server_runs() -> None:
    with socket.socket() as unused:  # bound but not listening: connecting is refused, and nobody else gets the port
        unused.bind(("127.0.0.1", 0))
        client = OpenAICompatibleClient(f"http://127.0.0.1:{unused.getsockname()[1]}/v1", "key-0123456789", "m")
        began = time.monotonic()
        text = failure_of(client, "x")
        assert time.monotonic() - began < QUICK_S
        client.close()
    assert "Connection refused" in text
    assert f"Is the server running at {origin_of(client.base_url)}?" in text


def test_a_server_that_does_not_answer_in_time_is_a_failed_call(server) -> None:
    client = OpenAICompatibleClient(server.base_url, server.api_key, "m", max_retries=0, timeout_s=0.1)
    text = failure_of(client, "[[block]]")
    assert "timed out (limit 0.1 s)" in text
    assert "ReadTimeout" in text
    client.close()


def test_retry_after_is_honoured_and_the_call_then_succeeds(client, server) -> None:
    began = time.monotonic()
    assert client.complete(user("[[status 429 retry-after 0.7 once]] [[reply: done]]")).text == "done"
    assert time.monotonic() - began >= 0.7  # without the header the first pause is at most 0.5 s
    assert len(server.requests) == 2


def test_a_wait_that_is_too_long_is_said_instead_of_waited(client) -> None:
    assert "retry after: 4000" in failure_of(client, "[[status 429 retry-after 4000]]")


def test_a_server_that_fails_once_is_asked_again(client, server) -> None:
    assert client.complete(user("[[close once]] [[reply: done]]")).text == "done"
    assert len(server.requests) == 2


def test_a_key_that_a_server_echoes_is_not_shown() -> None:
    with ModelServer(require_key=True) as server:
        client = OpenAICompatibleClient(server.base_url, "sk-wrong-0123456789", "m")
        text = failure_of(client, "x")
        client.close()
    assert "Incorrect API key provided" in text
    assert "[redacted]" in text


def test_without_a_key_a_401_says_to_set_one(monkeypatch) -> None:
    monkeypatch.delenv("TEST_API_KEY", raising=False)
    with ModelServer(require_key=True) as server:
        client = OpenAICompatibleClient(server.base_url, None, "m", key_variable="TEST_API_KEY")
        assert "Set TEST_API_KEY" in failure_of(client, "x")
        client.close()


# --- construction


def test_openai_itself_needs_a_key_and_says_which_variable(monkeypatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(ModelCallError, match=r"api\.openai\.com needs a key\. Set OPENAI_API_KEY"):
        OpenAICompatibleClient()


def test_the_environment_gives_the_address_and_the_key(server, monkeypatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    client = OpenAICompatibleClient(default_model="m")
    monkeypatch.delenv("OPENAI_API_KEY")  # a child drops its secrets once the client is built
    client.complete(user("x"))
    client.close()
    client.complete(user("x"))  # even a rebuilt connection pool does without the variable
    client.close()
    assert {request.headers["authorization"] for request in server.requests} == {f"Bearer {server.api_key}"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_retries", -1),
        ("max_retries", 1.5),
        ("timeout_s", 0),
        ("timeout_s", float("nan")),
        ("base_url", "localhost:1"),
    ],
)
def test_values_that_cannot_be_right_are_refused_when_built(field, value) -> None:
    with pytest.raises(ConfigurationError, match=field):
        OpenAICompatibleClient(**{"base_url": "http://h/v1", "api_key": "k", field: value})


def test_the_key_is_in_no_repr_and_a_client_refuses_to_be_pickled() -> None:
    client = OpenAICompatibleClient("http://h/v1", "sk-0123456789", "m")
    assert "sk-0123456789" not in repr(client)
    with pytest.raises(TypeError, match="inside the factory"):
        pickle.dumps(client)
    assert as_client(client) is client
    client.close()


def test_a_client_that_is_forgotten_closes_its_connections(server) -> None:
    client = OpenAICompatibleClient(server.base_url, "k", "m")
    client.complete(user("x"))
    [sdk] = client._sdks.values()
    assert not sdk.is_closed()
    del client
    gc.collect()
    assert sdk.is_closed()


def test_a_given_http_client_is_used_and_left_open() -> None:
    seen = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.url.path)
        return httpx2.Response(200, json={"choices": [{"message": {"content": "made up"}}]})

    with httpx2.Client(transport=httpx2.MockTransport(answer)) as http_client:
        client = OpenAICompatibleClient("http://h/v1", "k", "m", http_client=http_client)
        assert client.complete(user("x")).text == "made up"
        client.close()
        assert not http_client.is_closed
        assert in_a_fork(lambda: outcome(client)).startswith("ForkedProcessError")
    assert seen == ["/v1/chat/completions"]


# --- interrupts, threads


def test_an_interrupt_in_a_blocked_call_comes_through_at_once_and_unharmed(client, server) -> None:
    def interrupt() -> None:
        server.wait_for_request("[[block]]")
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        client.complete(user("[[block]]"))
    thread.join()
    server.wait_until(lambda: server.requests[0].abandoned)
    assert len(server.requests) == 1, "an interrupted call must not be tried again"
    assert client.complete(user("[[reply: still usable]]")).text == "still usable"


def test_calls_of_one_client_run_side_by_side_without_mixing_up_replies(client, server) -> None:
    together = threading.Barrier(4, timeout=10)

    def handler(body):
        together.wait()
        return Reply(body["messages"][0]["content"].upper())

    server._reply = handler
    done = complete_batch(client, [user(f"n{n}") for n in range(8)], None, max_workers=4)
    assert [d.text for d in done if isinstance(d, Completion)] == [f"N{n}" for n in range(8)]
    assert server.max_in_flight == 4


# --- forks


def in_a_fork(action: Callable[[], str]) -> str:
    """Run the action in a forked process, which ends without running anything else, and return what it says."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.write(writer, action().encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    assert os.waitpid(pid, 0)[1] == 0
    return text


def outcome(client: OpenAICompatibleClient, prompt: str = "[[reply: from the fork]]") -> str:
    try:
        return client.complete(user(prompt)).text
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_client_used_after_a_fork_opens_connections_of_its_own(server) -> None:
    """Parent and child would otherwise read each other's replies from one socket."""
    client = OpenAICompatibleClient(server.base_url, server.api_key, "m")
    client.complete(user("warm the connection pool"))
    [inherited] = client._sdks.values()
    assert in_a_fork(lambda: outcome(client)) == "from the fork"
    assert in_a_fork(lambda: str(client._sdk() is inherited)) == "False"
    assert client.complete(user("[[reply: the parent's]]")).text == "the parent's"
    assert list(client._sdks.values()) == [inherited], "the parent goes on with its own"
    before, forked, after = (request.client_port for request in server.requests)
    assert before == after != forked
    client.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forgetting_an_inherited_client_touches_nothing_of_the_parent(server) -> None:
    client = OpenAICompatibleClient(server.base_url, server.api_key, "m")
    client.complete(user("x"))

    def forget() -> str:
        nonlocal client
        [sdk] = client._sdks.values()
        del client
        gc.collect()
        return f"closed={sdk.is_closed()} kept={sdk in openai_compatible._inherited}"

    assert in_a_fork(forget) == "closed=False kept=True"
    client.complete(user("x"))
    client.close()


def test_a_prewarmed_process_builds_clients_on_one_tls_context(monkeypatch) -> None:
    monkeypatch.setattr(openai_compatible, "_tls", None)
    built = []
    original = httpx2.create_ssl_context

    def counted() -> ssl.SSLContext:
        built.append(1)
        return original()

    monkeypatch.setattr(httpx2, "create_ssl_context", counted)
    threads = threading.active_count()
    prewarm()
    assert threading.active_count() == threads
    for _ in range(3):
        OpenAICompatibleClient("https://h/v1", "k", "m").close()
    assert len(built) == 1
    monkeypatch.setenv("SSL_CERT_DIR", "/somewhere/else")
    OpenAICompatibleClient("https://h/v1", "k", "m").close()
    assert len(built) == 2, "a changed environment must have its effect"


def test_the_shared_context_verifies_certificates() -> None:
    context = openai_compatible._tls_context(httpx2)
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname


def test_after_prewarm_a_child_imports_nothing_more_for_its_first_call(server) -> None:
    """Whatever is imported only after the fork, each child pays for."""
    program = f"""
import os, sys
from rlm_kernel.clients.openai_compatible import OpenAICompatibleClient, prewarm
prewarm()
before = set(sys.modules)
client = OpenAICompatibleClient({server.base_url!r}, "k", "m")
client.complete([{{"role": "user", "content": "x"}}])
client.close()
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_importing_the_module_does_not_import_openai() -> None:
    program = (
        "import sys, rlm_kernel.clients.openai_compatible;"
        "print(sorted({'openai', 'httpx2', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_streaming_client_gives_the_whole_text_and_the_usage(server) -> None:
    client = OpenAICompatibleClient(server.base_url, server.api_key, "test-model", stream=True)
    try:
        assert client.complete(user("[[reply: ×2 of it]] [[usage 5 7]]")) == Completion("×2 of it", Usage(1, 5, 7))
        assert server.requests[-1].body["stream_options"] == {"include_usage": True}
        with pytest.raises(ModelCallError, match="401"):
            client.complete(user("[[status 401]]"))
        with pytest.raises(ModelCallError):
            client.complete(user("[[truncate]] [[reply: never a half answer]]"))
    finally:
        client.close()


def test_a_llamacpp_spec_streams(server, monkeypatch) -> None:
    monkeypatch.setenv("LLAMACPP_BASE_URL", server.base_url)
    client = SpecFactory("llamacpp/test-model")()
    assert isinstance(client, OpenAICompatibleClient)
    assert client.complete(user("[[reply: yes]]")).text == "yes"
    assert server.requests[-1].body["stream"] is True
    client.close()
