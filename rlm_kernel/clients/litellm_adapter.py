"""A client that goes through LiteLLM, for providers without an OpenAI-compatible endpoint."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

from rlm_kernel.clients.base import ModelClient
from rlm_kernel.clients.replies import Endpoint, explain_failure, read_completion
from rlm_kernel.errors import ModelCallError
from rlm_kernel.values import Completion, Message

_INSTALL = 'pip install "rlm-kernel[litellm]"'


class LiteLLMClient(ModelClient):
    """Completes chats through LiteLLM, which finds keys in the environment by itself.

    Args:
        default_model: as LiteLLM names it, such as ``bedrock/anthropic.claude-v2``.
        max_retries: LiteLLM's own retries.
        timeout_s: seconds that one attempt may take.
        extra_body: further arguments of each ``litellm.completion`` call.

    Raises:
        ModelCallError: LiteLLM is not installed.
    """

    def __init__(
        self,
        default_model: str,
        max_retries: int = 2,
        timeout_s: float = 600.0,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            self._litellm: Any = importlib.import_module("litellm")
        except ModuleNotFoundError as exc:
            if exc.name != "litellm":
                raise
            raise ModelCallError(f"litellm/{default_model} needs LiteLLM, which is not installed: {_INSTALL}") from exc
        self.default_model = default_model
        self._max_retries = max_retries
        self._timeout_s = timeout_s
        self._extra_body = dict(extra_body or {})

    def complete(self, messages: list[Message], model: str | None = None) -> Completion:
        name = (model or self.default_model).removeprefix("litellm/")
        endpoint = Endpoint(url="LiteLLM", timeout_s=self._timeout_s)
        arguments = {"num_retries": self._max_retries, "timeout": self._timeout_s, **self._extra_body}
        try:
            reply = self._litellm.completion(model=name, messages=messages, **arguments)
            raw = json.dumps(reply.model_dump(), default=str)
        except Exception as exc:
            failure = explain_failure(exc, endpoint, name)
        else:
            return read_completion(raw, endpoint, name)
        raise failure

    def __repr__(self) -> str:
        return f"LiteLLMClient(default_model={self.default_model!r})"
