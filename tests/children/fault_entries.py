"""What runs inside nursery and children in the fault matrix and the tests of the machinery: it announces where it is, and waits there.

Imported in a nursery (as a preload), this module installs the steps that lie before a child's own code. Everything else is chosen by
environment variables, which travel with each start:

* ``RLM_FAULT_DIR``: the folder with the pipes: ``at``, on which steps are announced, and one ``go-NAME`` per waiting party, on which it is
  told how to go on: ``answer``, ``fail`` or ``eat`` (memory). A file ``forked`` there holds up the next fork, ``boot`` the next nursery;
* ``RLM_FAULT_ROLE``: ``leaf`` is the run that stands at the step, ``parent`` starts a leaf, ``blocker`` holds a slot, ``plain`` answers;
* ``RLM_FAULT_STEP``: the step of the leaf.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any, NoReturn

from rlm_kernel.children import forking
from rlm_kernel.children.worker import MARKER_VARIABLE, Link
from rlm_kernel.values import Completion, Message, Usage
from rlm_kernel.wire import channel
from rlm_kernel.wire import messages as m

DIRECTORY, ROLE, STEP, FINITE = "RLM_FAULT_DIR", "RLM_FAULT_ROLE", "RLM_FAULT_STEP", "RLM_FAULT_FINITE"
FAILED_CODE = 7
EATEN_BYTES = 100 << 20
ENDLESS = 10**15
"""Steps of a loop in C that ends long after everybody has lost patience."""

Helper = Callable[..., Any]

wire: Any = channel
"""The same module, whose functions a child here replaces."""


class InjectedError(RuntimeError):
    """The failure that a step was told to end in."""


def path(name: str) -> str:
    return os.path.join(os.environ[DIRECTORY], name)


def announce(at: str, **facts: Any) -> None:
    line = json.dumps({"at": at, "pid": os.getpid(), **facts}).encode() + b"\n"
    fd = os.open(path("at"), os.O_WRONLY)
    try:
        os.write(fd, line)
    finally:
        os.close(fd)


def wait_for_word(who: str) -> str:
    """Block, as in any read, until somebody says how to go on."""
    with open(path(f"go-{who}"), "rb", buffering=0) as pipe:
        return pipe.readline().decode().strip()


def hold(at: str, who: str = "leaf") -> str:
    """Announce a step and wait there. Returns what was said, after having eaten memory if it was that."""
    announce(at)
    word = wait_for_word(who)
    if word == "eat":
        eat()
    return word


def eat() -> NoReturn:
    """Use more memory than the tests allow, but not so much that an allocation would fail."""
    eaten = bytearray(EATEN_BYTES)
    eaten[::4096] = b"\1" * len(eaten[::4096])
    while True:
        time.sleep(60)


# -------------------------------------------------------------------------------------------------------- in the nursery


def _install() -> None:
    reset = forking.reset_in_child

    def held_reset(**options: Any) -> None:
        if _take("forked") and hold("forked") == "fail":
            raise InjectedError("in the first moments of a child")
        reset(**options)

    forking.reset_in_child = held_reset
    if _take("boot"):
        hold("booting", "boot")


def _take(flag: str) -> bool:
    try:
        os.unlink(path(flag))
    except OSError:
        return False
    return True


if MARKER_VARIABLE in os.environ and DIRECTORY in os.environ:
    _install()


# ------------------------------------------------------------------------------------------------------------ in a child


class Client:
    """Answers with the code that its run's role asks for."""

    def complete(self, messages: list[Message], model: str | None = None) -> Completion:
        role = os.environ[ROLE]
        if str(messages[-1]["content"]) == "gate":
            return Completion("through the gate", Usage(1, 1, 1))
        if role == "leaf" and os.environ[STEP] == "model" and hold("model") == "fail":
            raise InjectedError("in a model call")
        code = f"from tests.children import fault_entries\nFINAL(fault_entries.run_{role}(llm_query, rlm_query))"
        return Completion(f"```repl\n{code}\n```", Usage(1, 5, 5))


def make_client() -> Client:
    """Build the client of a child, in the child: the client factory of the tests."""
    if os.environ[ROLE] == "leaf" and os.environ[STEP] == "construct" and hold("construct") == "fail":
        raise InjectedError("in the client's construction")
    return Client()


def run_plain(*_helpers: Helper) -> str:
    return "ok"


def run_blocker(*_helpers: Helper) -> str:
    hold("blocker", "blocker")
    return "made room"


def run_inner(*_helpers: Helper) -> str:
    hold("inner", "inner")
    return "from below"


def run_parent(_llm_query: Helper, rlm_query: Helper) -> str:
    """Start the leaf when told to, and wait for it."""
    hold("parent", "parent")
    os.environ[ROLE] = "leaf"
    handle = rlm_query("leaf", blocking=False)
    announce("leaf", id=handle.id)
    if os.environ[STEP] == "queued":
        wait_for_word("parent")  # waiting for the leaf would give up the slot
    handle.wait()
    return "the parent's answer"


def run_leaf(llm_query: Helper, rlm_query: Helper) -> str:
    step = os.environ[STEP]
    run = {
        "loop": in_a_loop,
        "sleep": in_a_sleep,
        "native": in_native_code,
        "gate": lambda: at_the_gate(llm_query),
        "nested": lambda: waiting_for_a_child(rlm_query),
        "result_frame": hold_half_a_frame,
        "result_file": hold_the_file,
        "exit": hold_the_exit,
        "model": lambda: None,
        "construct": lambda: None,
        "forked": lambda: None,
    }.get(step, in_a_read)
    return run() or "the answer"


def _end(word: str) -> None:
    if word == "fail":
        os._exit(FAILED_CODE)
    if word == "eat":
        eat()


def in_a_read() -> None:
    _end(hold("code"))


def in_a_loop() -> None:
    """A loop in Python that never blocks."""
    with open(path("go-leaf"), "rb", buffering=0) as pipe:
        announce("loop")
        while not select.select([pipe], [], [], 0)[0]:
            pass
        _end(pipe.readline().decode().strip())


class _Woken(Exception):
    pass


def in_a_sleep() -> None:
    """One long call that a signal's handler can end."""

    def wake(*_: object) -> None:
        raise _Woken

    signal.signal(signal.SIGUSR1, wake)
    try:
        announce("sleep")
        time.sleep(1000)
    except _Woken:
        _end(wait_for_word("leaf"))


def in_native_code() -> None:
    """A loop in C that holds the interpreter lock: no Python signal handler runs until it ends."""
    announce("native")
    sum(itertools.repeat(0, 3_000_000 if FINITE in os.environ else ENDLESS))
    _end(wait_for_word("leaf"))


def at_the_gate(llm_query: Helper) -> None:
    """A helper that waits for the supervisor: it asks for a model call, and the only permission is taken."""
    hold("before the gate", "gate")
    announce("gate")
    llm_query("gate")
    _end(wait_for_word("leaf"))


def waiting_for_a_child(rlm_query: Helper) -> None:
    os.environ[ROLE] = "inner"
    rlm_query("inner")
    _end(wait_for_word("leaf"))


def hold_half_a_frame() -> str:
    """Stop in the middle of the frame that carries the answer."""
    flush = wire.Channel.flush

    def held(self: channel.Channel[Any]) -> bool:
        if self._outgoing and len(self._outgoing[0][0]) > 40_000:
            view, fds = self._outgoing[0]
            sent = self._sock.send(view[:1000])
            self._outgoing[0] = (view[sent:], fds)
            wire.Channel.flush = flush
            if hold("result_frame") == "fail":
                raise InjectedError("in the middle of a frame")
        return flush(self)

    wire.Channel.flush = held
    return "x" * 50_000


def hold_the_file() -> str:
    """Stop where an answer of several megabytes is written to its file."""
    write = wire.anonymous_file

    def held(parts: Any) -> int:
        if hold("result_file") == "fail":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(parts)

    wire.anonymous_file = held
    return "x" * 3_000_000


def hold_the_exit() -> None:
    """Linger between the answer and the exit."""
    leave = os._exit

    def held(code: int) -> NoReturn:
        os._exit = leave
        leave(FAILED_CODE if hold("exit") == "fail" else code)

    os._exit = held  # type: ignore[assignment]


# --------------------------------------------------------------------------------------- warm-ups of broken nurseries


def warm_up_never() -> None:
    """A nursery that never becomes ready."""
    hold("booting", "boot")


def warm_up_and_raise() -> None:
    raise InjectedError("no way to warm up")


def warm_up_without_forks() -> None:
    """The operating system has no more processes to give, for as many forks as the file ``no-forks`` says."""
    fork = os.fork

    def refused() -> int:
        try:
            with open(path("no-forks")) as file:
                left = int(file.read())
        except FileNotFoundError:
            return fork()
        if left <= 0:
            return fork()
        with open(path("no-forks"), "w") as file:
            file.write(str(left - 1))
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    os.fork = refused


def warm_up_without_descriptors() -> None:
    """No descriptor is free from the first fork on."""
    import resource

    fork = forking.fork

    def poor(run: Callable[[], int]) -> int:
        if _take("no-descriptors"):
            highest = max(int(name) for name in os.listdir("/proc/self/fd"))
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            held = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
            try:
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                os.close(held[-1])
                announce("no descriptors")
                held[-1] = os.open(os.devnull, os.O_RDONLY)
        return fork(run)

    forking.fork = poor


def warm_up_that_talks_nonsense() -> None:
    """After the first fork the nursery's channel carries half a frame, or garbage, as the file ``nonsense`` says."""
    from rlm_kernel.children import nursery

    tell = nursery.Nursery._tell

    def garbled(self: Any, message: Any, fds: Any = ()) -> None:
        tell(self, message, fds)
        if type(message).__name__ == "Started" and os.path.exists(path("nonsense")):
            with open(path("nonsense"), "rb") as file:
                data = file.read()
            self._channel.flush()
            self._channel._sock.sendall(data)
            if _take("then-exit"):
                os._exit(0)

    nursery.Nursery._tell = garbled  # type: ignore[method-assign]


# -------------------------------------------------------------------------------------- entries beside those of `entries`


def write_raw(link: Link, start: m.Start) -> str:
    """Write bytes to the channel that no channel would write."""
    task = json.loads(start.task)
    os.write(link._channel.fileno(), bytes.fromhex(task["data"]))
    if task["then"] == "exit":
        os._exit(0)
    while True:
        signal.pause()


def eat_memory(link: Link, start: m.Start) -> str:
    eat()


def big_answer_when_asked(link: Link, start: m.Start) -> str:
    def wake(*_: object) -> None:
        raise _Woken

    signal.signal(signal.SIGUSR1, wake)
    try:
        os.write(link.attachments[0], json.dumps({"pid": os.getpid()}).encode() + b"\n")
        while True:
            signal.pause()
    except _Woken:
        return "x" * 1_000_000


def start_and_cancel(link: Link, start: m.Start) -> str:
    """Start a child, ask for its end, and answer with what came of that."""
    task = json.loads(start.task)
    if "children" not in task:
        while True:
            signal.pause()
    child = m.ChildRequestSpec(json.dumps(task["children"][0]).encode(), "", "", None, None)
    reply = link.request(lambda number: m.AskSpawn(number, (child,), dict(os.environ), os.getcwd(), start.sys_path))
    reply = link.request(lambda number: m.AskCancel(number, reply.statuses[0].id, None))
    return str(reply.error)


def breed(link: Link, start: m.Start) -> str:
    """Start processes of several kinds, report them, and go on as told."""
    task = json.loads(start.task)
    pids = [_BREEDS[kind]() for kind in task["kinds"]]
    then = task["then"]
    if then in ("parent", "parents"):
        inner = {**task, "then": "stubborn", "kinds": task.get("grandkinds", task["kinds"])}
        count = task.get("children", 1)
        fds = [os.dup(link.attachments[0]) for _ in range(count)]
        child = m.ChildRequestSpec(json.dumps(inner).encode(), "", "", None, None, 1)
        build = lambda n: m.AskSpawn(n, (child,) * count, dict(os.environ), os.getcwd(), start.sys_path)  # noqa: E731
        ids = tuple(status.id for status in link.request(build, fds).statuses)
        if then == "parent":
            _until_it_runs(link, ids[0])
    line = json.dumps({"pid": os.getpid(), "started": pids}).encode() + b"\n"
    if then == "stubborn":
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
    os.write(link.attachments[0], line)
    print("reported", flush=True)
    if then == "fail":
        raise InjectedError("as told")
    if then == "parents":
        link.request(lambda n: m.AskWait(n, ids, None, False))
    while then in ("pause", "stubborn"):
        signal.pause()
    return "bred"


def _until_it_runs(link: Link, child_id: str) -> None:
    """Wait until a child has written its log: by then it has reported what it started."""
    while not link.request(lambda n: m.AskStatus(n, (child_id,))).statuses[0].log_tail:
        time.sleep(0.005)


def _program(**options: Any) -> int:
    return subprocess.Popen(["/bin/sleep", "1000"], **options).pid


def _daemon(*, stubborn: bool = False, scrubbed: bool = False) -> int:
    """Start a process that has left group, session and parent."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if stubborn:
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(signum, signal.SIG_IGN)
        if os.fork() == 0:
            os.setpgid(0, 0)
            os.write(writer, str(os.getpid()).encode())
            if scrubbed:
                os.execve("/bin/sleep", ["sleep", "1000"], {})
            while True:
                signal.pause()
        os._exit(0)
    os.close(writer)
    pid = int(os.read(reader, 100))
    os.close(reader)
    return pid


_BREEDS: dict[str, Callable[[], int]] = {
    "program": _program,
    "group": lambda: _program(process_group=0),
    "session": lambda: _program(start_new_session=True),
    "bare": lambda: _program(env={}),
    "daemon": _daemon,
    "stubborn_daemon": lambda: _daemon(stubborn=True),
    "scrubbed_daemon": lambda: _daemon(stubborn=True, scrubbed=True),
}
