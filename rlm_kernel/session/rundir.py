"""What is kept on disk: one folder per episode with ``run.json``, one trajectory and one raw log per run.

The folder comes to be with the first child or loop of an episode, so that a notebook that only computes leaves nothing.
``run.json`` is replaced as a whole (written beside it and renamed), so that a reader never sees half of it. Old folders
are pruned when a new one is made; those of processes that still live are spared.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlm_kernel.credentials import redact, secret_values

_log = logging.getLogger(__name__)

MAX_TOTAL_BYTES = 2 << 30
"""Bytes above which the oldest episodes are pruned, however many are to be kept."""

_UNCLEAR_S = 86_400.0
"""Seconds for which a folder is spared if nothing tells whether its process lives."""

RUN_FILE = "run.json"


def default_root() -> Path:
    """Return the folder that holds the runs where none is configured: ``rlm/runs`` in Jupyter's data directory."""
    from jupyter_core.paths import jupyter_data_dir

    return Path(jupyter_data_dir()) / "rlm" / "runs"


def write_whole(target: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file under another name and put it in its place, so that a reader finds all of it or what was there before.

    Args:
        target: the file.
        data: all of its content.
        mode: its permissions, less the process's umask.

    Raises:
        OSError: it could not be written; nothing is left of it.
    """
    written = target.with_name(f".{target.stem}-{uuid.uuid4().hex[:8]}")
    try:
        with open(written, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
            file.write(data)
        os.replace(written, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(written)
        raise


def runs_root(configured: str | None) -> Path:
    """Return the folder that holds the runs: the configured one (the setting ``run_dir``), or the default."""
    return Path(configured).expanduser() if configured else default_root()


@dataclass(slots=True)
class RunFolder:
    """The folder of one episode.

    Args:
        root: the folder that holds all of them.
        episode_id: the episode.
        keep: how many episodes to keep.
    """

    root: Path
    episode_id: str
    keep: int
    _path: Path | None = None
    _broken: bool = False

    @property
    def exists(self) -> bool:
        return self._path is not None

    def path(self) -> Path | None:
        """Return the folder, making it first if need be; None if it cannot be made (which is logged once)."""
        if self._path is None and not self._broken:
            path = self.root / f"{time.strftime('%Y%m%d-%H%M%S')}-{self.episode_id}"
            try:
                prune(self.root, self.keep - 1)
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                self._broken = True
                _log.warning("runs are not written down: %s: %s", path, error.strerror)
            else:
                self._path = path
        return self._path

    def run_paths(self, run_id: str) -> tuple[str, str]:
        """Return the paths of the raw log and of the trajectory of one run, empty if there is no folder. No I/O."""
        path = self._path
        return ("", "") if path is None else (str(path / f"{run_id}.log"), str(path / f"{run_id}.jsonl"))

    def write(self, content: dict[str, Any]) -> None:
        """Replace ``run.json``, if the folder exists. A full disk is logged and loses nothing else."""
        if self._path is None:
            return
        text = json.dumps(redacted(content, secret_values(os.environ)), indent=1)
        try:
            write_whole(self._path / RUN_FILE, text.encode("utf-8", "backslashreplace"))
        except OSError as error:
            _log.warning("%s was not written: %s", self._path / RUN_FILE, error.strerror)


def prune(root: Path, keep: int, max_total_bytes: int = MAX_TOTAL_BYTES) -> list[Path]:
    """Remove the oldest episodes beyond ``keep`` or beyond a total size, sparing those of living processes.

    Returns:
        the folders that were removed.
    """
    removed = []
    total = 0
    for position, folder in enumerate(sorted(episode_folders(root), key=lambda path: path.name, reverse=True)):
        total += sum(stat.st_size for stat in _file_stats(folder))
        if (position >= keep or total > max_total_bytes) and not is_in_use(folder):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def episode_folders(root: Path) -> Iterator[Path]:
    """Yield what is an episode's folder: nothing else in the directory is ever touched."""
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            if path.is_dir() and path.name[:8].isdecimal() and path.name.count("-") >= 2:
                yield path


def _file_stats(folder: Path) -> list[os.stat_result]:
    """Return the stats of the files in a folder. What another process removes meanwhile is left out."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                found.append(path.stat())
    return found


def redacted(value: Any, secrets: tuple[str, ...]) -> Any:
    """Replace secrets in every text. Before the encoding: a secret with a quote in it looks different afterwards."""
    if isinstance(value, dict):
        return {key: redacted(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item, secrets) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else redact(str(value), secrets)


def _was_touched_within(folder: Path, seconds: float) -> bool:
    newest = max((stat.st_mtime for stat in _file_stats(folder)), default=None)
    try:
        return time.time() - (folder.stat().st_mtime if newest is None else newest) < seconds
    except OSError:
        return True


def is_in_use(folder: Path) -> bool:
    """Tell whether the process that writes an episode down still lives, as far as that can be known."""
    try:
        content = json.loads((folder / RUN_FILE).read_text("utf-8"))
        pid = int(content["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return _was_touched_within(folder, _UNCLEAR_S)  # it may be in the making
    if content.get("ended"):
        return False
    if content.get("host") != platform.node():
        return _was_touched_within(folder, _UNCLEAR_S)  # a shared directory: that pid means nothing here
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
