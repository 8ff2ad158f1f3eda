"""A small OpenAI-compatible server for tests, steered by its handler or by the prompts themselves.

Prompts steer it by directives (see `model_script`), so that a test can drive kernels and children in other processes.
They are read from the first user message that has any (later messages repeat the task), else from all messages.
Everything a test may wait for is a condition, so that no test sleeps.
"""

from __future__ import annotations

import itertools
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from tests.support.model_script import code, parse_turns, reply, script

__all__ = ["ModelServer", "Reply", "Request", "code", "reply", "script"]


@dataclass(frozen=True, slots=True)
class Reply:
    """How one request is answered. A handler may return one, or just the text.

    Attributes:
        text: what the model says, or the error's message if the status is not 200.
        retry_after: value of the header of that name.
        fault: one of the faulty replies named in the module's docstring, or "".
        gate: the name of what `ModelServer.release` must release first ("" has none), or None.
        usage: prompt and completion tokens; by default a quarter of the characters.
    """

    text: str = "ok"
    status: int = 200
    retry_after: float | None = None
    fault: str = ""
    delay_s: float = 0.0
    gate: str | None = None
    usage: tuple[int, int] | None = None


@dataclass(slots=True)
class Request:
    """A request as it arrived, and what has become of it.

    Attributes:
        body: the parsed JSON body (empty for GET).
        headers: with lower-case names.
        client_port: tells connections apart.
        finished: it was answered, or given up.
        abandoned: the client closed the connection before it was answered.
    """

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    client_port: int = 0
    finished: bool = False
    abandoned: bool = False

    @property
    def text(self) -> str:
        """All messages, joined by newlines."""
        return "\n".join(_content(message) for message in self.body.get("messages", ()))


class ModelServer:
    """An OpenAI-compatible server on a free port of 127.0.0.1, running in threads of this process.

    Use it as a context manager. On leaving, whatever is held is let go, every connection is shut down, and every thread
    has ended.

    Args:
        reply: the text (or `Reply`) for requests without directives, or a function of the request's body giving one.
        models: ids for ``/v1/models``.
        api_key: what clients are to send.
        require_key: answer 401, quoting the key that was sent, if it is another one.
    """

    def __init__(
        self,
        reply: str | Reply | Callable[[dict[str, Any]], Reply | str] = "ok",
        *,
        models: Sequence[str] = ("test-model",),
        api_key: str = "test-key-0123456789",
        require_key: bool = False,
    ) -> None:
        self.api_key = api_key
        self._reply = reply
        self._models = tuple(models)
        self._require_key = require_key
        self._changed = threading.Condition()
        self._requests: list[Request] = []
        self._released: set[str] = set()
        self._seen: set[tuple[str, ...]] = set()
        self._stopped = False
        self._in_flight = self._max_in_flight = 0
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.owner = self
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, name="model-server", daemon=True
        )

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that point ``openai/…`` specs of another process to this server."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}

    @property
    def requests(self) -> list[Request]:
        """All requests so far, in order of arrival (a copy of the list)."""
        with self._changed:
            return list(self._requests)

    @property
    def in_flight(self) -> int:
        """How many requests have arrived and are neither answered nor given up."""
        with self._changed:
            return self._in_flight

    @property
    def max_in_flight(self) -> int:
        """The most that were ever in flight at once."""
        with self._changed:
            return self._max_in_flight

    def release(self, gate: str = "") -> None:
        """Let go the requests held by ``[[block]]`` (or ``[[block GATE]]``), and those that come later."""
        with self._changed:
            self._released.add(gate)
            self._changed.notify_all()

    def wait_for_request(
        self, predicate: Callable[[Request], bool] | str = "", timeout_s: float = 10.0, *, count: int = 1
    ) -> Request:
        """Wait until ``count`` requests have come that satisfy the predicate (a string: that their text contains).

        Returns:
            The last of them.

        Raises:
            TimeoutError: they did not come; lists those that did.
        """

        def wanted() -> list[Request]:
            fits = (lambda request: predicate in request.text) if isinstance(predicate, str) else predicate
            return [request for request in self._requests if fits(request)]

        self.wait_until(lambda: len(wanted()) >= count, timeout_s)
        with self._changed:
            return wanted()[count - 1]

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait until a condition holds; it is looked at whenever a request arrives, is answered or given up.

        Raises:
            TimeoutError: it does not hold after ``timeout_s`` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(condition, timeout_s):
                texts = [f"{request.path} {request.text[:200]!r}" for request in self._requests]
                raise TimeoutError(f"not within {timeout_s} s; requests so far: {texts}")

    def wait_until_idle(self, timeout_s: float = 10.0) -> None:
        """Wait until no request is in flight."""
        self.wait_until(lambda: self._in_flight == 0, timeout_s)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._http.shutdown()
        self._thread.join()
        self._http.end_connections()
        self._http.server_close()

    def begin(self, request: Request) -> None:
        with self._changed:
            self._requests.append(request)
            self._in_flight += 1
            self._max_in_flight = max(self._max_in_flight, self._in_flight)
            self._changed.notify_all()

    def end(self, request: Request, *, abandoned: bool) -> None:
        with self._changed:
            request.finished, request.abandoned = True, abandoned
            self._in_flight -= 1
            self._changed.notify_all()

    def hold(self, answer: Reply, connection: socket.socket) -> bool:
        """Wait as the reply says. Returns False if it need not be sent any more."""
        until = time.monotonic() + answer.delay_s
        with self._changed:
            while not self._stopped:
                remaining = until - time.monotonic()
                if remaining <= 0 and (answer.gate is None or answer.gate in self._released):
                    return True
                if _is_gone(connection):
                    return False
                # Nothing wakes a condition when a peer goes away, so look now and then.
                self._changed.wait(min(remaining, 0.05) if remaining > 0 else 0.05)
        return False

    def answer(self, request: Request) -> Reply:
        """Decide how a request is answered."""
        if self._require_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return Reply(f"Incorrect API key provided: {request.headers.get('authorization')}", status=401)
        if request.path.endswith("/models"):
            return Reply()
        given = self._reply(request.body) if callable(self._reply) else self._reply
        usual = Reply(given) if isinstance(given, str) else given
        messages: list[Mapping[str, Any]] = request.body.get("messages", [])
        users = [_content(message) for message in messages if message.get("role") == "user"]
        steering = next((text for text in users if parse_turns(text)), request.text)
        turns = parse_turns(steering)
        if not turns:
            return usual
        number = min(sum(message.get("role") == "assistant" for message in messages), len(turns) - 1)
        answer = replace(usual, text="\n".join(turns[number].texts)) if turns[number].texts else usual
        for name, words in turns[number].directives:
            if "once" not in words or self._is_first((steering, str(number), name, *words)):
                answer = _apply(answer, name, words)
        return answer

    def _is_first(self, key: tuple[str, ...]) -> bool:
        with self._changed:
            first = key not in self._seen
            self._seen.add(key)
            return first

    def payload(self, request: Request, answer: Reply) -> dict[str, Any]:
        """Build the JSON body of an answer."""
        if answer.status != 200:
            return {"error": {"message": answer.text, "type": "test", "code": str(answer.status)}}
        if request.path.endswith("/models"):
            return {"object": "list", "data": [{"id": name, "object": "model"} for name in self._models]}
        content = None if answer.fault == "null-content" else answer.text
        prompt, completion = answer.usage or (len(request.text) // 4, len(content or "") // 4)
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        body: dict[str, Any] = {
            "id": "chatcmpl-test",
            "object": "chat.completion",
            "created": 0,
            "model": request.body.get("model"),
            "choices": [] if answer.fault == "empty-choices" else [choice],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            },
        }
        for fault, lacking in (("no-choices", "choices"), ("no-usage", "usage")):
            if answer.fault == fault:
                del body[lacking]
        return body


def _apply(answer: Reply, name: str, words: list[str]) -> Reply:
    arguments = [word for word in words if word != "once"]
    if name == "delay":
        return replace(answer, delay_s=float(arguments[0]))
    if name == "block":
        return replace(answer, gate=arguments[0] if arguments else "")
    if name == "usage":
        return replace(answer, usage=(int(arguments[0]), int(arguments[1])))
    if name == "status":
        after = float(arguments[2]) if arguments[1:2] == ["retry-after"] else None
        text = f"the server was told to answer {arguments[0]}"
        return replace(answer, status=int(arguments[0]), retry_after=after, text=text)
    return replace(answer, fault=name)


def _as_events(payload: Mapping[str, Any]) -> bytes:
    """Cut a chat completion into server-sent events: two pieces of text, the end, the usage."""
    text = "".join(choice["message"]["content"] or "" for choice in payload["choices"])
    half = len(text) // 2
    deltas = [({"role": "assistant", "content": text[:half]}, None), ({"content": text[half:]}, None), ({}, "stop")]
    common = {**payload, "object": "chat.completion.chunk"}
    usage = common.pop("usage", None)
    events = [
        {**common, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]} for delta, reason in deltas
    ]
    events.append({**common, "choices": [], "usage": usage})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode() + b"data: [DONE]\n\n"


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content)


def _is_gone(connection: socket.socket) -> bool:
    try:
        readable = bool(select.select([connection], [], [], 0)[0])
        return readable and connection.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True


class _Server(ThreadingHTTPServer):
    """Keeps its connections and threads, so that it can end them: the stock class forgets its daemon threads."""

    daemon_threads = True
    request_queue_size = 128
    owner: ModelServer

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._open: dict[threading.Thread, socket.socket] = {}
        self._numbers = itertools.count(1)

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            name=f"model-server-connection-{next(self._numbers)}",
            daemon=True,
        )
        self._open = {t: s for t, s in self._open.items() if t.is_alive()} | {thread: request}
        thread.start()

    def end_connections(self) -> None:
        """Shut all connections down and join their threads. Only to be called when no more can come."""
        for connection in self._open.values():
            try:
                connection.shutdown(socket.SHUT_RDWR)  # reaches the peer even if a forked process has a copy
            except OSError:
                continue  # it has gone already
        for thread in self._open:
            thread.join(5.0)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about clients that hang up."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        self._handle({})

    def do_POST(self) -> None:
        self._handle(json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))) or b"{}"))

    def _handle(self, body: dict[str, Any]) -> None:
        owner = self.server.owner
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.path, headers, body, client_port=self.client_address[1])
        owner.begin(request)
        sent = False
        try:
            known = self.path in ("/v1/chat/completions", "/v1/models")
            answer = owner.answer(request) if known else Reply(status=404)
            sent = owner.hold(answer, self.connection)
            if sent:
                self._send(owner.payload(request, answer), answer, streamed=bool(body.get("stream")))
        finally:
            owner.end(request, abandoned=not sent)
            self.close_connection = self.close_connection or not sent

    def _send(self, payload: dict[str, Any], answer: Reply, *, streamed: bool) -> None:
        raw, kind = json.dumps(payload).encode(), "application/json"
        if streamed and answer.status == 200 and "choices" in payload:
            raw, kind = _as_events(payload), "text/event-stream"
        if answer.fault == "garbage":
            raw, kind = b"<!doctype html><html><title>Welcome</title><body>It works!</body></html>", "text/html"
        elif answer.fault == "bad-json":
            raw = raw[: len(raw) // 2]
        if answer.fault == "close":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.send_response(answer.status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        if answer.retry_after is not None:
            self.send_header("Retry-After", f"{answer.retry_after:g}")
        self.end_headers()
        if answer.fault == "truncate":
            self.wfile.write(raw[: len(raw) // 2])
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        """Be quiet."""
