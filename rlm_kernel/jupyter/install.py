"""Install the kernelspec: `install`, and the ``rlm-kernel install`` command around it.

``kernelspec/`` at the top of the source tree is the only source of ``kernel.json`` and the logos. The build puts it
into the wheel twice: as shared data, so that ``pip install`` alone registers the kernel, and beside the package's
modules, where this module finds it. A checkout (also with ``pip install -e``) is read directly.

The shared ``kernel.json`` names its interpreter ``python``, which jupyter_client replaces by the interpreter of whoever
starts the kernel: right inside one environment. What `install` writes names this interpreter by its path, so that
it works from any other environment, too.

With the provisioner (see `provisioner`) a kernelspec is hidden from every Jupyter whose environment lacks this package. So it
never takes the place of the plain one: it has a name of its own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlm_kernel.errors import ConfigurationError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from jupyter_client.kernelspec import KernelSpecManager

KERNEL_NAME = "rlm"
"""The name under which ``pip install`` registers the kernel."""

PROVISIONED_NAME = "rlm-provisioned"
"""The name of a kernelspec with the provisioner, unless another is given."""

PROVISIONER_NAME = "rlm-provisioner"
"""How kernelspecs name the provisioner: its entry point."""

_PACKAGE = Path(__file__).resolve().parents[1]
_RESOURCE_DIRS = (_PACKAGE / "kernelspec_resources", _PACKAGE.parent / "kernelspec")
"""Where the resources are in an installed wheel, and in a checkout."""


def resource_dir() -> Path:
    """Return the directory that holds ``kernel.json`` and the logos.

    Raises:
        FileNotFoundError: the package was installed without them.
    """
    for directory in _RESOURCE_DIRS:
        if (directory / "kernel.json").is_file():
            return directory
    looked = " and ".join(map(str, _RESOURCE_DIRS))
    raise FileNotFoundError(f"no kernel.json in {looked}: install rlm-kernel again from a wheel or a complete checkout")


def kernel_spec(
    *, display_name: str | None = None, env: Mapping[str, str] | None = None, provisioner: bool = False
) -> dict[str, Any]:
    """Return the content of ``kernel.json`` for this interpreter.

    Args:
        display_name: what front ends show; by default what the packaged kernelspec says.
        env: variables that the kernel starts with, besides those of the process that starts it.
        provisioner: whether Jupyter is to start it with `RLMProvisioner`.
    """
    spec: dict[str, Any] = json.loads((resource_dir() / "kernel.json").read_text(encoding="utf-8"))
    spec["argv"] = [sys.executable, *spec["argv"][1:]]
    if display_name:
        spec["display_name"] = display_name
    if env:
        spec["env"] = dict(env)
    if provisioner:
        spec["metadata"]["kernel_provisioner"] = {"provisioner_name": PROVISIONER_NAME}
    return spec


def install(
    user: bool = False,
    prefix: str | None = None,
    sys_prefix: bool = False,
    name: str | None = None,
    display_name: str | None = None,
    env: Mapping[str, str] | None = None,
    *,
    provisioner: bool = False,
    manager: KernelSpecManager | None = None,
) -> str:
    """Install a kernelspec that starts the kernel with this interpreter, in place of one of the same name.

    Without ``user``, ``prefix`` or ``sys_prefix`` it goes where every user of the machine finds it.

    Args:
        user: install for the current user.
        prefix: install into ``PREFIX/share/jupyter/kernels``.
        sys_prefix: install into this interpreter's environment.
        name: the kernel's name; Jupyter turns it into lower case. By default "rlm", or "rlm-provisioned" with the provisioner.
        display_name: what front ends show; by default "Python 3 (RLM)", or the name if it is not the default one.
        env: variables that the kernel starts with.
        provisioner: whether Jupyter is to start it with `RLMProvisioner`.
        manager: who knows Jupyter's directories; by default a new one with the user's settings.

    Returns:
        the directory that was written.

    Raises:
        ConfigurationError: two places were named, the kernel's or a variable's name is impossible, or the name with
            the provisioner is that of the plain kernelspec.
        OSError: the place cannot be written to.
    """
    _check(user, prefix, sys_prefix, env or {})
    if name is None:
        name = PROVISIONED_NAME if provisioner else KERNEL_NAME
    if provisioner and name.lower() == KERNEL_NAME:
        reason = "the plain kernelspec keeps this name, for servers that lack this package; give another one"
        raise ConfigurationError("name", name, reason)
    if display_name is None and name != KERNEL_NAME:
        # Two entries "Python 3 (RLM)" in a launcher could not be told apart.
        display_name = "Python 3 (RLM, provisioned)" if name == PROVISIONED_NAME else name
    if manager is None:
        from jupyter_client.kernelspec import KernelSpecManager

        manager = KernelSpecManager()
    with tempfile.TemporaryDirectory(prefix="rlm-kernelspec-") as staging:
        # One level down: the directory's mode is copied, too, and a temporary directory is closed to other users.
        source = Path(staging) / KERNEL_NAME
        _stage(source, kernel_spec(display_name=display_name, env=env, provisioner=provisioner))
        try:
            return manager.install_kernel_spec(
                str(source), kernel_name=name, user=user, prefix=sys.prefix if sys_prefix else prefix
            )
        except ValueError as error:  # the manager's word on a name; where it shall go has been checked above
            raise ConfigurationError("name", name, str(error)) from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rlm-kernel install``, which are those of ``ipykernel install`` where both have them."""
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--user", action="store_true", help="install for the current user, not for the whole machine")
    place.add_argument("--sys-prefix", action="store_true", help="install into this Python's environment")
    place.add_argument("--prefix", metavar="P", help="install into P/share/jupyter/kernels")
    parser.add_argument(
        "--name",
        metavar="N",
        help=f"the kernel's name (default: {KERNEL_NAME}; with --provisioner: {PROVISIONED_NAME}, as the name "
        f"{KERNEL_NAME} is kept for the plain kernelspec)",
    )
    parser.add_argument("--display-name", metavar="D", help="what front ends show (default: Python 3 (RLM))")
    parser.add_argument(
        "--env",
        nargs=2,
        action="append",
        default=[],
        metavar=("K", "V"),
        help="start the kernel with the environment variable K set to V; may be repeated",
    )
    parser.add_argument(
        "--provisioner",
        action="store_true",
        help="have Jupyter wait for the grace periods that the environment sets (RLM_…_GRACE_S), and, when it has killed the "
        "kernel, until its children are gone; works where rlm-kernel is installed beside Jupyter, elsewhere "
        "the entry is not offered",
    )


def run(args: argparse.Namespace) -> int:
    """Carry out ``rlm-kernel install``.

    Args:
        args: what the parser of `add_arguments` returned.

    Returns:
        the exit code: 0, or 1 if the place cannot be written to.

    Raises:
        ConfigurationError: see `install`.
    """
    try:
        destination = install(
            user=args.user,
            prefix=args.prefix,
            sys_prefix=args.sys_prefix,
            name=args.name,
            display_name=args.display_name,
            env=dict(args.env),
            provisioner=args.provisioner,
        )
    except PermissionError as error:
        where = error.filename or error
        print(
            f"rlm-kernel: not permitted to write {where}.\n"
            "Try --user (only for you) or --sys-prefix (into this Python's environment).",
            file=sys.stderr,
        )
        return 1
    print(f"Installed kernelspec {Path(destination).name} in {destination}")
    return 0


def _check(user: bool, prefix: str | None, sys_prefix: bool, env: Mapping[str, str]) -> None:
    if user + sys_prefix + (prefix is not None) > 1:
        raise ConfigurationError("prefix", prefix, "give only one of user, sys_prefix and prefix")
    if prefix is not None and not prefix:
        raise ConfigurationError("prefix", prefix, "must name a directory")
    for variable in env:
        if not variable or "=" in variable:
            raise ConfigurationError("env", variable, "a variable's name must not be empty or contain '='")


def _stage(target: Path, spec: dict[str, Any]) -> None:
    """Write a complete kernelspec directory: the packaged logos, and this ``kernel.json``."""
    target.mkdir()
    for resource in sorted(resource_dir().iterdir()):
        if resource.is_file() and resource.name != "kernel.json":
            # Content only: a resource from a read-only package directory must not make the copy read-only.
            (target / resource.name).write_bytes(resource.read_bytes())
    (target / "kernel.json").write_text(json.dumps(spec, indent=2) + "\n", encoding="utf-8")
