"""What children run in the tests of the process layer: one function per kind of good or bad behaviour.

A task is JSON: ``{"do": NAME, ...}``. What a child has to tell a test while it runs goes as one JSON line each to the pipe that is
its first attachment.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, NoReturn

from rlm_kernel.children.worker import Link
from rlm_kernel.wire import messages as m


class Context:
    """What an entry gets."""

    def __init__(self, link: Link, start: m.Start, task: dict[str, Any]) -> None:
        self.link, self.start, self.task = link, start, task

    def report(self, **facts: Any) -> None:
        if self.link.attachments:
            os.write(self.link.attachments[0], json.dumps({"pid": os.getpid(), **facts}).encode() + b"\n")


def run(link: Link, start: m.Start) -> str:
    task = json.loads(start.task)
    answer = globals()["do_" + task["do"]](Context(link, start, task))
    return str(answer)


def warm_up() -> None:
    """Nothing to load beyond this module."""


def pause() -> NoReturn:
    while True:
        signal.pause()


# ------------------------------------------------------------------------------------------------------- good behaviour


def do_echo(c: Context) -> str:
    print("hello from", c.start.id, flush=True)
    c.report()
    return str(c.task.get("text", "ok"))


def do_big(c: Context) -> str:
    return "é" * int(c.task["size"])


def do_surrogates(c: Context) -> str:
    return "before \udcff after"


def do_pause(c: Context) -> None:
    c.report()
    pause()


def do_facts(c: Context) -> str:
    with tempfile.NamedTemporaryFile() as file:
        name = file.name
    try:
        read = input()
    except EOFError:
        read = "EOFError"
    with open("/proc/self/environ", "rb") as environ:
        exec_environ = environ.read().decode("utf-8", "replace")
    open_fds = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            open_fds.append((int(fd), os.readlink(f"/proc/self/fd/{fd}")))
    facts = {
        "random": random.random(),
        "tempfile": name,
        "stdin": os.readlink("/proc/self/fd/0"),
        "input": read,
        "cwd": os.getcwd(),
        "environ": dict(os.environ),
        "exec_environ": exec_environ,
        "sid": os.getsid(0),
        "pid": os.getpid(),
        "threads": len(os.listdir("/proc/self/task")),
        "fds": [target for fd, target in open_fds if fd > 2],
        "sigint": str(signal.getsignal(signal.SIGINT)),
        "sigterm": str(signal.getsignal(signal.SIGTERM)),
        "blocked": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    }
    return json.dumps(facts)


def do_change_everything(c: Context) -> str:
    os.environ["RLM_TEST_CHANGED"] = "yes"
    os.chdir("/")
    return os.getcwd()


def do_clean_up_when_asked(c: Context) -> str:
    try:
        c.report()
        pause()
    finally:
        c.report(cleaned=True)


def do_answer_when_asked(c: Context) -> str:
    try:
        c.report()
        pause()
    except KeyboardInterrupt:
        return "a late answer"


# --------------------------------------------------------------------------------------------------------------- the bad


def do_raise(c: Context) -> None:
    raise ValueError("a bad thing")


class CannotBePickled(Exception):
    def __init__(self) -> None:
        super().__init__("cannot travel")
        self.lock = threading.Lock()

    def __reduce__(self) -> NoReturn:
        raise TypeError("no")


def do_raise_unpicklable(c: Context) -> None:
    raise CannotBePickled


def do_system_exit(c: Context) -> None:
    sys.exit(3)


def do_exit(c: Context) -> None:
    os._exit(int(c.task["code"]))


def do_die(c: Context) -> None:
    os.kill(os.getpid(), int(c.task["signal"]))
    pause()


def do_stubborn(c: Context) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    c.report()
    while True:
        with contextlib.suppress(BaseException):
            pause()


def do_swallow(c: Context) -> None:
    """Keep the cooperative stop's handler, and catch what it raises, for ever."""
    first = True
    while True:
        try:
            if first:
                first = False
                c.report()
            signal.pause()
        except BaseException:
            c.report(swallowed=True)


def do_count_requests(c: Context) -> str:
    """Take three requests to stop without noticing any, as Python does with one that comes just before a system call."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    c.report()
    came = [signal.sigtimedwait({signal.SIGINT}, 2.0) is not None for _ in range(3)]
    assert all(came), came
    return "three"


def do_garbage(c: Context) -> None:
    c.report()
    os.write(c.link._channel.fileno(), b"printed by some C library\n" * 3)
    pause()


def do_flood(c: Context) -> None:
    c.report()
    for number in range(10**9):
        c.link.notify(m.Iteration(number))


def daemonize(c: Context) -> int:
    """Start a process that has left session, group and parent, and ignores every polite signal. Returns its pid."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        if os.fork() == 0:
            os.write(writer, str(os.getpid()).encode())
            os.close(writer)
            pause()
        os._exit(0)
    os.close(writer)
    pid = int(os.read(reader, 100))
    os.close(reader)
    return pid


def do_daemonize(c: Context) -> str:
    c.report(daemon=daemonize(c))
    if c.task.get("then") == "pause":
        pause()
    return "left a daemon"


def do_subprocess(c: Context) -> str:
    """Start other programs: one as usual, one in a new session, one with nothing of our environment."""
    arguments: list[dict[str, Any]] = [{}, {"start_new_session": True}, {"env": {}}]
    started = [subprocess.Popen(["/bin/sleep", "1000"], **more) for more in arguments]
    c.report(started=[process.pid for process in started])
    if c.task.get("then") == "pause":
        pause()
    return "left three programs"


# ----------------------------------------------------------------------------------------------------------- descendants


def spawn(c: Context, tasks: list[dict[str, Any]]) -> m.Reply:
    """Start children of this child; each gets a copy of the report pipe."""
    specs = tuple(
        m.ChildRequestSpec(json.dumps(task).encode(), "", "", None, task.get("timeout_s"), len(c.link.attachments))
        for task in tasks
    )
    fds = [os.dup(fd) for _ in tasks for fd in c.link.attachments]
    build = lambda number: m.AskSpawn(number, specs, dict(os.environ), os.getcwd(), tuple(sys.path))  # noqa: E731
    return c.link.request(build, fds)


def wait(c: Context, ids: tuple[str, ...], timeout_s: float | None = None, any_: bool = False) -> m.Reply:
    return c.link.request(lambda number: m.AskWait(number, ids, timeout_s, any_))


def summary(reply: m.Reply) -> str:
    if reply.error is not None:
        return json.dumps({"error": reply.error, "class": reply.error_class, "limit": reply.limit})
    return json.dumps([[s.id, s.state, s.result] for s in reply.statuses])


def do_parent(c: Context) -> str:
    """Start children and wait for them."""
    reply = spawn(c, c.task["children"])
    if reply.error is not None:
        return summary(reply)
    ids = tuple(status.id for status in reply.statuses)
    c.report(children=ids)
    return summary(wait(c, ids, c.task.get("wait_s")))


def do_parent_that_does_not_wait(c: Context) -> str:
    reply = spawn(c, c.task["children"])
    return summary(reply)


def do_parent_that_polls(c: Context) -> str:
    ids = tuple(status.id for status in spawn(c, c.task["children"]).statuses)
    while True:
        reply = c.link.request(lambda number: m.AskStatus(number, ids))
        if all(status.done for status in reply.statuses):
            return summary(reply)
        time.sleep(0.005)  # what a model's code does


def do_ask(c: Context) -> str:
    """Ask for a foreign child's status."""
    return summary(c.link.request(lambda number: m.AskStatus(number, tuple(c.task["ids"]))))


def do_many_threads_wait(c: Context) -> str:
    """Several threads have requests under way at once, over the one channel."""
    ids = tuple(status.id for status in spawn(c, c.task["children"]).statuses)
    answers: dict[str, str | None] = {}

    def look(child_id: str) -> None:
        [status] = wait(c, (child_id,)).statuses
        answers[child_id] = status.result

    threads = [threading.Thread(target=look, args=(child_id,)) for child_id in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return json.dumps([answers[child_id] for child_id in ids])


def do_fork_and_use_the_link(c: Context) -> str:
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            c.link.notify(m.Iteration(99))
            os.write(writer, b"it worked")
        except Exception as error:
            os.write(writer, type(error).__name__.encode())
        os._exit(0)
    os.wait()
    return os.read(reader, 100).decode()


def do_fork_chain(c: Context) -> None:
    """Die, and leave a process that forks itself away again and again: there is always one more to be adopted."""
    if os.fork() == 0:
        os.setsid()
        until = time.monotonic() + 20.0
        while time.monotonic() < until:
            if os.fork():
                os._exit(0)
        os._exit(0)
    os._exit(0)
