"""A model client without any library: it speaks to `tests.support.model_server` through ``http.client``.

For tests that are about something else than the client: processes that use it need not import ``openai``, which is half of what starting a
kernel and its nursery costs.
"""

from __future__ import annotations

import http.client
import json
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rlm_kernel.clients.base import ModelClient
from rlm_kernel.errors import ModelCallError
from rlm_kernel.values import Completion, Message, Usage
from tests.support.model_server import ModelServer

_URL = "PLAIN_MODEL_URL"
_CHECKOUT = Path(__file__).resolve().parents[2]


def variables(server: ModelServer) -> dict[str, str]:
    """Return the variables that make a kernel use a model server by this client."""
    return {
        "RLM_CLIENT_FACTORY": f"{__name__}:make_client",
        "RLM_WARM_OPENAI": "false",
        "PYTHONPATH": str(_CHECKOUT),
        _URL: server.base_url,
    }


def make_client() -> PlainClient:
    """Build the client from the environment."""
    return PlainClient(os.environ[_URL])


@dataclass(frozen=True)
class PlainFactory:
    """A client factory for children of this process."""

    url: str
    uses_openai = False

    def __call__(self) -> PlainClient:
        return PlainClient(self.url)


class PlainClient(ModelClient):
    """One connection per call.

    Args:
        url: up to and including ``/v1``.
    """

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)

    def complete(self, messages: list[Message], model: str | None = None) -> Completion:
        connection = http.client.HTTPConnection(self._url.hostname or "", self._url.port)
        try:
            body = json.dumps({"model": model or "test", "messages": messages})
            connection.request("POST", f"{self._url.path}/chat/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ModelCallError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status >= 400:
            raise ModelCallError(f"HTTP {response.status}: {text.decode('utf-8', 'replace')[:200]}")
        answer = json.loads(text)
        used = answer["usage"]
        usage = Usage(1, used["prompt_tokens"], used["completion_tokens"])
        return Completion(answer["choices"][0]["message"]["content"] or "", usage)
