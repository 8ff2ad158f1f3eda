"""What goes into a REPL environment and what comes out of it: the published models of `repl_env`.

Texts that hold lone surrogates (file names, raw bytes) are kept with escapes, since an observation must be able to become JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

ObservationT = TypeVar("ObservationT")


def without_surrogates(text: Any) -> Any:
    """Replace lone surrogates by escapes; anything that is no text passes as it is."""
    if not isinstance(text, str):
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text


Text = Annotated[str, BeforeValidator(without_surrogates)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class REPLAction(_Model):
    """What to do in one step.

    Attributes:
        code: Python (IPython) code to run.
        is_final: end the episode with ``final_answer`` instead of running code.
        final_answer: the answer if ``is_final``; None counts as the empty answer.
        metadata: the caller's own notes.
    """

    code: str = ""
    is_final: bool = False
    final_answer: Text | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class CodeBlockResult(_Model):
    """What running one block of code gave.

    Attributes:
        locals_snapshot: names that the block newly bound (no leading underscore) → their repr, cut at 500 characters.
        execution_time: wall-clock seconds.
        success: whether the block ran to its end.
        exception: ``"NameError: name 'x' is not defined"``, or None.
    """

    stdout: Text = ""
    stderr: Text = ""
    locals_snapshot: dict[Text, Text] = Field(default_factory=dict)
    execution_time: float = Field(default=0.0, ge=0)
    success: bool = True
    exception: Text | None = None


class REPLObservation(_Model):
    """What the environment shows after a reset or a step.

    Attributes:
        context_preview: the beginning of the context, None without one.
        context_length: characters of the context.
        available_variables: names in the namespace, helpers included.
        iteration: steps taken in this episode.
        done: whether the episode has ended.
        reward: of this step.
        metadata: ``task_prompt``, ``final_answer`` (None while there is none), ``execution_time`` and more.
    """

    result: CodeBlockResult = Field(default_factory=CodeBlockResult)
    context_preview: Text | None = None
    context_length: int = Field(default=0, ge=0)
    available_variables: list[Text] = Field(default_factory=list)
    iteration: int = Field(default=0, ge=0)
    max_iterations: int = Field(default=30, ge=1)
    done: bool = False
    reward: bool | int | float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class REPLState(_Model):
    """The state of one episode.

    Attributes:
        final_answer: None while there is none; the empty text is an answer.
        total_execution_time: wall-clock seconds of all code so far.
    """

    model_config = ConfigDict(extra="allow", validate_assignment=True)

    episode_id: str | None = None
    step_count: int = Field(default=0, ge=0)
    context: Text | None = None
    task_prompt: Text | None = None
    iteration: int = Field(default=0, ge=0)
    max_iterations: int = Field(default=30, ge=1)
    namespace_keys: list[Text] = Field(default_factory=list)
    final_answer: Text | None = None
    total_execution_time: float = Field(default=0.0, ge=0)


class EnvironmentMetadata(_Model):
    """What an environment says of itself."""

    name: str
    description: str
    version: str | None = None


@dataclass
class StepResult(Generic[ObservationT]):
    """An observation with its reward and whether the episode has ended, as clients of environments return it."""

    observation: ObservationT
    reward: float | None = None
    done: bool = False
