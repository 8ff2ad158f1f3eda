"""What the backends have in common: chat functions as clients, checks of arguments, and errors in one line. Pure."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from rlm_kernel.clients.base import ModelClient, as_client
from rlm_kernel.errors import RLMError, UsageMistake

ChatFn = Callable[..., Any]
"""``f(messages)`` or ``f(messages, model)`` returning text."""


def chat_client(chat_fn: ChatFn | ModelClient) -> ModelClient:
    """Turn a chat function or a client into a client whose reply of None is an empty text.

    Providers give None where there was only reasoning or a refusal, and chat functions pass that on.

    Raises:
        ConfigurationError: it is neither, or its signature does not fit.
    """
    client = as_client(chat_fn, field="chat_fn")
    if client is chat_fn:
        return client
    target: Any = chat_fn
    function: ChatFn = getattr(target, "complete", target)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        reply = function(*args, **kwargs)
        return "" if reply is None else reply

    return as_client(call, field="chat_fn")


def describe(error: BaseException) -> str:
    """Say in one line what went wrong. Errors of ours say it by themselves."""
    text = str(error)
    if isinstance(error, RLMError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def takes(function: Callable[..., Any], name: str) -> bool:
    """Tell whether a function takes a keyword of this name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def checked_prompt(prompt: object, argument: str = "prompt") -> str:
    """Return a prompt.

    Raises:
        UsageMistake: it is no text; names the argument.
    """
    if not isinstance(prompt, str):
        raise UsageMistake(f"{argument} must be a string, got {type(prompt).__name__}: {prompt!r:.100}")
    return prompt


def checked_prompts(prompts: object) -> list[str]:
    """Return the prompts of a batch.

    Raises:
        UsageMistake: it is no list of texts; names the entry.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise UsageMistake(f"prompts must be a list of strings, got {type(prompts).__name__}")
    return [checked_prompt(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]
