"""Every message that crosses a process boundary, by direction.

Four directions, four unions: root → nursery (`ToNursery`), nursery → root (`FromNursery`), root → child (`ToChild`),
child → root (`FromChild`). Bodies that only one layer understands travel as plain ``bytes``; nobody on the way
unpickles them.
"""

from __future__ import annotations

import msgspec

from rlm_kernel.values import ChildStatus, Graces, Usage

# ---------------------------------------------------------------------------------------------------- root → nursery


class Spawn(msgspec.Struct, tag=True, frozen=True):
    """Fork a child. Descriptors: the child's end of its channel, the write end of its log pipe."""

    id: str
    timeout_s: float
    graces: Graces
    memory_limit_bytes: int | None = None


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Stop children, side by side: cooperative request, SIGTERM, SIGKILL, each after its grace. A later Stop may only hasten."""

    ids: tuple[str, ...]
    graces: Graces


class Hold(msgspec.Struct, tag=True, frozen=True):
    """Keep a shared context in memory, so that children forked from now on inherit it. Descriptor: the bytes."""

    key: str
    text: bool


class Drop(msgspec.Struct, tag=True, frozen=True):
    """Release shared contexts."""

    keys: tuple[str, ...]


class Quit(msgspec.Struct, tag=True, frozen=True):
    """Exit as soon as no child is left."""


ToNursery = Spawn | Stop | Hold | Drop | Quit

# ---------------------------------------------------------------------------------------------------- nursery → root


class NurseryReady(msgspec.Struct, tag=True, frozen=True):
    """The nursery is warm; spawns that were queued are served from now on."""

    boot_s: float
    warnings: tuple[str, ...] = ()


class Started(msgspec.Struct, tag=True, frozen=True):
    """The child's process exists. Descriptor: its pidfd, where the platform has them.

    Attributes:
        at: ``time.monotonic()`` from which its timeout counts; the clock is the same in all processes.
    """

    id: str
    pid: int
    at: float


class SpawnFailed(msgspec.Struct, tag=True, frozen=True):
    """The fork failed; no process came to be."""

    id: str
    error: str


class TimedOut(msgspec.Struct, tag=True, frozen=True):
    """The child's wall-clock time is up; the nursery has begun to stop it."""

    id: str


class OverLimit(msgspec.Struct, tag=True, frozen=True):
    """The child uses more memory than it may; the nursery has killed it."""

    id: str
    private_bytes: int


class Exited(msgspec.Struct, tag=True, frozen=True):
    """The child was reaped, its process group killed, and what it left behind reaped too.

    ``code`` is the exit code, or minus the signal number. ``leftover`` are pids of processes that the child's code had
    started and whose exit could not be confirmed.
    """

    id: str
    code: int
    asked: bool = False
    terminated: bool = False
    killed: bool = False
    leftover: tuple[int, ...] = ()


FromNursery = NurseryReady | Started | SpawnFailed | TimedOut | OverLimit | Exited

# ------------------------------------------------------------------------------------------------------ root → child


class Start(msgspec.Struct, tag=True, frozen=True):
    """What to run. Descriptors: the task's attachments, in the order in which the task counts them.

    ``entry`` is ``"module:callable"``; ``task`` and ``inherited`` are opaque to everything but it. ``environ`` replaces
    the child's environment, ``secret_environ`` are the variables of it that look like secrets.
    """

    id: str
    depth: int
    parent_id: str | None
    trajectory_path: str
    entry: str
    task: bytes
    inherited: bytes
    environ: dict[str, str]
    secret_environ: dict[str, str]
    cwd: str
    sys_path: tuple[str, ...]


class Reply(msgspec.Struct, tag=True, frozen=True):
    """Answer to a request of the child's: statuses, ids, or an error by class name and arguments."""

    request: int
    ids: tuple[str, ...] = ()
    statuses: tuple[ChildStatus, ...] = ()
    error: str | None = None
    error_class: str = ""
    limit: str = ""
    limit_value: int | float | None = None


class Steer(msgspec.Struct, tag=True, frozen=True):
    """A message for the child's model, to be seen before its next call."""

    text: str


ToChild = Start | Reply | Steer

# ------------------------------------------------------------------------------------------------------ child → root


class ChildRequestSpec(msgspec.Struct, frozen=True):
    """One child that a child asks for. ``attachments`` counts the descriptors of the message that belong to it."""

    task: bytes
    name: str
    prompt_preview: str
    model: str | None
    timeout_s: float | None
    attachments: int = 0


class AskSpawn(msgspec.Struct, tag=True, frozen=True):
    """Start children, all or none. The cwd, path and environment are those of the asking process at this moment."""

    request: int
    specs: tuple[ChildRequestSpec, ...]
    environ: dict[str, str]
    cwd: str
    sys_path: tuple[str, ...]


class AskStatus(msgspec.Struct, tag=True, frozen=True):
    """Snapshot of the named descendants, or of all in start order."""

    request: int
    ids: tuple[str, ...] | None


class AskWait(msgspec.Struct, tag=True, frozen=True):
    """Answer when all (or any) of the named descendants have ended, or when the time is up."""

    request: int
    ids: tuple[str, ...]
    timeout_s: float | None
    any: bool


class AskCancel(msgspec.Struct, tag=True, frozen=True):
    """Stop a descendant and its own descendants; answered when their exits are confirmed. None: the configured grace."""

    request: int
    id: str
    grace_s: float | None


class AskSend(msgspec.Struct, tag=True, frozen=True):
    """Hand a message to a descendant."""

    request: int
    id: str
    text: str


class AskCall(msgspec.Struct, tag=True, frozen=True):
    """Ask for permission to make a model call; answered when there is room, or with an error when the budget is spent."""

    request: int


class SteerSeen(msgspec.Struct, tag=True, frozen=True):
    """The child has put messages before its model: so many in all."""

    total: int


class Iteration(msgspec.Struct, tag=True, frozen=True):
    """The child has finished one more iteration of its loop."""

    number: int


class CallEnded(msgspec.Struct, tag=True, frozen=True):
    """A model call of the child's has ended. ``permitted`` gives back what `AskCall` had given.

    Attributes:
        model: the name under which the model was called.
        duration_s: wall-clock seconds of the call itself.
    """

    usage: Usage
    permitted: bool = False
    model: str = ""
    duration_s: float = 0.0


class Answer(msgspec.Struct, tag=True, frozen=True):
    """The child has its answer and is about to exit."""

    result: str


class Failure(msgspec.Struct, tag=True, frozen=True):
    """The child has no answer, and is about to exit."""

    error: str


FromChild = (
    AskSpawn
    | AskStatus
    | AskWait
    | AskCancel
    | AskSend
    | AskCall
    | SteerSeen
    | Iteration
    | CallEnded
    | Answer
    | Failure
)
