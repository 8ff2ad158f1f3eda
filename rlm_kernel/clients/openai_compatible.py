"""A client for every server that speaks OpenAI's chat completions, through the official ``openai`` package.

Theory of operation: the package is used for what it is good at (headers, timeouts, retries with back-off and
``Retry-After``); the reply is read by `replies`, because its own reading neither notices a missing ``choices`` nor an
HTML page that came with status 200.

Two things are special here, both because children are forked. A TLS context is expensive (some 20 ms each) and may be
shared over a fork: `prewarm` builds it once, in the process that forks. A connection must not be shared (two
processes would read each other's replies): each process that uses a client object gets a connection pool of its own.

Importing this module is cheap; ``openai`` (about 0.5 s) is imported when the first client is built.
"""

from __future__ import annotations

import importlib
import os
import ssl
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from rlm_kernel.clients.base import ModelClient
from rlm_kernel.clients.replies import (
    Endpoint,
    explain_failure,
    origin_of,
    read_completion,
    read_model_ids,
    read_stream,
)
from rlm_kernel.errors import ConfigurationError, ForkedProcessError, ModelCallError
from rlm_kernel.values import Completion, Message

DEFAULT_BASE_URL = "https://api.openai.com/v1"

_CONNECT_TIMEOUT_S = 5.0
"""One attempt to connect; a longer wait for an address that does not answer helps nobody."""

_NO_KEY = "no-key"
"""Sent where a server needs no key: the package insists on one."""

_inherited: list[Any] = []
"""Clients that came over a fork. Kept for ever: closing one, even by garbage collection, could wait for a lock that a
thread of the parent held at the fork."""

_tls: tuple[tuple[str | None, ...], ssl.SSLContext] | None = None
"""The TLS context that all clients share, with the environment that it was built from."""


def prewarm() -> None:
    """Do once, before forking, what every client would otherwise do in its own process.

    Imports ``openai``, builds the TLS context that later clients share, and passes one made-up request through the
    package without any network, so that its lazy imports and caches are filled. Starts no thread, opens no connection.
    """
    openai, http = _libraries()
    _tls_context(http)
    transport = http.MockTransport(lambda _request: http.Response(200, json={"choices": []}))
    with http.Client(transport=transport) as http_client:
        sdk = openai.OpenAI(api_key=_NO_KEY, base_url=DEFAULT_BASE_URL, http_client=http_client)
        sdk.post("/chat/completions", cast_to=http.Response, body={"model": "", "messages": []})
    "host".encode("idna")  # what the first connection imports to look a name up


class OpenAICompatibleClient(ModelClient):
    """Completes chats on one OpenAI-compatible server.

    May be used from several threads, and after a fork (each process gets its own connections). It cannot be pickled:
    build it inside the client factory.

    Args:
        base_url: up to and including ``/v1``; default: ``OPENAI_BASE_URL``, else OpenAI itself.
        api_key: default: the variable named by ``key_variable``. OpenAI itself needs one; other servers may not.
        default_model: for calls that name no model.
        max_retries: further attempts after a refused or broken connection, a timeout, 408, 409, 429 or 5xx. With the
            default of 2 a server that is down costs about 1.5 s.
        timeout_s: seconds that one attempt may take without receiving anything.
        extra_body: further fields of each request, such as ``{"temperature": 0}``.
        http_client: an own ``httpx2.Client``; it is used in this process only, and never closed here.
        key_variable: which environment variable holds the key; error messages name it.
        wire_name: turns the name that a call gives into the one that is sent.
        stream: whether the server is to send its reply piece by piece. The whole of it is returned all the same; but a
            server that notices only while it sends that nobody listens any more, such as llama.cpp, then stops the
            generation of a call that was given up.

    Raises:
        ConfigurationError: a value cannot be right.
        ModelCallError: there is no key, and OpenAI itself needs one.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        default_model: str | None = None,
        max_retries: int = 2,
        timeout_s: float = 600.0,
        extra_body: Mapping[str, Any] | None = None,
        http_client: Any = None,
        *,
        key_variable: str = "OPENAI_API_KEY",
        wire_name: Callable[[str], str] | None = None,
        stream: bool = False,
    ) -> None:
        if isinstance(max_retries, bool) or not isinstance(max_retries, int) or max_retries < 0:
            raise ConfigurationError("max_retries", max_retries, "must be a whole number of at least 0")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
            raise ConfigurationError("timeout_s", timeout_s, "must be more than 0 seconds")
        self.base_url = base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_BASE_URL
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigurationError("base_url", self.base_url, "must start with http:// or https://")
        key = (api_key or os.environ.get(key_variable, "")).strip()
        if not key and self.base_url.rstrip("/") == DEFAULT_BASE_URL:
            where = origin_of(self.base_url)
            raise ModelCallError(f"{where} needs a key. Set {key_variable} (`%env {key_variable}=…`), then try again.")
        self.default_model = default_model
        self._key = key or _NO_KEY
        self._max_retries = max_retries
        self._timeout_s = float(timeout_s)
        self._extra_body = dict(extra_body or {})
        self._http_client = http_client
        self._wire_name = wire_name
        self._stream = stream
        self._endpoint = Endpoint(
            url=origin_of(self.base_url),
            key_variable=key_variable,
            has_key=bool(key),
            timeout_s=self._timeout_s,
            secrets=(key,) if key else (),
        )
        self._sdks: dict[int, Any] = {}  # by pid
        if http_client is None:
            weakref.finalize(self, _release, self._sdks).atexit = False
        self._owner = os.getpid()
        self._sdk()

    def complete(self, messages: list[Message], model: str | None = None) -> Completion:
        name = model or self.default_model
        if not name:
            raise ConfigurationError("model", name, "this client has no default model: name one in the call")
        if self._wire_name is not None:
            name = self._wire_name(name)
        body = {"model": name, "messages": messages, **self._extra_body}
        if self._stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        read = read_stream if self._stream else read_completion
        return read(self._send("post", "/chat/completions", name, body=body), self._endpoint, name)

    def models(self) -> list[str]:
        """Return the ids of the models that the server offers.

        Raises:
            ModelCallError: the call failed.
        """
        return read_model_ids(self._send("get", "/models", None), self._endpoint)

    def close(self) -> None:
        """Close the connections of this process. The client may be used again; it then opens new ones."""
        sdk = self._sdks.pop(os.getpid(), None)
        if sdk is not None and self._http_client is None:
            sdk.close()

    def _send(self, method: str, path: str, model: str | None, **arguments: Any) -> bytes:
        """Send a request and return the body of the reply."""
        sdk = self._sdk()
        _, http = _libraries()
        try:
            # "Exception" and no more: an interrupt or a child's cancellation must come through untouched.
            reply = getattr(sdk, method)(path, cast_to=http.Response, **arguments)
            return bytes(reply.content)
        except Exception as exc:
            failure = explain_failure(exc, self._endpoint, model)
        # Outside the handler: the chain of five foreign exceptions would bury the line that says what to do, and their
        # texts are not redacted.
        raise failure

    def _sdk(self) -> Any:
        """Return this process's ``openai`` client, built if there is none yet. Takes no lock: see `_inherited`."""
        sdk = self._sdks.get(os.getpid())
        if sdk is not None:
            return sdk
        openai, http = _libraries()
        http_client = self._http_client
        timeout = http.Timeout(self._timeout_s, connect=min(_CONNECT_TIMEOUT_S, self._timeout_s))
        if http_client is None:
            http_client = http.Client(
                verify=_tls_context(http),
                timeout=timeout,
                limits=openai.DEFAULT_CONNECTION_LIMITS,
                follow_redirects=True,
            )
        elif os.getpid() != self._owner:
            raise ForkedProcessError(
                "this model client was built with an http_client in another process, and connections must not be "
                "shared: build the client in the process that uses it"
            )
        built = openai.OpenAI(
            api_key=self._key,
            base_url=self.base_url,
            max_retries=self._max_retries,
            timeout=timeout,
            http_client=http_client,
        )
        kept = self._sdks.setdefault(os.getpid(), built)  # atomic: of two threads one wins
        if kept is not built and self._http_client is None:
            built.close()
        return kept

    def __repr__(self) -> str:
        return f"OpenAICompatibleClient({self._endpoint.url}, default_model={self.default_model!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a model client holds connections and a key and cannot be pickled: build it inside the factory")


def _release(sdks: dict[int, Any]) -> None:
    for pid, sdk in sdks.items():
        if pid == os.getpid():
            sdk.close()
        else:
            _inherited.append(sdk)


def _libraries() -> tuple[Any, Any]:
    """Return ``openai`` and the HTTP library beneath it (httpx before version 3)."""
    openai = importlib.import_module("openai")
    return openai, importlib.import_module("httpx2" if hasattr(openai, "DefaultHttpx2Client") else "httpx")


def _tls_context(http: Any) -> ssl.SSLContext:
    global _tls
    # `%env SSL_CERT_FILE=…` after prewarm() must still have its effect in the children.
    environment = tuple(os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE"))
    if _tls is None or _tls[0] != environment:
        _tls = (environment, http.create_ssl_context())
    return _tls[1]
