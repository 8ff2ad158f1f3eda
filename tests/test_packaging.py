"""What `pip install` brings: the wheel and the sdist are built once and looked into."""

from __future__ import annotations

import ast
import configparser
import email.message
import email.parser
import io
import json
import re
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from rlm_kernel._version import __version__

CHECKOUT = Path(__file__).resolve().parents[1]
KERNELSPEC_FILES = {"kernel.json", "logo-32x32.png", "logo-64x64.png", "logo-svg.svg"}
SHARED = f"rlm_kernel-{__version__}.data/data/share/jupyter/kernels/rlm"
DIST_INFO = f"rlm_kernel-{__version__}.dist-info"


def wheel_files(directory: Path, version: str) -> dict[str, bytes]:
    (wheel,) = WheelBuilder(str(CHECKOUT)).build(directory=str(directory), versions=[version])
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The content of the wheel by path."""
    return wheel_files(tmp_path_factory.mktemp("wheel"), "standard")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The paths in the sdist, below its top directory."""
    (path,) = SdistBuilder(str(CHECKOUT)).build(directory=str(tmp_path_factory.mktemp("sdist")), versions=["standard"])
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="module")
def wheel_metadata(wheel: dict[str, bytes]) -> email.message.Message:
    return email.parser.BytesParser().parsebytes(wheel[f"{DIST_INFO}/METADATA"])


def package_files() -> dict[str, bytes]:
    """The package's files in the checkout, by path."""
    paths = (
        path for path in (CHECKOUT / "rlm_kernel").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    return {path.relative_to(CHECKOUT).as_posix(): path.read_bytes() for path in paths if path.suffix != ".pyc"}


def test_pip_install_alone_registers_the_kernelspec(wheel: dict[str, bytes]) -> None:
    found = {name.removeprefix(f"{SHARED}/"): content for name, content in wheel.items() if name.startswith(SHARED)}
    assert found == {name: (CHECKOUT / "kernelspec" / name).read_bytes() for name in KERNELSPEC_FILES}
    argv = json.loads(found["kernel.json"])["argv"]
    assert argv == ["python", "-m", "rlm_kernel", "-f", "{connection_file}"]


def test_an_editable_install_registers_the_kernelspec_too(tmp_path: Path) -> None:
    assert {f"{SHARED}/{name}" for name in KERNELSPEC_FILES} <= set(wheel_files(tmp_path, "editable"))


def test_the_install_command_finds_its_resources_in_the_wheel(wheel: dict[str, bytes]) -> None:
    for name in KERNELSPEC_FILES:
        assert wheel[f"rlm_kernel/kernelspec_resources/{name}"] == wheel[f"{SHARED}/{name}"]


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: dict[str, bytes]) -> None:
    """The tests import the checkout, so this is what makes them speak for what gets installed."""
    extra = ("rlm_kernel/kernelspec_resources/", f"{SHARED}/", f"{DIST_INFO}/", "rlm.py")
    assert {name: content for name, content in wheel.items() if not name.startswith(extra)} == package_files()
    assert "rlm_kernel/py.typed" in wheel


def test_the_short_name_is_one_module_so_that_no_other_distribution_loses_its_package(wheel: dict[str, bytes]) -> None:
    assert wheel["rlm.py"] == (CHECKOUT / "rlm.py").read_bytes()
    assert [name for name in wheel if name.startswith("rlm/")] == []


def test_both_commands_start_the_same_function(wheel: dict[str, bytes]) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(wheel[f"{DIST_INFO}/entry_points.txt"].decode())
    scripts = dict(parser["console_scripts"])
    assert scripts == {"rlm-kernel": "rlm_kernel.cli:main", "jupyter-rlm": "rlm_kernel.cli:main"}
    from rlm_kernel.cli import main

    assert callable(main)


def test_the_metadata_say_version_licence_and_supported_pythons(
    wheel: dict[str, bytes], wheel_metadata: email.message.Message
) -> None:
    assert wheel_metadata["Name"] == "rlm-kernel"
    assert wheel_metadata["Version"] == __version__
    assert wheel_metadata["Requires-Python"] == ">=3.11"
    assert wheel_metadata["License-Expression"] == "BSD-3-Clause"
    assert wheel[f"{DIST_INFO}/licenses/LICENSE"] == (CHECKOUT / "LICENSE").read_bytes()
    assert set(wheel_metadata.get_all("Provides-Extra") or ()) >= {"litellm", "test", "dev"}


def test_the_changelog_knows_this_version_or_what_comes_next() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (CHECKOUT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] in ("Unreleased", __version__)


def test_the_sdist_can_be_built_from_and_tested(sdist: set[str]) -> None:
    needed = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "tests/test_packaging.py", "mkdocs.yml"}
    needed |= {"docs/index.md", "docs/hooks/repository_pages.py", "examples/README.md", "notebooks/quickstart.ipynb"}
    assert needed | {"rlm.py"} | {f"kernelspec/{name}" for name in KERNELSPEC_FILES} | set(package_files()) <= sdist


# What the code imports is what the metadata ask for.

DISTRIBUTIONS = {"IPython": "ipython"}
"""Distributions whose module has another name."""

BROUGHT_BY = {
    "comm": "ipykernel",
    "httpx2": "openai",
    "jsonschema_specifications": "jsonschema",
    "jupyter_core": "jupyter_client",
    "packaging": "ipykernel",
    "pydantic_core": "pydantic",
    "referencing": "jsonschema",
    "tornado": "jupyter_client",
    "zmq": "jupyter_client",
}
"""Modules that may be imported without being asked for, because the named dependency is built on them."""

OPTIONAL = {"litellm", "matplotlib", "resource"}
"""Modules that an extra brings, or that not every platform has: imported where they are needed only."""


def third_party_imports() -> dict[str, str]:
    """Return the imported modules outside the package and the standard library, each with one file."""
    found: dict[str, str] = {}
    for path in sorted((CHECKOUT / "rlm_kernel").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names | {"rlm_kernel"}:
                    found.setdefault(top, f"{path.relative_to(CHECKOUT)}")
    return found


def required_names(requirements: list[str]) -> set[str]:
    """Return the normalized names of the requirements that hold without an extra."""
    always = (each for each in requirements if "extra ==" not in each)
    return {re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", each, maxsplit=1)[0]).lower() for each in always}


def test_every_import_is_a_declared_dependency(wheel_metadata: email.message.Message) -> None:
    declared = required_names(wheel_metadata.get_all("Requires-Dist") or [])
    undeclared = {
        name: place
        for name, place in third_party_imports().items()
        if name not in OPTIONAL and name not in BROUGHT_BY
        if DISTRIBUTIONS.get(name, name).replace("_", "-") not in declared
    }
    assert undeclared == {}, "declare it in pyproject.toml, or say in this file who brings it"
    assert {"ipykernel", "jupyter-client"} <= declared, "the metadata were not read, so nothing was checked"


@pytest.mark.parametrize(("module", "bringer"), BROUGHT_BY.items())
def test_what_comes_along_really_does(module: str, bringer: str) -> None:
    brought = required_names(metadata.requires(bringer) or [])
    assert {"zmq": "pyzmq"}.get(module, module).replace("_", "-") in brought


def test_every_dependency_has_a_lower_bound() -> None:
    project: dict[str, Any] = tomllib.load(io.BytesIO((CHECKOUT / "pyproject.toml").read_bytes()))["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    assert [each for each in wanted if ">=" not in each and not each.startswith("rlm-kernel[")] == []
