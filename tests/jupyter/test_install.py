"""`rlm_kernel.jupyter.install` and the command around it."""

from __future__ import annotations

import json
import os
import stat
import struct
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory

from rlm_kernel import cli
from rlm_kernel.errors import ConfigurationError
from rlm_kernel.jupyter import install as install_module
from rlm_kernel.jupyter.install import install

CHECKOUT = Path(__file__).resolve().parents[2]
SOURCE = CHECKOUT / "kernelspec"
FILES = {"kernel.json", "logo-32x32.png", "logo-64x64.png", "logo-svg.svg"}


@pytest.fixture(autouse=True)
def _own_jupyter_dirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep whoever runs the tests out of it: no test may read or write that person's Jupyter directories."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "user-data"))
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "user-config"))


def kernels(prefix: Path) -> Path:
    return prefix / "share" / "jupyter" / "kernels"


def load(directory: str | Path) -> dict[str, Any]:
    return json.loads((Path(directory) / "kernel.json").read_text(encoding="utf-8"))


def test_jupyter_finds_what_install_wrote_with_all_that_the_kernel_promises(tmp_path: Path) -> None:
    destination = install(prefix=str(tmp_path))

    assert Path(destination) == kernels(tmp_path) / "rlm"
    spec = KernelSpecManager(kernel_dirs=[str(kernels(tmp_path))]).get_kernel_spec("rlm")
    assert spec.argv == [sys.executable, "-m", "rlm_kernel", "-f", "{connection_file}"]
    assert spec.display_name == "Python 3 (RLM)"
    assert spec.language == "python"
    assert spec.interrupt_mode == "message"
    assert spec.metadata == {"debugger": True, "supported_encryption": ["curve"]}
    assert spec.env == {}


def test_installed_files_are_those_of_the_shared_data_but_for_the_interpreter(tmp_path: Path) -> None:
    destination = Path(install(prefix=str(tmp_path)))

    assert {path.name for path in destination.iterdir()} == {path.name for path in SOURCE.iterdir()} == FILES
    for name in FILES - {"kernel.json"}:
        assert (destination / name).read_bytes() == (SOURCE / name).read_bytes()
    shared = load(SOURCE)
    assert load(destination) == {**shared, "argv": [sys.executable, *shared["argv"][1:]]}


def test_jupyter_starts_the_shared_kernelspec_with_its_own_interpreter(tmp_path: Path) -> None:
    """`pip install` cannot write a path into shared data: jupyter_client must know the placeholder there."""
    kernels(tmp_path).mkdir(parents=True)
    (kernels(tmp_path) / "rlm").symlink_to(SOURCE)
    specs = KernelSpecManager(kernel_dirs=[str(kernels(tmp_path))])
    manager = KernelManager(kernel_name="rlm", kernel_spec_manager=specs, connection_file=str(tmp_path / "c.json"))

    assert manager.format_kernel_cmd() == [sys.executable, "-m", "rlm_kernel", "-f", str(tmp_path / "c.json")]


def test_logos_have_the_sizes_that_their_names_say() -> None:
    for size in (32, 64):
        header = (SOURCE / f"logo-{size}x{size}.png").read_bytes()[:24]
        assert header.startswith(b"\x89PNG\r\n\x1a\n")
        assert struct.unpack(">II", header[16:24]) == (size, size)
    assert ElementTree.parse(SOURCE / "logo-svg.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_user_and_sys_prefix_name_the_places_that_jupyter_looks_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))

    assert Path(install(user=True)) == tmp_path / "user-data" / "kernels" / "rlm"
    assert Path(install(sys_prefix=True)) == kernels(tmp_path / "env") / "rlm"


def test_without_a_place_the_whole_machine_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jupyter_client.kernelspec.SYSTEM_JUPYTER_PATH", [str(tmp_path / "system")])

    assert Path(install()) == tmp_path / "system" / "kernels" / "rlm"


def test_a_further_kernel_has_its_own_name_and_environment(tmp_path: Path) -> None:
    install(prefix=str(tmp_path))
    install(prefix=str(tmp_path), name="Big", env={"RLM_MODEL": "demo", "EMPTY": ""})
    install(prefix=str(tmp_path), name="shown", display_name="A name, with spaces")

    specs = KernelSpecManager(kernel_dirs=[str(kernels(tmp_path))])
    assert specs.get_kernel_spec("rlm").display_name == "Python 3 (RLM)"
    big = specs.get_kernel_spec("big")  # Jupyter's names are lower case
    assert (big.display_name, big.env) == ("Big", {"RLM_MODEL": "demo", "EMPTY": ""})
    assert specs.get_kernel_spec("shown").display_name == "A name, with spaces"


def test_with_the_provisioner_it_stands_beside_the_plain_one_under_a_name_of_its_own(tmp_path: Path) -> None:
    plain = Path(install(prefix=str(tmp_path)))
    provisioned = Path(install(prefix=str(tmp_path), provisioner=True))

    assert (plain.name, provisioned.name) == ("rlm", "rlm-provisioned")
    assert load(provisioned)["metadata"].pop("kernel_provisioner") == {"provisioner_name": "rlm-provisioner"}
    assert "kernel_provisioner" not in load(plain)["metadata"]
    assert load(provisioned)["display_name"] == "Python 3 (RLM, provisioned)"


def test_a_server_without_this_package_offers_the_plain_one_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(prefix=str(tmp_path))
    install(prefix=str(tmp_path), provisioner=True)
    specs = KernelSpecManager(kernel_dirs=[str(kernels(tmp_path))], ensure_native_kernel=False)
    assert set(specs.get_all_specs()) == {"rlm", "rlm-provisioned"}

    monkeypatch.setattr(
        KernelProvisionerFactory.instance(), "_check_availability", lambda name: name != "rlm-provisioner"
    )
    assert set(specs.get_all_specs()) == {"rlm"}


def test_installing_again_replaces_all_of_the_earlier_one(tmp_path: Path) -> None:
    first = Path(install(prefix=str(tmp_path), env={"RLM_MODEL": "demo"}))
    (first / "stale.js").write_text("old", encoding="utf-8")

    assert Path(install(prefix=str(tmp_path))) == first
    assert {path.name for path in first.iterdir()} == FILES
    assert "env" not in load(first)


def test_other_users_can_read_it_and_its_owner_can_replace_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The staging directory is private, and the package's own files may be read-only: neither mode may be copied."""
    resources = tmp_path / "resources"
    resources.mkdir()
    for name in FILES:
        (resources / name).write_bytes((SOURCE / name).read_bytes())
        (resources / name).chmod(0o444)
    resources.chmod(0o555)
    monkeypatch.setattr(install_module, "_RESOURCE_DIRS", (resources,))
    umask = os.umask(0o022)
    try:
        destination = Path(install(prefix=str(tmp_path)))
    finally:
        os.umask(umask)
        resources.chmod(0o755)

    assert stat.S_IMODE(destination.stat().st_mode) == 0o755
    assert {stat.S_IMODE(path.stat().st_mode) for path in destination.iterdir()} == {0o644}


def test_an_installed_copy_of_the_resources_goes_before_whatever_lies_beside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In site-packages, a directory `kernelspec` beside the package would be somebody else's."""
    inside, beside = tmp_path / "inside", tmp_path / "beside"
    monkeypatch.setattr(install_module, "_RESOURCE_DIRS", (inside, beside))

    with pytest.raises(FileNotFoundError, match=r"inside and .*beside.*install rlm-kernel again"):
        install_module.resource_dir()
    for directory in (beside, inside):
        directory.mkdir()
        (directory / "kernel.json").write_text("{}", encoding="utf-8")
        assert install_module.resource_dir() == directory


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"user": True, "prefix": "/p"}, "prefix"),
        ({"user": True, "sys_prefix": True}, "prefix"),
        ({"sys_prefix": True, "prefix": "/p"}, "prefix"),
        ({"prefix": ""}, "prefix"),
        ({"name": "no spaces please"}, "name"),
        ({"name": "../escape"}, "name"),
        ({"name": "RLM", "provisioner": True}, "name"),
        ({"env": {"A=B": "c"}}, "env"),
        ({"env": {"": "c"}}, "env"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    wrong: dict[str, Any], field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jupyter_client.kernelspec.SYSTEM_JUPYTER_PATH", [str(tmp_path / "system")])

    with pytest.raises(ConfigurationError) as caught:
        install(**wrong)
    assert caught.value.field == field
    assert list(tmp_path.iterdir()) == []


def test_the_command_installs_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["--name", "Mine", "--display-name", "My own"]
    env = ["--env", "RLM_MODEL", "demo", "--env", "RLM_MAX_DEPTH", "3"]
    code = cli.main(["install", "--prefix", str(tmp_path), *names, *env])

    assert code == 0
    destination = kernels(tmp_path) / "mine"
    assert capsys.readouterr().out == f"Installed kernelspec mine in {destination}\n"
    spec = load(destination)
    assert (spec["display_name"], spec["env"]) == ("My own", {"RLM_MODEL": "demo", "RLM_MAX_DEPTH": "3"})


def test_the_command_installs_with_the_provisioner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["install", "--prefix", str(tmp_path), "--provisioner"]) == 0
    destination = kernels(tmp_path) / "rlm-provisioned"
    assert capsys.readouterr().out == f"Installed kernelspec rlm-provisioned in {destination}\n"
    assert load(destination)["metadata"]["kernel_provisioner"] == {"provisioner_name": "rlm-provisioner"}


def test_the_command_explains_a_place_that_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied", "/usr/local/share/jupyter/kernels/rlm")

    monkeypatch.setattr(KernelSpecManager, "install_kernel_spec", refuse)

    assert cli.main(["install"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "/usr/local/share/jupyter/kernels/rlm" in err
    assert "--user" in err


def test_the_command_explains_an_impossible_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["install", "--prefix", str(tmp_path), "--name", "a b"]) == 1
    assert "name='a b'" in capsys.readouterr().err


def test_the_command_takes_one_place_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["install", "--user", "--prefix", str(tmp_path)])
    assert caught.value.code == 2
    assert "not allowed with" in capsys.readouterr().err
    with pytest.raises(NoSuchKernel):
        KernelSpecManager(kernel_dirs=[str(kernels(tmp_path))], ensure_native_kernel=False).get_kernel_spec("rlm")


def test_the_bare_command_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert {"install", "run", "demo"} <= set(capsys.readouterr().out.split())
