"""What travels to a child: its task, and what it and all its descendants inherit from the session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from rlm_kernel.errors import PayloadError
from rlm_kernel.session.contexts import EncodedContext

CHILD_ENTRY = "rlm_kernel.session.child_run:run"
WARM_UP = "rlm_kernel.session.child_run:warm_up"
WARM_UP_WITHOUT_OPENAI = "rlm_kernel.session.child_run:warm_up_without_openai"

PREVIEW_LENGTH = 120


class ChildTask(msgspec.Struct, frozen=True):
    """One child's task. ``context`` is None when the prompt is the context.

    The prompt travels as bytes, since text with lone surrogates (from a file with broken encoding) is no UTF-8.
    ``schema_json`` is the JSON Schema of the answer, None if any answer will do.
    """

    prompt_bytes: bytes
    model: str | None
    context: EncodedContext | None
    schema_json: bytes | None = None

    @classmethod
    def of(
        cls, prompt: str, model: str | None, context: EncodedContext | None, schema_json: bytes | None = None
    ) -> ChildTask:
        return cls(prompt.encode("utf-8", "surrogatepass"), model, context, schema_json)

    @property
    def prompt(self) -> str:
        return self.prompt_bytes.decode("utf-8", "surrogatepass")


class Inherited(msgspec.Struct, frozen=True):
    """What every run of one tree shares.

    Attributes:
        factory: the client factory by cloudpickle.
        root_model: how the configured model is called in trajectories.
        model: the model name that calls pass on if a task names none.
        asks_for_calls: whether model calls are bounded, so that each must be asked for.
        episode_id: the episode, for what is written down.
        system_prompt: of the runs, None for the usual one.
    """

    factory: bytes
    root_model: str
    model: str | None
    max_depth: int
    max_iterations: int
    max_children_per_batch: int | None
    asks_for_calls: bool = False
    memory_limit_bytes: int | None = None
    episode_id: str = ""
    system_prompt: str | None = None


_encoder = msgspec.msgpack.Encoder()
_task_decoder = msgspec.msgpack.Decoder(ChildTask)
_inherited_decoder = msgspec.msgpack.Decoder(Inherited)


def pack(value: ChildTask | Inherited) -> bytes:
    return _encoder.encode(value)


def unpack_task(data: bytes) -> ChildTask:
    return _task_decoder.decode(data)


def unpack_inherited(data: bytes) -> Inherited:
    return _inherited_decoder.decode(data)


def pickle_factory(factory: Callable[[], Any] | str) -> bytes:
    """Pickle a client factory for its way to the children.

    Raises:
        PayloadError: it cannot be pickled; the message says what to do.
    """
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(factory)
    except Exception as error:
        raise PayloadError(
            f"the client factory cannot be pickled ({type(error).__name__}: {error}). Build the client inside the factory: "
            "what it closes over must be plain data, not an open client, socket or lock"
        ) from error
    return pickled


def sendable_text(text: str) -> str:
    """Return text that any channel takes: lone surrogates become their ``\\udXXX`` escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def preview(prompt: str) -> str:
    """Return the first line or so of a prompt."""
    flat = " ".join(sendable_text(prompt[: 4 * PREVIEW_LENGTH]).split())
    return flat if len(flat) <= PREVIEW_LENGTH else flat[: PREVIEW_LENGTH - 1] + "…"
