"""Write a run down as it happens: one JSON line per iteration, readable by the public RLM visualizer.

The file holds a metadata line, one line per iteration, and an end line. Each line reaches the file by a single append,
so that a process killed at any moment leaves complete lines and at most one torn last line, which `read_trajectory`
skips. Nothing that was written is written again.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlm_kernel.closing import ClosesOnExit
from rlm_kernel.credentials import REDACTED, looks_secret, redact
from rlm_kernel.values import CodeResult, FinalAnswer, Message, ModelCall, Usage

MAX_FIELD_CHARS = 100_000
"""Messages, output and the prompts of calls are cut at this length in the file; replies, code and answers never are."""

_MAX_NESTING = 20
_END_LINE = b'{"type":"end"'  # how an end line begins, as this module writes it
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """One block that ran."""

    code: str
    result: CodeResult


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """One model call and what came of it.

    Attributes:
        iteration: 1-based; the last chance has the number after the last turn.
        prompt: the messages that the model was sent.
        response: its reply as it came; empty if the call failed.
        blocks: what ran, in order; after an interrupt, what had run before it.
        final: the final answer that stood after this iteration.
        usage: of this iteration: its own call and those that its code made.
        error: why the iteration broke off, readable.
        started_at: Unix time in seconds.
        duration_s: wall-clock seconds.
        last_chance: whether this is the call after the last turn.
    """

    iteration: int
    prompt: tuple[Message, ...]
    response: str = ""
    blocks: tuple[BlockRecord, ...] = ()
    final: FinalAnswer | None = None
    usage: Usage = field(default_factory=Usage)
    error: str | None = None
    started_at: float = 0.0
    duration_s: float = 0.0
    last_chance: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetadata:
    """What the first line of a trajectory says about the run.

    Attributes:
        root_model: name of the model that drives the run.
        backend: kind of model client; ``backend_kwargs`` its settings (string settings with secret names are redacted).
        run_id, parent_id, depth: the run's place in the tree of runs; a child of the notebook's own has no parent.
        episode_id: the episode of all of them.
        task: the task.
        context: what is known of the context: see `rlm_kernel.session.kept_contexts`; ``is_task`` where it is the task.
        answer_schema: the JSON Schema of the answer, as text; None if none was asked for.
    """

    root_model: str | None = None
    max_depth: int = 1
    max_iterations: int = 30
    backend: str = ""
    backend_kwargs: Mapping[str, Any] = field(default_factory=dict)
    environment_type: str = "rlm-kernel"
    environment_kwargs: Mapping[str, Any] = field(default_factory=dict)
    other_backends: Sequence[str] | None = None
    run_id: str | None = None
    parent_id: str | None = None
    depth: int = 0
    episode_id: str | None = None
    task: str = ""
    context: Mapping[str, Any] = field(default_factory=dict)
    answer_schema: str | None = None


class TrajectoryWriter(ClosesOnExit):
    """Append one run's lines to its file. For one thread; the file comes into being with the first line.

    A file that cannot be written (a full disk) never breaks the run: the first `OSError` is kept in `error` and logged
    once, and nothing more is written, so that a torn line can only be the last one.

    Args:
        path: the file; missing parent directories are made. Created with mode 0600.
        metadata: for the first line.
        secrets: strings that are replaced wherever they occur in what is written.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, metadata: RunMetadata | None = None, secrets: Sequence[str] = ()
    ) -> None:
        self.path = Path(path)
        self.error: OSError | None = None
        self._metadata = metadata or RunMetadata()
        # Longest first, so that a secret which is part of another does not leave the rest of that one standing.
        self._secrets = tuple(sorted({secret for secret in secrets if secret}, key=len, reverse=True))
        self._fd = -1
        self._metadata_written = False

    def write_metadata(self) -> None:
        """Write the first line now, so that a run which is killed before its first iteration has left its name."""
        self._append(None)

    def write_iteration(self, record: IterationRecord) -> None:
        """Append one iteration."""
        self._append(
            {
                "type": "iteration",
                "iteration": record.iteration,
                "timestamp": _iso(record.started_at),
                "prompt": [{key: self._bounded(value) for key, value in message.items()} for message in record.prompt],
                "response": record.response,
                "code_blocks": [{"code": b.code, "result": self._result(b.result)} for b in record.blocks],
                "final_answer": _answer_text(record.final),
                "iteration_time": record.duration_s,
                "run_id": self._metadata.run_id,
                "usage": asdict(record.usage),
                "error": record.error,
                "last_chance": record.last_chance,
            }
        )

    def write_end(
        self,
        *,
        stop_reason: str,
        final: FinalAnswer | None = None,
        iterations: int = 0,
        usage: Usage | None = None,
        error: str | None = None,
    ) -> None:
        """Append the end line and close the file.

        Args:
            stop_reason: why the run ended, as in `LoopResult`, or ``"error"``.
            final: the answer, if there is one.
            iterations: turns made.
            usage: of the whole run.
            error: what ended it, readable.
        """
        self._append(
            {
                "type": "end",
                "timestamp": _now(),
                "run_id": self._metadata.run_id,
                "stop_reason": stop_reason,
                "final_answer": _answer_text(final),
                "iterations": iterations,
                "usage": asdict(usage or Usage()),
                "error": error,
            }
        )
        self.close()

    def close(self) -> None:
        """Close the file. May be called twice; a later line opens it again."""
        fd, self._fd = self._fd, -1
        if fd != -1:
            try:
                os.close(fd)
            except OSError as error:  # some file systems report a failed write only here
                self._give_up(error)

    def _append(self, line: dict[str, Any] | None) -> None:
        if self.error is not None:
            return
        try:
            self._open()
            if not self._metadata_written:
                self._write_line(self._metadata_line())
                self._metadata_written = True
            if line is not None:
                self._write_line(line)
        except OSError as error:
            self._give_up(error)
            self.close()

    def _open(self) -> None:
        if self._fd != -1:
            return
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # O_BINARY is Windows's, which has no O_CLOEXEC (Python's descriptors are not inherited anyway) and no pread.
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
        if os.lseek(self._fd, 0, os.SEEK_END):
            os.lseek(self._fd, -1, os.SEEK_END)
            if os.read(self._fd, 1) != b"\n":
                os.write(self._fd, b"\n")  # end the torn line of a killed writer, so that it spoils no line of ours

    def _write_line(self, line: dict[str, Any]) -> None:
        text = json.dumps(self._clean(line), ensure_ascii=False, separators=(",", ":"))
        # A lone surrogate becomes its \udXXX escape, which is what JSON would have it be inside a string.
        data = memoryview(text.encode("utf-8", errors="backslashreplace") + b"\n")
        while data:  # one write; more only where the system takes it in parts
            data = data[os.write(self._fd, data) :]

    def _give_up(self, error: OSError) -> None:
        if self.error is None:
            self.error = error
            _log.warning("The trajectory %s cannot be written any further; the run goes on: %s", self.path, error)

    def _metadata_line(self) -> dict[str, Any]:
        m = self._metadata
        return {
            "type": "metadata",
            "timestamp": _now(),
            "root_model": m.root_model,
            "max_depth": m.max_depth,
            "max_iterations": m.max_iterations,
            "backend": m.backend,
            "backend_kwargs": _without_named_secrets(m.backend_kwargs),
            "environment_type": m.environment_type,
            "environment_kwargs": _without_named_secrets(m.environment_kwargs),
            "other_backends": m.other_backends,
            "run_id": m.run_id,
            "parent_id": m.parent_id,
            "depth": m.depth,
            "episode_id": m.episode_id,
            "task": self._bounded(m.task),
            "context": dict(m.context),
            "answer_schema": self._bounded(m.answer_schema),
        }

    def _result(self, result: CodeResult) -> dict[str, Any]:
        return {
            "stdout": self._bounded(result.stdout),
            "stderr": self._bounded(result.stderr),
            "locals": dict(result.new_locals),
            "execution_time": result.duration_s,
            "success": result.success,
            "exception": result.exception,
            "rlm_calls": [self._call(call) for call in result.model_calls],
        }

    def _call(self, call: ModelCall) -> dict[str, Any]:
        return {
            "prompt": self._bounded(call.prompt),
            "response": self._bounded(call.response),
            "prompt_tokens": call.usage.prompt_tokens,
            "completion_tokens": call.usage.completion_tokens,
            "execution_time": call.duration_s,
            "error": call.error,
        }

    def _bounded(self, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        text = redact(value, self._secrets)  # before cutting: half a secret would not be recognized any more
        if len(text) <= MAX_FIELD_CHARS:
            return text
        half = MAX_FIELD_CHARS // 2
        return f"{text[:half]}\n[… cut: {len(text):,} characters in all …]\n{text[-half:]}"

    def _clean(self, value: Any, nesting: int = 0) -> Any:
        """Return what JSON can hold, with the secrets replaced; anything foreign by its repr."""
        if isinstance(value, str):
            return redact(str(value), self._secrets)
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, float) and math.isfinite(value):
            return float(value)
        if nesting < _MAX_NESTING:
            if isinstance(value, Mapping):
                return {redact(str(key), self._secrets): self._clean(item, nesting + 1) for key, item in value.items()}
            if isinstance(value, list | tuple):
                return [self._clean(item, nesting + 1) for item in value]
        return redact(_repr(value), self._secrets)


def write_missing_end(
    path: str | os.PathLike[str],
    *,
    metadata: RunMetadata,
    stop_reason: str,
    iterations: int = 0,
    usage: Usage | None = None,
    error: str | None = None,
    secrets: Sequence[str] = (),
) -> bool:
    """Append the end line of a run whose process has ended without writing one: it was killed, or never began.

    Only for a process that is known to be gone. A folder that has been removed meanwhile is not made again.

    Args:
        path: the run's file.
        metadata: for the first line, if the file does not exist.
        stop_reason, iterations, usage, error: as for `TrajectoryWriter.write_end`.
        secrets: as for `TrajectoryWriter`.

    Returns:
        whether the line was missing.
    """
    file = Path(path)
    try:
        exists = file.exists()
        if not file.parent.is_dir() or (exists and _has_end(file)):
            return False
    except OSError as problem:
        _log.warning("The trajectory %s cannot be read: %s", path, problem)
        return False
    with TrajectoryWriter(file, metadata=metadata, secrets=secrets) as writer:
        writer._metadata_written = exists
        writer.write_end(stop_reason=stop_reason, iterations=iterations, usage=usage, error=error)
    return True


def _has_end(file: Path) -> bool:
    with open(file, "rb") as source:
        if not os.fstat(source.fileno()).st_size:
            return False
        with mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as view:
            end = view.rfind(b"\n")
            start = view.rfind(b"\n", 0, max(end, 0)) + 1
            return view[start : start + len(_END_LINE)] == _END_LINE


def read_trajectory(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the complete lines of a trajectory, also while it is being written.

    Args:
        path: the file.

    Returns:
        One dict per line; a torn line (of a writer that was killed) is left out.

    Raises:
        OSError: the file cannot be read.
    """
    lines = []
    for raw in Path(path).read_bytes().split(b"\n"):
        try:
            value = json.loads(raw)
        except ValueError:  # torn, or empty
            continue
        if isinstance(value, dict):
            lines.append(value)
    return lines


def _without_named_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    # Only strings: `max_tokens` has a name that looks secret, and is a number.
    return {
        name: REDACTED if isinstance(value, str) and looks_secret(f"_{name}") else value
        for name, value in settings.items()
    }


def _answer_text(final: FinalAnswer | None) -> str | None:
    if final is None:
        return None
    try:
        return final.text
    except Exception:  # the user's own __str__ may fail in any way
        return _repr(final.value)


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:  # the user's own __repr__ may fail in any way
        return f"<{type(value).__name__} without a repr: {type(error).__name__}>"


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
