"""Read what model servers send back: completions, and every way in which a call can fail. No I/O here.

A failed call becomes one readable line: what was called and where (never a key), the status, the server's own words
(cut, on one line), and what to do next. What an exception means is looked up by class name in `EXPLANATIONS`, along
its bases, so that neither ``openai`` nor LiteLLM (whose exceptions inherit from it) need to be imported for it, and a
new subclass is still explained by its base. Nothing is decided on the text of a message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rlm_kernel.credentials import redact
from rlm_kernel.errors import ModelCallError
from rlm_kernel.values import Completion, Usage

_LONGEST_QUOTE = 300
"""Characters of a server's own words that are shown: enough for its reason, not for its whole HTML page."""

_LONGEST_READ = 20_000
_HTML = re.compile(r"<(!doctype|html|head|body)\b", re.IGNORECASE)
_MARKUP = re.compile(r"<(script|style)\b.*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where calls go, as error lines tell it.

    Attributes:
        url: scheme, host and port only.
        key_variable: the environment variable that holds the key, or "" if there is none to name.
        has_key: whether a key is being sent.
        timeout_s: seconds that one attempt may take.
        secrets: values that are cut out of everything shown.
    """

    url: str
    key_variable: str = ""
    has_key: bool = True
    timeout_s: float | None = None
    secrets: tuple[str, ...] = ()


class Explanation(NamedTuple):
    """What an exception class means, and what to do. Both may use ``{url} {model} {timeout} {key}``."""

    what: str
    hint: str


_CHECK_SERVER = "Look at the server's log, or try again later."
_CHECK_REQUEST = "Check the model name and `extra_body`."
_CHECK_URL = "Is {url} the base URL of an OpenAI-compatible server?"

EXPLANATIONS: Mapping[str, Explanation] = {
    "AuthenticationError": Explanation("the key was not accepted", "{key}"),
    "OAuthError": Explanation("the key was not accepted", "{key}"),
    "SubjectTokenProviderError": Explanation("no token could be obtained", "{key}"),
    "PermissionDeniedError": Explanation("access denied", "Check that the key may use model {model}. {key}"),
    "NotFoundError": Explanation(
        "unknown model or address", "Check the model name {model}, and that {url} is the right server."
    ),
    "BadRequestError": Explanation("the request was refused", _CHECK_REQUEST),
    "ConflictError": Explanation("the request was refused", _CHECK_REQUEST),
    "UnprocessableEntityError": Explanation("the request was refused", _CHECK_REQUEST),
    "RateLimitError": Explanation(
        "rate limit or quota reached", "Try later, or start fewer at once: `%rlm config max_concurrent_model_calls=2`."
    ),
    "InternalServerError": Explanation("the server failed", _CHECK_SERVER),
    "APITimeoutError": Explanation(
        "timed out (limit {timeout})", "Is {url} overloaded? Raise `timeout_s` if it needs longer."
    ),
    "APIConnectionError": Explanation("no connection", "Is the server running at {url}?"),
    "APIResponseValidationError": Explanation("malformed reply", _CHECK_URL),
    "APIStatusError": Explanation("the request was refused", _CHECK_SERVER),
    "APIError": Explanation("the call failed", _CHECK_SERVER),
    "OpenAIError": Explanation("the call failed", _CHECK_REQUEST),
    "LengthFinishReasonError": Explanation("the reply was cut off", "Allow more tokens in `extra_body`."),
    "ContentFilterFinishReasonError": Explanation("the provider's content filter refused", "Change the prompt."),
    "InvalidWebhookSignatureError": Explanation("a webhook's signature is wrong", "Check the webhook secret."),
    "WebSocketConnectionClosedError": Explanation("no connection", "Is the server running at {url}?"),
    "WebSocketQueueFullError": Explanation("too much was sent at once", "Try again with less."),
}
"""The public exceptions of ``openai``, by class name; a test holds the list complete."""

_UNEXPLAINED = Explanation("the call failed", "Check the base URL, the key and the model name.")


def origin_of(base_url: str) -> str:
    """Return scheme, host and port of a URL: what may be shown, without credentials, path or query."""
    parts = urlsplit(base_url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def explain_failure(exc: BaseException, endpoint: Endpoint, model: str | None) -> ModelCallError:
    """Describe a failed call in one line.

    Args:
        exc: what the client library raised.
        endpoint: where the call went.
        model: which model was asked for.
    """
    names = [cls.__name__ for cls in type(exc).__mro__]
    known = next((EXPLANATIONS[name] for name in names if name in EXPLANATIONS), None)
    explanation = known or _UNEXPLAINED
    words = _words_of(exc, known is not None)
    wait = getattr(getattr(exc, "response", None), "headers", {}).get("retry-after")
    if wait:
        words = f"{words} (retry after: {wait})".lstrip()
    return _error(endpoint, model, explanation, status=_status_of(exc), quote=words)


def read_completion(raw: bytes | str, endpoint: Endpoint, model: str | None) -> Completion:
    """Read the body of a successful chat completion.

    A missing content (reasoning only, a tool call) is an empty text; missing token counts are 0.

    Raises:
        ModelCallError: the body is no chat completion.
    """
    payload = _read_json(raw, endpoint, model)
    choices = payload.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    if not isinstance(message, dict):
        if payload.get("error"):  # some routers report an upstream failure with status 200
            raise _error(endpoint, model, EXPLANATIONS["APIError"], quote=_words_in(payload))
        lack = "has no `choices`" if not choices else "has a choice without a message"
        raise _error(endpoint, model, EXPLANATIONS["APIResponseValidationError"], quote=f"the reply {lack}")
    usage = payload.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    return Completion(
        text=_text_of(message),
        usage=Usage(1, _count(counts.get("prompt_tokens")), _count(counts.get("completion_tokens"))),
    )


def read_stream(raw: bytes | str, endpoint: Endpoint, model: str | None) -> Completion:
    """Read the body of a chat completion that was asked for with ``"stream": true``: server-sent events, one per piece.

    A server that does not stream answers with an ordinary body, which is read as one.

    Raises:
        ModelCallError: the body is neither, an event reports an error, or the end is missing.
    """
    text = raw if isinstance(raw, str) else raw.decode("utf-8", "replace")
    if not text.lstrip().startswith(("data:", "event:", "id:", "retry:", ":")):
        return read_completion(raw, endpoint, model)
    pieces: list[str] = []
    counts: Mapping[str, Any] = {}
    ended = False
    # Not at the other line ends of Unicode, which stand in texts as they are.
    for line in re.split(r"\r\n|\n|\r", text):
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if not data:
            continue
        if data == "[DONE]":
            ended = True
            break
        event = _read_json(data, endpoint, model)
        if event.get("error"):
            raise _error(endpoint, model, EXPLANATIONS["APIError"], quote=_words_in(event))
        usage = event.get("usage")
        counts = usage if isinstance(usage, dict) else counts
        choices = event.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        if isinstance(first, dict):
            delta = first.get("delta")
            pieces.append(_text_of(delta) if isinstance(delta, dict) else "")
            ended = ended or bool(first.get("finish_reason"))
    if not ended:
        raise _error(
            endpoint, model, EXPLANATIONS["APIResponseValidationError"], quote="the stream of the reply broke off"
        )
    return Completion(
        text="".join(pieces),
        usage=Usage(1, _count(counts.get("prompt_tokens")), _count(counts.get("completion_tokens"))),
    )


def read_model_ids(raw: bytes | str, endpoint: Endpoint) -> list[str]:
    """Read the body of a successful list of models.

    Raises:
        ModelCallError: the body is no list of models.
    """
    data = _read_json(raw, endpoint, None).get("data")
    if not isinstance(data, list):
        raise _error(endpoint, None, EXPLANATIONS["APIResponseValidationError"], quote="the reply has no `data`")
    return [str(entry["id"]) for entry in data if isinstance(entry, dict) and entry.get("id")]


def _read_json(raw: bytes | str, endpoint: Endpoint, model: str | None) -> dict[str, Any]:
    try:
        payload = json.loads(raw)
    except (ValueError, RecursionError):
        payload = None
    if isinstance(payload, dict):
        return payload
    text = raw if isinstance(raw, str) else raw.decode("utf-8", "replace")
    quote = f"not a JSON object: {text}" if text.strip() else "an empty body"
    raise _error(endpoint, model, EXPLANATIONS["APIResponseValidationError"], quote=quote)


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):  # a list of parts; those that are not text (thinking, images) are left out
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    if isinstance(content, str):
        return content
    refusal = message.get("refusal")
    return refusal if isinstance(refusal, str) else ""


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _error(
    endpoint: Endpoint, model: str | None, explanation: Explanation, *, status: int | None = None, quote: str = ""
) -> ModelCallError:
    variable = endpoint.key_variable
    key = f"{'Check' if endpoint.has_key else 'Set'} {variable}." if variable else "Check the API key."
    timeout = f"{endpoint.timeout_s:g} s" if endpoint.timeout_s is not None else "unknown"
    name = repr(model) if model else "(unnamed)"
    what, hint = (part.format(url=endpoint.url, model=name, timeout=timeout, key=key) for part in explanation)
    called = f"model {name} at {endpoint.url}" if model else endpoint.url
    reported = f"HTTP {status}{_phrase(status)}, {what}" if status is not None else what
    words = _one_line(redact(quote, endpoint.secrets))  # redact before cutting: half a key is still a leak
    sentence = f"{called}: {reported}: {words}" if words else f"{called}: {reported}"
    return ModelCallError(f"{sentence}{'' if sentence.endswith(('!', '?', '…')) else '.'} {hint}")


def _phrase(status: int) -> str:
    try:
        return f" {HTTPStatus(status).phrase}"
    except ValueError:
        return ""


def _status_of(exc: BaseException) -> int | None:
    status = getattr(exc, "status_code", None)
    return status if isinstance(status, int) else None


def _words_of(exc: BaseException, known: bool) -> str:
    """Return the most telling words of an exception: the server's own, else the root cause's, else its own."""
    words = _words_in(getattr(exc, "body", None))
    if words:
        return words
    chain = [exc]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    if len(chain) > 1:
        return f"{type(chain[1]).__name__}: {next((str(e) for e in reversed(chain) if str(e)), '')}".rstrip(": ")
    return str(exc) if known else f"{type(exc).__name__}: {exc}"


def _words_in(body: object) -> str:
    """Return the message in an error body; servers differ in where they put it."""
    while isinstance(body, Mapping):
        inner = next((body[key] for key in ("error", "message", "detail") if body.get(key)), None)
        if inner is None:
            return json.dumps(dict(body), default=str) if body else ""
        body = inner
    if body is None or body == "":
        return ""
    return body if isinstance(body, str) else json.dumps(body, default=str)


def _one_line(text: str) -> str:
    text = text[:_LONGEST_READ]
    if _HTML.search(text):
        text = _MARKUP.sub(" ", text)
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return (line if len(line) <= _LONGEST_QUOTE else f"{line[:_LONGEST_QUOTE]}…").rstrip(".")
