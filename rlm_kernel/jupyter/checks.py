"""What ``rlm-kernel doctor`` looks at. Each check looks at one thing, and gives what it found and what to do about it.

Who runs it: the main thread of the command. Nothing is changed: what a check needs (a file, a child) it makes in a
directory of its own, and takes away. A check that itself breaks is a finding, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

from rlm_kernel._version import __version__
from rlm_kernel.children import posix
from rlm_kernel.children.orphans import find_orphans
from rlm_kernel.credentials import redact, secret_values
from rlm_kernel.errors import ConfigurationError
from rlm_kernel.jupyter.install import KERNEL_NAME, PROVISIONER_NAME
from rlm_kernel.session.config import RLM, Settings
from rlm_kernel.session.rundir import runs_root

_LOOK_S = 20.0
"""Seconds for another interpreter to import the package, and for the child to answer."""

_MIN_FREE_BYTES = 200 << 20
_MIN_FDS = 256
"""Descriptors that a kernel with the default of eight children at once and some hundred kept contexts is comfortable with."""

_MIN_PROCESSES = 64

_SHOWN_PACKAGES = ("ipykernel", "ipython", "jupyter-client", "openai")


class State(StrEnum):
    """How a finding is to be taken."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes:
        check: what was looked at.
        state: only a problem makes the command fail.
        found: what there is.
        mend: what to do about it; empty if nothing is to be done.
    """

    check: str
    state: State
    found: str
    mend: str = ""


Check = Callable[[], Iterator[Finding]]


def ok(check: str, found: str) -> Finding:
    return Finding(check, State.OK, found)


def note(check: str, found: str, mend: str) -> Finding:
    return Finding(check, State.NOTE, found, mend)


def problem(check: str, found: str, mend: str) -> Finding:
    return Finding(check, State.PROBLEM, found, mend)


def carry_out(checks: Mapping[str, Check]) -> Iterator[Finding]:
    """Run checks one after the other. What one raises is its finding; no secret of the environment is in any of them."""
    secrets = secret_values(os.environ)
    for name, check in checks.items():
        try:
            found = list(check())
        except Exception as error:
            found = [problem(name, f"this check broke: {type(error).__name__}: {error}", "please report it as a bug")]
        for finding in found:
            yield Finding(finding.check, finding.state, redact(finding.found, secrets), redact(finding.mend, secrets))


# -- what is installed


def check_versions() -> Iterator[Finding]:
    """Compare what is installed with what the package asks for."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    python = ".".join(map(str, sys.version_info[:3]))
    try:
        about = metadata.metadata("rlm-kernel")
        wanted = [Requirement(text) for text in metadata.requires("rlm-kernel") or ()]
    except metadata.PackageNotFoundError:
        yield note(
            "versions", f"rlm-kernel {__version__} is not installed, only importable", "`pip install .` in its checkout"
        )
        return
    if not SpecifierSet(about["Requires-Python"] or "").contains(python, prereleases=True):
        yield problem("versions", f"Python {python}", f"Python {about['Requires-Python']} is needed")
    shown = [f"rlm-kernel {__version__}", f"Python {python}"]
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        asked = f"{requirement.name}{requirement.specifier}"
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield problem("versions", f"{requirement.name} is missing", f"`pip install '{asked}'`")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield problem(
                "versions", f"{requirement.name} {version} is installed", f"`pip install --upgrade '{asked}'`"
            )
        elif requirement.name.replace("_", "-") in _SHOWN_PACKAGES:
            shown.append(f"{requirement.name} {version}")
    yield ok("versions", ", ".join(shown))


def check_kernelspecs() -> Iterator[Finding]:
    """Look at every kernelspec that starts this kernel: found by Jupyter, and its interpreter can import this version."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    manager = KernelSpecManager()
    ours = False
    for name, directory in sorted(manager.find_kernel_specs().items()):
        try:
            spec = manager.get_kernel_spec(name)
        except (NoSuchKernel, ValueError, OSError):
            continue  # broken, or hidden: not one that anybody here could start
        if "rlm_kernel" not in spec.argv:
            continue
        ours = True
        check = f"kernelspec {name}"
        mend = f"`rlm-kernel install --user --name {name}` with the right Python"
        wrong = _wrong_interpreter(spec.argv[0])
        if wrong:
            yield problem(check, f"{directory}: {wrong}", mend)
        else:
            yield ok(check, f"{directory} ({spec.argv[0]})")
    if not ours:
        mend = "`rlm-kernel install --user`, or `--sys-prefix` for this environment"
        yield problem(
            "kernelspec", f"Jupyter finds no kernelspec that starts rlm-kernel (such as {KERNEL_NAME!r})", mend
        )


def _wrong_interpreter(command: str) -> str:
    """Say what is wrong with the interpreter that a kernelspec names; empty if nothing is."""
    # jupyter_client takes these three for the interpreter that it runs in itself.
    own = command in ("python", f"python{sys.version_info[0]}", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    path = sys.executable if own else shutil.which(command)
    if path is None:
        return f"{command} is not there, or cannot be executed"
    if path == sys.executable:
        return ""
    program = "import rlm_kernel; print(rlm_kernel.__version__)"
    try:
        done = subprocess.run(
            [path, "-c", program],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=_LOOK_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} does not run: {error}"
    if done.returncode != 0:
        return f"{path} cannot import rlm_kernel: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}"
    version = done.stdout.strip()
    return "" if version == __version__ else f"{path} has rlm-kernel {version}, this is {__version__}"


def check_provisioner() -> Iterator[Finding]:
    """Tell whether Jupyter can use the provisioner. It is optional, so its absence is no problem."""
    found = [
        point
        for point in metadata.entry_points(group="jupyter_client.kernel_provisioners")
        if point.name == PROVISIONER_NAME
    ]
    if not found:
        yield note(
            "provisioner",
            f"{PROVISIONER_NAME} is not registered",
            "`pip install` rlm-kernel again, if you want to use it",
        )
    else:
        found[0].load()
        yield ok(
            "provisioner", f"{PROVISIONER_NAME} is registered (for kernelspecs of `rlm-kernel install --provisioner`)"
        )


# -- what the platform offers


def check_platform() -> Iterator[Finding]:
    """Tell what there is for watching and containing processes."""
    if not posix.CAN_FORK:
        yield problem("platform", f"{sys.platform} cannot fork", "background children need Linux, macOS or WSL")
        return
    pidfd = posix.open_pidfd(os.getpid())
    if pidfd is not None:
        os.close(pidfd)
    facts = [
        ("process descriptors (pidfd)", pidfd is not None, "exits are confirmed by the nursery alone"),
        (
            "parent-death signal and subreaper",
            posix.IS_LINUX,
            "a killed nursery leaves its children to end by themselves",
        ),
        ("process list (/proc)", os.path.isdir("/proc/self"), "what daemonized itself away cannot be found"),
    ]
    for name, there, without in facts:
        yield ok(name, "yes") if there else note(name, "no", f"{without}; Linux from 5.3 on has it")


def check_limits() -> Iterator[Finding]:
    """Compare what this process may open and start with what a kernel with children needs."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    check = "open files"
    if soft != resource.RLIM_INFINITY and soft < _MIN_FDS:
        yield problem(
            check, f"at most {soft}", f"`ulimit -n {4 * _MIN_FDS}` before Jupyter starts, or LimitNOFILE= in its unit"
        )
    else:
        yield ok(check, "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}")
    bounds = {"ulimit -u": resource.getrlimit(resource.RLIMIT_NPROC)[0] if hasattr(resource, "RLIMIT_NPROC") else -1}
    bounds["pids.max of the container"] = _cgroup_pids()
    small = [f"{name}: {bound}" for name, bound in bounds.items() if 0 <= bound < _MIN_PROCESSES]
    if small:
        yield problem(
            "processes", ", ".join(small), f"allow {4 * _MIN_PROCESSES} or more, or lower max_concurrent_children"
        )
    else:
        yield ok(
            "processes", ", ".join(f"{name}: {bound}" for name, bound in bounds.items() if bound >= 0) or "no limit"
        )


def _cgroup_pids() -> int:
    """Return how many processes this control group may have, -1 if there is no limit or none to be read."""
    try:
        return int(Path("/sys/fs/cgroup/pids.max").read_text("ascii"))
    except (OSError, ValueError):
        return -1


# -- how it is configured


def configured() -> tuple[Settings, dict[str, Any], ConfigurationError | None]:
    """Read the settings like a kernel that is started from here.

    Returns:
        the settings, what config files say, and what is wrong with a value.
    """
    from IPython.core.application import ENV_CONFIG_DIRS, SYSTEM_CONFIG_DIRS
    from traitlets.config import Config
    from traitlets.config.loader import ConfigFileNotFound, PyFileConfigLoader

    config = Config()
    # Not `IPython.paths.get_ipython_dir`, which makes the directory.
    profile = Path(os.environ.get("IPYTHONDIR") or "~/.ipython").expanduser() / "profile_default"
    for directory in [*SYSTEM_CONFIG_DIRS, *ENV_CONFIG_DIRS, str(profile)]:
        for name in ("ipython_config.py", "ipython_kernel_config.py"):
            try:
                config.merge(PyFileConfigLoader(name, path=directory).load_config())
            except ConfigFileNotFound:
                pass
    settings, error = Settings.read(RLM(config=config))
    return settings, dict(config.RLM), error


def check_model() -> Iterator[Finding]:
    """Tell which model is configured, by what, and whether its key is there. The key itself is never shown."""
    from rlm_kernel.clients.specs import PROVIDERS, parse_spec

    settings, from_files, error = configured()
    if error is not None:
        yield problem(
            "settings", str(error), "correct it where it is set (environment, or c.RLM in ipython_kernel_config.py)"
        )
    sources = {"RLM_MODEL": "model", "RLM_CLIENT_FACTORY": "client_factory"}
    source = next((variable for variable in reversed(sources) if os.environ.get(variable, "").strip()), None)
    source = source or next((f"c.RLM.{name}" for name in ("client_factory", "model") if name in from_files), "")
    if settings.factory is None:
        mend = "set RLM_MODEL before the kernel starts, or type `%rlm model openai/gpt-5-mini` (`%rlm model demo` works offline)"
        yield note("model", "none is configured", mend)
        return
    if settings["client_factory"] is not None:
        yield ok("model", f"client_factory={settings['client_factory']!r} (from {source})")
        return
    spec = parse_spec(settings["model"])
    provider = PROVIDERS.get(spec.provider)
    if provider is None:
        yield ok("model", f"{spec} (from {source})")
        return
    key = next((name for name in provider.key_variables if os.environ.get(name)), None)
    if key is None and provider.needs_key and not os.environ.get(provider.url_variable):
        yield problem(
            "model",
            f"{spec} (from {source}), without a key",
            f"set {provider.key_variables[0]} before the kernel starts",
        )
    else:
        yield ok("model", f"{spec} (from {source}; {f'{key} is set' if key else 'no key is set'})")


def check_run_dir() -> Iterator[Finding]:
    """Tell whether runs can be written down, and whether there is room for them."""
    settings, _, _ = configured()
    root = runs_root(settings["run_dir"])
    there = next(path for path in (root, *root.absolute().parents) if path.exists())
    mend = "set RLM_RUN_DIR to a directory that you may write to"
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        yield problem("run directory", f"{root}: {error.strerror or error}", mend)
        return
    free = shutil.disk_usage(there).free
    if free < _MIN_FREE_BYTES:
        yield problem("run directory", f"{root}: {free >> 20} MiB free", f"`rlm-kernel runs prune`, or {mend}")
    else:
        yield ok(
            "run directory", f"{root} ({free >> 30} GiB free)" if free >> 30 else f"{root} ({free >> 20} MiB free)"
        )


# -- what happens in real


def check_child() -> Iterator[Finding]:
    """Start a child with the demo model, have it answer, and confirm that it and its nursery are gone."""
    from rlm_kernel.clients.demo import sample_text
    from rlm_kernel.session.session import RLMSession

    mend = "see the error; the file nursery.log in the run directory of a kernel may say more"
    with tempfile.TemporaryDirectory(prefix="rlm-doctor-") as folder:
        namespace: dict[str, Any] = {}
        session = RLMSession(Settings({"model": "demo", "run_dir": folder}, environ={}), namespace)
        try:
            began = time.monotonic()
            handle = namespace["rlm_query"]("How often does 'comet' occur?", context=sample_text(), blocking=False)
            status = handle.wait(_LOOK_S)
            took = time.monotonic() - began
        finally:
            report = session.shutdown()
    if status.result is None:
        yield problem("child", f"{status.state} after {took:.1f} s: {status.error or 'no answer in time'}", mend)
    elif not (report.ok and status.exited):
        yield problem("child", f"answered, but is not confirmed gone: {report.summary()}", mend)
    else:
        yield ok(
            "child",
            f"started and answered in {took:.1f} s, and is confirmed gone (pid {status.pid}, exit code {status.exit_code})",
        )


def check_leftovers() -> Iterator[Finding]:
    """Look for processes that outlived their kernel and its nursery."""
    orphans = find_orphans()
    for orphan in orphans:
        yield problem(
            "left behind",
            f"pid {orphan.pid}  {orphan.command}",
            "`rlm-kernel doctor --sweep` kills what is left behind",
        )
    if not orphans:
        yield ok("left behind", "nothing is left behind")


CHECKS: dict[str, Check] = {
    "versions": check_versions,
    "kernelspec": check_kernelspecs,
    "provisioner": check_provisioner,
    "platform": check_platform,
    "limits": check_limits,
    "model": check_model,
    "run directory": check_run_dir,
    "left behind": check_leftovers,
    "child": check_child,
}
