"""Imports run one way: jupyter → session → { loop, environment, clients, children → wire } → values → errors."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGE = "rlm_kernel"

LAYERS: dict[str, tuple[str, ...]] = {
    "front door": ("",),
    "jupyter": ("jupyter", "jupyter.*", "cli", "__main__"),
    "session": ("session*", "child_run", "lifecycle*", "rundir", "config*", "export", "stored_runs"),
    "loop": ("loop", "loop.*"),
    "environment": ("environment", "environment.*"),
    "clients": ("clients", "clients.*"),
    "children": ("children", "children.*"),
    "wire": ("wire", "wire.*"),
    "low": ("values", "credentials", "final_text", "closing", "errors", "_version"),
}
"""Which modules (names below the package) form which layer. The front door is ``rlm_kernel/__init__.py``."""

ROOMS = {"loop", "environment", "clients", "children", "wire", "low"}

MAY_IMPORT: dict[str, set[str]] = {
    "front door": {"jupyter", "session", *ROOMS},
    "jupyter": {"front door", "jupyter", "session", *ROOMS},
    "session": {"session", *ROOMS},
    "loop": {"loop", "low"},
    "environment": {"environment", "low"},
    "clients": {"clients", "low"},
    "children": {"children", "wire", "low"},
    "wire": {"wire", "low"},
    "low": set(),
}
"""Which layers may import which. Inside "low", `LOW_MAY_IMPORT` decides."""

LOW_MAY_IMPORT: dict[str, set[str]] = {
    "values": {"errors"},
    "credentials": {"values", "errors"},
    "final_text": {"values", "errors"},
    "closing": set(),
    "errors": set(),
    "_version": set(),
}

FOR_TYPES_ANYWHERE = {"values", "errors"}
"""May be imported under ``if TYPE_CHECKING`` by everybody: errors carry values, which raise errors."""


@dataclass(frozen=True)
class Import:
    """One import statement's target inside the package: its name below it, the line, and whether only types need it."""

    target: str
    line: int
    types_only: bool


def imports_of(source: str, package: str, modules: set[str]) -> Iterator[Import]:
    """Find every import of this package in a module, at whatever depth it stands.

    Args:
        source: the module's text.
        package: the dotted name of the package that relative imports start from.
        modules: names below the package of all its modules, to tell ``from package import module`` from a name in it.
    """
    tree = ast.parse(source)
    types_only = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            targets = [
                f"{base}.{alias.name}" if f"{base}.{alias.name}".removeprefix(f"{PACKAGE}.") in modules else base
                for alias in node.names
            ]
        for target in dict.fromkeys(targets):
            if target == PACKAGE or target.startswith(f"{PACKAGE}."):
                below = target.removeprefix(PACKAGE).removeprefix(".")
                yield Import(below, getattr(node, "lineno", 0), node in types_only)


def layer_of(module: str) -> str | None:
    """Return the layer of a module (its name below the package); None if it has been given none."""
    for layer, patterns in LAYERS.items():
        if any(fnmatchcase(module, pattern) for pattern in patterns):
            return layer
    return None


def objection(module: str, found: Import) -> str | None:
    """Say what is wrong with one import; None if nothing is."""
    layer, target_layer = layer_of(module), layer_of(found.target)
    if layer is None or target_layer is None:
        return f"{module if layer is None else found.target}: belongs to no layer; add it to LAYERS"
    if found.types_only and found.target in FOR_TYPES_ANYWHERE:
        return None
    if layer == target_layer == "low":
        allowed = found.target in LOW_MAY_IMPORT[module]
    else:
        allowed = target_layer in MAY_IMPORT[layer]
    return None if allowed else f"{module}:{found.line} ({layer}) imports {found.target or PACKAGE} ({target_layer})"


def module_files() -> dict[str, Path]:
    """Return every module of the package by its name below it."""
    root = CHECKOUT / PACKAGE
    files = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def objections_in(source: str, module: str, *, is_package: bool, modules: set[str]) -> list[str]:
    name = f"{PACKAGE}.{module}".rstrip(".")
    package = name if is_package else name.rpartition(".")[0]
    found = [objection(module, each) for each in imports_of(source, package, modules)]
    return [each for each in found if each]


def test_every_module_belongs_to_a_layer() -> None:
    assert [module for module in module_files() if layer_of(module) is None] == []


def test_imports_run_one_way() -> None:
    files = module_files()
    assert "errors" in files, "the package was not found, so nothing was checked"
    problems = [
        problem
        for module, path in files.items()
        for problem in objections_in(
            path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py", modules=set(files)
        )
    ]
    assert problems == []


MODULES = {"", "errors", "values", "wire", "wire.messages", "children", "children.nursery", "clients.base", "session"}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("loop.runner", "from rlm_kernel.clients.base import Client"),
        ("loop.runner", "def f():\n    from rlm_kernel.clients import base"),
        ("loop.runner", "import rlm_kernel.environment.repl as repl"),
        ("loop.runner", "from ..clients.base import Client"),
        ("loop.runner", "from .. import session"),
        ("clients.base", "from rlm_kernel import values, session"),
        ("clients.base", "from rlm_kernel import __version__"),
        ("environment.repl", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rlm_kernel.loop import x"),
        ("children.nursery", "from rlm_kernel.session import Session"),
        ("wire.messages", "from rlm_kernel.children import nursery"),
        ("session", "from rlm_kernel.jupyter import magics"),
        ("values", "from rlm_kernel.credentials import looks_secret"),
        ("errors", "from rlm_kernel.values import ChildStatus"),
        ("loop.runner", "import rlm_kernel.nowhere"),
    ],
)
def test_a_wrong_direction_is_noticed(module: str, source: str) -> None:
    assert len(objections_in(source, module, is_package=False, modules=MODULES)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "errors",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rlm_kernel.values import ChildStatus",
        ),
        ("children.nursery", "from rlm_kernel.wire import messages\nfrom ..values import Usage\nfrom . import states"),
        ("session", "from rlm_kernel.loop.runner import R\nfrom .clients import base\nfrom .wire.messages import Stop"),
        ("jupyter.kernel", "from rlm_kernel import session, ManagedChildConfig"),
        ("clients.base", "import openai\nimport rlm_kernel_extras"),
    ],
)
def test_a_right_direction_passes(module: str, source: str) -> None:
    assert objections_in(source, module, is_package=False, modules=MODULES) == []


@pytest.mark.parametrize("module", ["rlm_kernel", "rlm_kernel.cli"])
def test_importing_the_front_door_or_the_command_loads_nothing_heavy(module: str) -> None:
    """`%load_ext`, `--help` and `from rlm_kernel import …` must not wait for what they may never use."""
    program = (
        f"import json, sys, {module}; print(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert PACKAGE in loaded
    assert loaded & {"IPython", "openai", "rich", "ipykernel", "pydantic"} == set()
