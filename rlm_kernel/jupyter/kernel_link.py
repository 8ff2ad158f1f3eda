"""A harness's line to the kernel of one environment: start it, begin episodes in it, run cells, interrupt them, end it.

Who runs it: the caller's threads, one at a time; `wake` and `release` may be called from any. It starts no thread. It owns the kernel's
process (see `kernel_process`) and a pipe by which `wake` ends a wait for the kernel.

How each step can fail. Whatever breaks a conversation with the kernel off (it dies, it does not end after an interrupt, Ctrl-C comes a
second time) ends the kernel, since nobody knows its state then; the next `begin` starts another. After a cleanup that could not be
confirmed the kernel refuses to run code: `begin` tries again first.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlm_kernel.errors import ChildCleanupError, ConfigurationError, KernelDied, PayloadError
from rlm_kernel.jupyter.cell_output import CellOutput, one_line
from rlm_kernel.jupyter.episodes import EpisodeLeftovers, Job
from rlm_kernel.jupyter.install import kernel_spec
from rlm_kernel.jupyter.kernel_process import KernelProcess
from rlm_kernel.session.config import SETTINGS, Settings

_IDLE_S = 5.0
"""Seconds to wait for the end of a cell's output after its reply. A socket that has overflowed may have lost it."""

_SETTLE_S = 5.0
"""Seconds beyond the graces that an interrupt or a shutdown is given."""

_SNAPSHOT_S = 10.0
"""Seconds for the reprs of the names that a cell has bound."""


class _SettledInterrupt(KeyboardInterrupt):
    """Ctrl-C in this process has interrupted the cell, which has ended: the kernel is fit for the next one."""


@dataclass(frozen=True, slots=True)
class KernelCommand:
    """How a kernel is started.

    Attributes:
        name: an installed kernelspec; None for this interpreter.
        env: more environment variables, those of the settings included.
        arguments: settings that no variable can carry.
        cwd: working directory.
        startup_timeout_s: seconds that it may take.
        graces_s: seconds that its children are given to stop.
    """

    name: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    cwd: str | None = None
    startup_timeout_s: float = 60.0
    graces_s: float = 2.0

    @classmethod
    def of(cls, settings: Mapping[str, Any], env: Mapping[str, str], **options: Any) -> KernelCommand:
        """Make one from settings by name, which are checked here, where the user sees the error.

        Raises:
            ConfigurationError: names the setting and the value.
        """
        checked = Settings(environ={})
        variables, arguments = dict(env), []
        for name, value in settings.items():
            if isinstance(value, str):
                checked.set_text(name, value)
            else:
                checked.set(name, value)
            if callable(value):
                raise ConfigurationError(name, value, 'must be "module:callable": the kernel is another process')
            text = ",".join(value) if isinstance(value, tuple | list) else "none" if value is None else str(value)
            variable = SETTINGS[name].env
            if variable:
                variables[variable] = text
            else:
                arguments.append(f"--RLM.{name}={text}")
        graces_s = sum(checked[f"{step}_grace_s"] for step in ("shutdown", "terminate", "kill"))
        return cls(env=variables, arguments=tuple(arguments), graces_s=graces_s, **options)

    def spec(self) -> tuple[list[str], dict[str, str]]:
        """Return the kernelspec's command and environment.

        Raises:
            ConfigurationError: no kernelspec of that name is installed.
        """
        if self.name is None:
            return kernel_spec()["argv"], {}
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

        try:
            spec = KernelSpecManager().get_kernel_spec(self.name)
        except NoSuchKernel:
            raise ConfigurationError("kernel_name", self.name, "no kernelspec of that name is installed") from None
        return [part.replace("{resource_dir}", spec.resource_dir) for part in spec.argv], dict(spec.env)


@dataclass(frozen=True, slots=True)
class Ran:
    """What one cell of the model's gave.

    Attributes:
        seen: the observation of its reply.
        exception: one line of error, None if the code ran to its end.
        duration_s: wall-clock seconds.
    """

    seen: dict[str, Any]
    stdout: str
    stderr: str
    exception: str | None
    duration_s: float


class KernelLink:
    """See the module's docstring.

    Args:
        command: how the kernel is started.
        output_limit: characters that are kept of each stream of a cell.

    Attributes:
        cleanup_failure: what the kernel said last of children that could not be confirmed gone.
    """

    def __init__(self, command: KernelCommand, output_limit: int) -> None:
        self._command = command
        self._output_limit = output_limit
        self._patience_s = command.graces_s + _SETTLE_S
        self._owner = os.getpid()
        self._kernel: KernelProcess | None = None
        self.cleanup_failure: ChildCleanupError | None = None
        self._waking = threading.Lock()
        self._woken = False
        self._wake_r, self._wake_w = os.pipe()

    @property
    def pid(self) -> int | None:
        """The kernel's process id, None while there is no kernel."""
        kernel = self._kernel
        return None if kernel is None else kernel.pid

    # -- episodes

    def begin(self, job: Job, *, fresh_kernel: bool) -> dict[str, Any]:
        """Begin an episode: in the kernel that is there, if it is fit for another one. Returns the first observation.

        Raises:
            KernelDied, ChildCleanupError, PayloadError, RuntimeError
        """
        kernel = self._kernel
        if kernel is not None and not fresh_kernel and not kernel.has_died:
            try:
                return self._serve_reset(kernel, job)
            except EpisodeLeftovers:
                pass  # another kernel costs a second, an unclean one an episode that nobody can explain
        return self._serve_reset(self._start(), job)

    def _serve_reset(self, kernel: KernelProcess, job: Job) -> dict[str, Any]:
        import cloudpickle

        kernel.empty_log()
        file = kernel.folder / "job.pickle"
        try:
            with file.open("wb") as out:
                try:
                    cloudpickle.dump(job, out)
                except Exception as error:
                    what = f"the context cannot be pickled ({type(error).__name__}: {error}); give plain data"
                    raise PayloadError(what) from error
            if self.cleanup_failure is not None:
                self.cleanup()
            seen = self._serve(f"serve_reset({str(file)!r})")
            if self.cleanup_failure is not None:
                raise self.cleanup_failure
            return seen
        finally:
            file.unlink(missing_ok=True)

    def finish(self, answer: str | None) -> dict[str, Any]:
        """End the episode, with an answer or without one: its children are stopped. Returns the observation after that.

        Raises:
            KernelDied, RuntimeError
        """
        return self._serve(f"serve_final({answer!r})")

    def cleanup(self) -> None:
        """Have the kernel try again to confirm exits; `cleanup_failure` says what has come of it.

        Raises:
            KernelDied, RuntimeError
        """
        self._ask("%rlm cleanup")

    def _serve(self, call: str) -> dict[str, Any]:
        """Have the kernel call a function of `rlm_kernel.jupyter.episodes`. Returns the observation of its reply."""
        return self._ask(f"__import__('rlm_kernel.jupyter.episodes', fromlist=['_']).{call}")

    def _ask(self, code: str) -> dict[str, Any]:
        with self._conversation() as kernel:
            cell, in_time = self._execute(kernel, code, None)
            if not in_time:
                self._interrupt(kernel, cell, "")
        seen = self._seen(cell)
        reply = cell.reply or {}
        if self.cleanup_failure is not None:
            return seen
        if reply.get("ename") == EpisodeLeftovers.__name__:
            raise EpisodeLeftovers(reply["evalue"])
        if reply.get("status") != "ok":
            self._check_open()
            raise PayloadError(f"the kernel could not begin or end the episode: {one_line(reply)}")
        return seen

    # -- cells

    def run(self, code: str, timeout_s: float | None) -> Ran:
        """Run a cell of the model's, and interrupt it when its time is up.

        Raises:
            KernelDied: the kernel died, or did not end the cell and was killed.
            RuntimeError: there is no kernel, or `wake` was called meanwhile.
        """
        began = time.monotonic()
        with self._conversation() as kernel:
            until = None if timeout_s is None else began + timeout_s
            cell, in_time = self._execute(kernel, code, until, {"rlm": {"model_driven": True}})
            if not in_time:
                self._interrupt(kernel, cell, "" if timeout_s is None else f" after timeout_s={timeout_s:g}")
        took = time.monotonic() - began
        seen = self._seen(cell)
        exception = cell.exception
        if not in_time:
            self._check_open()
            if cell.reply is not None and cell.reply.get("ename") in ("KeyboardInterrupt", "CancelledError"):
                exception = (
                    f"ExecutionTimeout: the code was interrupted because it ran longer than timeout_s={timeout_s:g}"
                )
        return Ran(seen, cell.stdout, cell.stderr, exception, took)

    def snapshot(self, names: list[str]) -> dict[str, str]:
        """Return the reprs of variables. Code of the user's runs for that, so it is bounded in time."""
        if not names:
            return {}
        with self._conversation() as kernel:
            until = time.monotonic() + _SNAPSHOT_S
            cell, in_time = self._execute(kernel, "", until, expressions={"found": f"__rlm__.snapshot({names!r})"})
            if not in_time:
                self._interrupt(kernel, cell, "")
        found = (cell.reply or {}).get("user_expressions", {}).get("found", {})
        snapshot: dict[str, str] = found.get("data", {}).get("application/json", {})
        return snapshot

    def _execute(
        self,
        kernel: KernelProcess,
        code: str,
        until: float | None,
        metadata: Mapping[str, Any] | None = None,
        expressions: Mapping[str, str] | None = None,
    ) -> tuple[CellOutput, bool]:
        """Send a cell (one of the model's if it has metadata, else a silent one of ours), and take in what comes of it.

        Ctrl-C interrupts it, from the moment at which it may be on its way: it may run before we have begun to wait for it.

        Returns:
            the cell, and whether it has ended; it has not if the time was up, or `wake` was called.
        """
        content = {
            "code": code,
            "silent": metadata is None,
            "store_history": metadata is not None,
            "user_expressions": dict(expressions or {}),
            "allow_stdin": False,
            "stop_on_error": False,
        }
        request = kernel.message("execute_request", content, metadata)
        cell = CellOutput(request["header"]["msg_id"], self._output_limit, is_silent=metadata is None)
        try:
            kernel.send_message("shell", request)
            return cell, self._converse(kernel, cell, until)
        except KeyboardInterrupt as error:
            self._interrupt(kernel, cell, "")
            raise _SettledInterrupt from error

    def _converse(
        self, kernel: KernelProcess, cell: CellOutput, until: float | None, *, wakes: bool = True, begun: bool = False
    ) -> bool:
        """Take in what comes of a cell, to its end, or until the kernel has begun it.

        Returns:
            whether it has come to that; it has not if the time was up, or `wake` was called.
        """
        while cell.reply is None:
            if begun and cell.has_begun:
                return True
            if (wakes and self._woken) or (until is not None and time.monotonic() >= until):
                return False
            for received in kernel.receive(until, wakes=wakes):
                cell.take(*received)
        give_up_at = time.monotonic() + _IDLE_S
        while not cell.is_idle and time.monotonic() < give_up_at:
            for received in kernel.receive(give_up_at):
                cell.take(*received)
        return True

    def _interrupt(self, kernel: KernelProcess, cell: CellOutput, after: str) -> None:
        """Interrupt a cell, as the stop button does. A second request skips the graces; after that the kernel is given up.

        Raises:
            KernelDied: the cell does not end.
        """
        half_s = self._patience_s / 2
        # The control channel is faster: what has not begun yet cannot be interrupted.
        if self._converse(kernel, cell, time.monotonic() + half_s, wakes=False, begun=True) and cell.reply is not None:
            return
        for _ in range(2):
            kernel.send("control", "interrupt_request", {})
            if self._converse(kernel, cell, time.monotonic() + half_s, wakes=False):
                return
        raise KernelDied(
            f"the code was interrupted{after}, but went on for {self._patience_s:g} s more: the kernel (pid {kernel.pid}) was killed"
        )

    def _seen(self, cell: CellOutput) -> dict[str, Any]:
        seen = cell.metadata.get("rlm")
        if not isinstance(seen, dict):
            raise ConfigurationError("kernel_name", self._command.name, "is no RLM kernel: its replies have no `rlm`")
        failure = seen.get("cleanup_failure")
        # The kernel refuses to run code until a later attempt confirms.
        self.cleanup_failure = failure and ChildCleanupError(failure["message"], tuple(failure["survivors"]))
        return seen

    # -- the kernel

    def _start(self) -> KernelProcess:
        self.stop()
        self._check_open()
        command = self._command
        argv, spec_env = command.spec()
        self._kernel = kernel = KernelProcess(
            argv,
            [*command.arguments, "--HistoryManager.hist_file=:memory:"],  # many kernels would wait for one history
            env={**os.environ, **spec_env, **command.env},
            cwd=command.cwd,
            wake_fd=self._wake_r,
        )
        self.cleanup_failure = None
        with self._conversation():
            kernel.wait_until_ready(command.startup_timeout_s)
        return kernel

    @contextlib.contextmanager
    def _conversation(self) -> Iterator[KernelProcess]:
        """Talk to the kernel. If the conversation breaks off, the kernel is ended."""
        self._check_open()
        kernel = self._kernel
        if kernel is None:
            raise RuntimeError("there is no kernel: call reset(...) first")
        try:
            yield kernel
        except _SettledInterrupt:
            raise
        except BaseException as error:
            self._kernel = None
            kernel.stop(0.0)
            if isinstance(error, KernelDied):
                raise KernelDied(f"{error}\nCall reset(...): it starts another kernel.") from None
            raise

    def _check_open(self) -> None:
        if self._woken:
            raise RuntimeError("the environment was closed meanwhile; make a new one")

    def stop(self) -> None:
        """End the kernel, and return when it and everything that came from it are gone.

        Raises:
            ChildCleanupError: that could not be confirmed.
        """
        kernel, self._kernel = self._kernel, None
        survivors = () if kernel is None else kernel.stop(self._patience_s)
        if survivors:
            raise ChildCleanupError(f"could not confirm the exit of pid {', '.join(map(str, survivors))}", survivors)

    def wake(self) -> None:
        """End the call that is under way, and refuse later ones. From any thread; may be called twice."""
        with self._waking:
            self._woken = True
            if self._wake_w >= 0:
                os.close(self._wake_w)  # the end of the pipe is what wakes
                self._wake_w = -1

    def release(self) -> None:
        """End the kernel and give everything back. In a process that was forked from the owner it is somebody else's.

        Raises:
            ChildCleanupError: see `stop`.
        """
        if os.getpid() != self._owner:
            return
        self.wake()
        try:
            self.stop()
        finally:
            fd, self._wake_r = self._wake_r, -1
            if fd >= 0:
                os.close(fd)
