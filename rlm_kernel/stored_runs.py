"""Find and read what is on disk of a run: in progress, ended, killed, or of a kernel that is long gone. Reads only.

A run is called by its id (``c3``, ``root-1a2b3c``; ``root`` for the latest in a notebook's own namespace), by its episode
(whose main run is meant), or by both: ``EPISODE/RUN``. Ids of children begin anew with each kernel, so that one may fit
runs of several episodes; the error then says how to tell them apart.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlm_kernel.errors import ConfigurationError
from rlm_kernel.loop.trajectory import read_trajectory
from rlm_kernel.session.rundir import RUN_FILE, episode_folders, is_in_use

_ROOT = "root"
_LISTED = 10
_TERMINAL = frozenset({"completed", "failed", "timed_out", "cancelled"})


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One run as it is on disk.

    Attributes:
        folder: of its episode.
        run_id: its id within the episode.
        lines: of its trajectory, as far as they are complete.
        record: what ``run.json`` says about it, empty if nothing.
        episode: the whole of ``run.json``, empty if it cannot be read.
    """

    folder: Path
    run_id: str
    lines: tuple[dict[str, Any], ...]
    record: dict[str, Any]
    episode: dict[str, Any]

    @property
    def metadata(self) -> dict[str, Any]:
        return next((line for line in self.lines if line.get("type") == "metadata"), {})

    @property
    def iterations(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("type") == "iteration"]

    @property
    def end(self) -> dict[str, Any] | None:
        """The end line, None if there is none (yet)."""
        return next((line for line in reversed(self.lines) if line.get("type") == "end"), None)

    @property
    def episode_id(self) -> str:
        known = self.metadata.get("episode_id") or self.episode.get("episode_id")
        return str(known or self.folder.name.rpartition("-")[2])

    @property
    def parent_id(self) -> str | None:
        parent = self.metadata.get("parent_id") or self.record.get("parent_id")
        return None if parent is None else str(parent)

    @property
    def depth(self) -> int:
        depth = self.metadata.get("depth", 0)
        return depth if isinstance(depth, int) else 0

    @property
    def state(self) -> str:
        """How it stands with the run, or how it ended: a state of a child's, or the loop's own stop reason."""
        recorded = self.record.get("state")
        if recorded in _TERMINAL:
            return str(recorded)
        if self.end is not None:
            return str(self.end.get("stop_reason"))
        return "running" if is_in_use(self.folder) else "killed (its kernel has ended)"

    @property
    def is_over(self) -> bool:
        return self.state != "running"

    @property
    def usage(self) -> dict[str, int]:
        """Model calls and tokens, of the end line, else summed over the iterations."""
        sources = [self.end] if self.end is not None else self.iterations
        total = {"calls": 0, "prompt_tokens": 0, "completion_tokens": 0}
        for source in sources:
            usage = source.get("usage") or {}
            for name in total:
                value = usage.get(name, 0)
                total[name] += value if isinstance(value, int) else 0
        return total

    @property
    def final_answer(self) -> str | None:
        for line in reversed(self.lines):
            if line.get("final_answer") is not None:
                return str(line["final_answer"])
        return None

    @property
    def error(self) -> str | None:
        error = self.record.get("error") or (self.end or {}).get("error")
        return None if error is None else str(error)

    def descendants(self) -> Iterator[StoredRun]:
        """Yield the runs below this one, each before its own children, in the order of their ids."""
        started = {run["id"]: set(run.get("children", [])) for run in _dicts(self.episode.get("root_runs"))}
        runs = [read_run(self.folder, run_id) for run_id in run_ids(self.folder) if not run_id.startswith(_ROOT)]

        def below(parent: StoredRun) -> Iterator[StoredRun]:
            for run in runs:
                is_child = run.parent_id == parent.run_id
                if is_child or (run.parent_id is None and run.run_id in started.get(parent.run_id, ())):
                    yield run
                    yield from below(run)

        yield from below(self)


def run_ids(folder: Path) -> list[str]:
    """Return the ids of the runs that an episode's folder holds: the root's first, then children in start order."""
    try:
        names = [path.stem for path in folder.iterdir() if path.suffix == ".jsonl"]
    except OSError:
        return []
    return sorted(names, key=lambda name: (not name.startswith(_ROOT), len(name), name))


def read_run(folder: Path, run_id: str) -> StoredRun:
    """Read one run.

    Raises:
        ConfigurationError: its file cannot be read.
    """
    path = folder / f"{run_id}.jsonl"
    try:
        lines = tuple(read_trajectory(path))
    except OSError as error:
        raise ConfigurationError("ID", run_id, f"{path} cannot be read: {error.strerror}") from error
    episode = read_run_file(folder)
    records = _dicts(episode.get("children")) + _dicts(episode.get("root_runs"))
    record = next((each for each in records if each.get("id") == run_id), {})
    return StoredRun(folder, run_id, lines, record, episode)


def read_run_file(folder: Path) -> dict[str, Any]:
    """Read an episode's ``run.json``; empty if it cannot be read."""
    try:
        content = json.loads((folder / RUN_FILE).read_text("utf-8", "replace"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def find_run(root: Path, wanted: str, *, current: Path | None = None) -> StoredRun:
    """Find the run that a user means.

    Args:
        root: the folder that holds all episodes.
        wanted: a run id, an episode's id (or its beginning), or ``EPISODE/RUN``.
        current: the running episode's folder, whose runs come first.

    Raises:
        ConfigurationError: there is no such run, or more than one; the message lists those that fit.
    """
    if current is not None and (run_id := _match(current, wanted)) is not None:
        return read_run(current, run_id)
    folders = sorted(episode_folders(root), key=lambda path: path.name, reverse=True)
    episode, slash, run = wanted.rpartition("/")
    fitting: list[tuple[Path, str]]
    if slash:
        fitting = [(f, found) for f in folders if _is_called(f, episode) and (found := _match(f, run)) is not None]
    else:
        fitting = [(f, found) for f in folders if (found := _match(f, wanted)) is not None]
        if not fitting:
            fitting = [(f, found) for f in folders if _is_called(f, wanted) for found in _main_runs(f)]
    if len(fitting) != 1:
        there = fitting or [(folder, run_id) for folder in folders for run_id in run_ids(folder)]
        listed = ", ".join(f"{_short(folder)}/{run_id}" for folder, run_id in there[:_LISTED]) or "none at all"
        more = f" and {len(there) - _LISTED} more" if len(there) > _LISTED else ""
        what = f"fits {len(fitting)} runs" if fitting else "there is no such run"
        raise ConfigurationError("ID", wanted, f"{what}; give one of these: {listed}{more}")
    return read_run(*fitting[0])


def _match(folder: Path, wanted: str) -> str | None:
    """Return the run of one episode that is called like this."""
    ids = run_ids(folder)
    if wanted == _ROOT:
        roots = [run_id for run_id in ids if run_id.startswith(_ROOT)]
        return max(roots, key=lambda run_id: _modified(folder / f"{run_id}.jsonl"), default=None)
    return wanted if wanted in ids else None


def _main_runs(folder: Path) -> list[str]:
    """Return the run that is meant by an episode: the root's latest; without one, all runs that have no parent."""
    root = _match(folder, _ROOT)
    return [root] if root is not None else [i for i in run_ids(folder) if read_run(folder, i).parent_id is None]


def _is_called(folder: Path, episode: str) -> bool:
    names = (folder.name, folder.name.rpartition("-")[2], str(read_run_file(folder).get("episode_id", "")))
    return bool(episode) and any(name.startswith(episode) for name in names)


def _short(folder: Path) -> str:
    return folder.name.rpartition("-")[2]


def _modified(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _dicts(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
