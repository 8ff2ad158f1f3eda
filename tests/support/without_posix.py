"""A program for a process of its own: import the package, and ask questions, where everything that only POSIX has is missing.

The standard library and the dependencies are loaded before that is taken away, since theirs would break; what of ours is imported or
called afterwards meets an interpreter like that of Windows. Prints one JSON object.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import pkgutil
import platform
import select
import signal
import socket
import sys
import traceback
from typing import Any

MODULES = ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog", "posix", "_posixsubprocess")

NAMES: dict[Any, str] = {
    signal: "pthread_kill pthread_sigmask sigwait sigtimedwait sigpending siginterrupt pause alarm setitimer getitimer "
    "pidfd_send_signal ITIMER_REAL SIG_BLOCK SIG_UNBLOCK SIG_SETMASK SIGHUP SIGKILL SIGCHLD SIGPIPE SIGALRM SIGCONT SIGSTOP "
    "SIGQUIT SIGUSR1 SIGUSR2",
    os: "fork forkpty register_at_fork getpgrp getpgid setpgid killpg setsid getsid getuid geteuid getgid wait wait4 waitid "
    "P_ALL P_PID WNOHANG WNOWAIT WEXITED WIFEXITED memfd_create MFD_CLOEXEC pidfd_open mkfifo sysconf uname pread pwrite nice "
    "sched_getaffinity posix_spawn O_NONBLOCK O_CLOEXEC fchmod chown set_blocking statvfs",
    socket: "AF_UNIX SCM_RIGHTS SO_PEERCRED CMSG_SPACE CMSG_LEN send_fds recv_fds",
    select: "poll epoll POLLIN POLLOUT POLLHUP POLLERR",
    mmap: "MAP_PRIVATE MAP_SHARED PROT_READ PROT_WRITE",
}
"""What Windows lacks, as far as anybody here might want it."""


def package_modules() -> list[str]:
    """Name every module of the package that is imported by others: not what only a nursery runs."""
    import rlm_kernel

    names = [found.name for found in pkgutil.walk_packages(rlm_kernel.__path__, "rlm_kernel.")]
    return [name for name in names if not name.startswith("rlm_kernel.children.") and name != "rlm_kernel.__main__"]


def take_posix_away() -> None:
    """Forget our own modules, and take away what only POSIX has."""
    platform.uname()  # kept by the module, which would ask the operating system in another way on Windows
    for name in [name for name in sys.modules if name.partition(".")[0] == "rlm_kernel"]:
        del sys.modules[name]
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]  # this is how an import is blocked
    for module, names in NAMES.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    sys.platform = "win32"


def failed_imports(names: list[str]) -> dict[str, str]:
    """Import all of them, and give for each that cannot be the place and the error."""
    failed = {}
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            failed[name] = f"{place.filename}:{place.lineno}: {type(error).__name__}: {error}"
    return failed


def session_answers() -> dict[str, str]:
    """Ask a session: a plain call, a blocking query, and one in the background."""
    from rlm_kernel.errors import RLMError
    from rlm_kernel.session.config import Settings
    from rlm_kernel.session.session import RLMSession

    namespace: dict[str, Any] = {}
    session = RLMSession(
        Settings({"client_factory": lambda: lambda messages: f"to: {messages[-1]['content']}"}), namespace
    )
    session.prepare()
    said = {"llm_query": namespace["llm_query"]("one"), "rlm_query": namespace["rlm_query"]("two")}
    said["batch"] = ", ".join(namespace["rlm_query_batched"](["three", "four"]))
    try:
        namespace["rlm_query"]("five", blocking=False)
    except RLMError as error:
        said["background"] = f"{type(error).__name__}: {error}"
    said["shutdown"] = str(session.shutdown().ok)
    return said


def runner_answer() -> str:
    """Let a runner in this process answer a task, with a recursive query in it."""
    from rlm_kernel import LocalRLMRunner

    def chat(messages: list[dict[str, str]]) -> str:
        asked = messages[-1]["content"]
        if "inner" in messages[1]["content"] and "outer" not in messages[1]["content"]:
            return "FINAL(from within)"
        return "```repl\nFINAL(rlm_query('inner'))\n```" if "outer" in asked else asked

    return str(LocalRLMRunner(chat, max_depth=2).run("text", "outer").final_answer)


if __name__ == "__main__":
    modules = package_modules()
    before = failed_imports(modules)
    take_posix_away()
    report: dict[str, Any] = {"before": before, "modules": modules, "failed": failed_imports(modules)}
    report["session"] = session_answers()
    try:
        report["runner"] = runner_answer()
    except Exception as error:
        report["runner"] = "".join(traceback.format_exception(error))
    print(json.dumps(report))
