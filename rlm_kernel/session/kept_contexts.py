"""Keep small contexts beside the trajectories, so that an exported run can be run again.

A context of text, or of plain JSON data, up to `MAX_KEPT` characters becomes a file of the episode's folder, named by its
content: runs that share a context share the file. Of any other only type and size are written down.

Who runs it: the process of the run (root or child), before its first model call. A file that cannot be written is logged
and changes nothing else. A file is written under a name of its own and renamed, so that a reader never sees half of one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlm_kernel.credentials import redact
from rlm_kernel.loop.prompts import QueryMetadata
from rlm_kernel.session.rundir import redacted, write_whole

_log = logging.getLogger(__name__)

MAX_KEPT = 1 << 20
"""Characters (of all parts together) up to which a context is kept."""


def describe_kept(context: Any, metadata: QueryMetadata, folder: Path | None, secrets: Iterable[str]) -> dict[str, Any]:
    """Keep a context if it is small, and describe it for the trajectory's first line.

    Args:
        context: any object.
        metadata: its type and size.
        folder: the episode's folder, None if nothing is written down.
        secrets: strings that are replaced.

    Returns:
        ``type``, ``length`` and ``file``: the name of the file that holds it, None if it was not kept.
    """
    described = {"type": metadata.context_type, "length": metadata.context_total_length, "file": None}
    if folder is not None and metadata.context_total_length <= MAX_KEPT:
        encoded = _encode(context, tuple(secrets))
        if encoded is not None:
            described["file"] = _write(folder, *encoded)
    return described


def read_kept(folder: Path, described: Mapping[str, Any]) -> Any:
    """Return the context that was kept.

    Raises:
        LookupError: none was kept, or its file is gone.
    """
    name = described.get("file")
    if not isinstance(name, str) or name != os.path.basename(name):
        raise LookupError("no context was kept")
    try:
        text = (folder / name).read_bytes().decode("utf-8", "surrogatepass")
        return json.loads(text) if name.endswith(".json") else text
    except (OSError, ValueError) as error:
        raise LookupError(f"{name} cannot be read: {error}") from error


def _encode(context: Any, secrets: tuple[str, ...]) -> tuple[bytes, str] | None:
    """Return the content and the suffix of the file; None for what is neither text nor plain data."""
    if type(context) is str:
        return redact(context, secrets).encode("utf-8", "surrogatepass"), ".txt"
    if type(context) not in (list, dict):
        return None
    try:
        text = json.dumps(context)
        if json.loads(text) != context:  # keys that are no texts, tuples, NaN
            return None
        return json.dumps(redacted(context, secrets)).encode(), ".json"
    except Exception as error:  # objects of the user's may fail in any way when they are looked at
        _log.debug("a context of type %s is not kept: %s", type(context).__name__, error)
        return None


def _write(folder: Path, data: bytes, suffix: str) -> str | None:
    name = f"context-{hashlib.sha256(data).hexdigest()[:16]}{suffix}"
    target = folder / name
    try:
        if not target.exists():
            write_whole(target, data)
    except OSError as error:
        _log.warning("the context of a run is not kept: %s: %s", target, error.strerror)
        return None
    return name
