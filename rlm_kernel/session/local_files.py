"""Where runs in this process are written down, if the user has named a place for them.

Who runs it: the thread of the run at the root of a tree. A folder that cannot be made is logged, and the run goes on.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlm_kernel._version import __version__
from rlm_kernel.loop.prompts import MAX_TASK_CHARS
from rlm_kernel.session.rundir import RunFolder
from rlm_kernel.session.runtree import RunNode

KEEP_RUNS = 100
"""Episodes whose files are kept, as the setting ``keep_runs`` has it."""


def trajectory_path(node: RunNode) -> str:
    """Return where a run writes its trajectory; empty if nowhere."""
    return "" if node.folder is None else node.folder.run_paths(node.name)[1]


@contextlib.contextmanager
def written_down(node: RunNode, task: str, model: str) -> Iterator[Callable[[str | None], None]]:
    """Keep a folder for the tree of a run, if the user has named a place for it.

    Not otherwise: an evaluation makes thousands of runs, which would push out the notebooks' folders.
    """
    root = os.environ.get("RLM_RUN_DIR", "").strip()
    if node.parent is not None or not root:
        yield lambda _answer: None
        return
    episode = uuid.uuid4().hex[:12]
    folder = RunFolder(Path(root).expanduser(), episode, KEEP_RUNS)
    content: dict[str, Any] = {
        "episode_id": episode,
        "pid": os.getpid(),
        "host": platform.node(),
        "version": __version__,
        "started_at": time.time(),
        "ended": False,
        "model": model,
        "task": task[:MAX_TASK_CHARS],
    }
    if folder.path() is not None:
        node.folder = folder
        folder.write(content)
    try:
        yield lambda answer: content.update(final_answer=answer)
    finally:
        content.update(ended=True, usage=asdict(node.usage))
        folder.write(content)
