"""The front door: which names are public, that they are lazy, and that nothing but running children needs POSIX."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import rlm_kernel
from rlm_kernel import errors

CHECKOUT = Path(__file__).resolve().parents[1]

LIBRARY = {
    *("REPLEnvironment", "LocalREPLEnv", "LocalRLMRunner", "RLMRunResult", "KernelREPLEnv", "PythonExecutor"),
    *("REPLAction", "REPLObservation", "REPLState", "CodeBlockResult", "StepResult"),
    *("ExactMatchRubric", "FuzzyMatchRubric", "CustomMetricRubric", "CodeExecutionRubric", "REPLRubric"),
    *("ManagedChildConfig", "ManagedChildren", "ManagedChildBackend", "DirectLMBackend", "LocalChildRLMBackend"),
    *("BackendLimits", "create_server_recursive_controller", "RecursiveController"),
    *("RLM_SYSTEM_PROMPT", "RLM_SYSTEM_PROMPT_QWEN", "QueryMetadata", "build_rlm_system_prompt", "build_user_prompt"),
    *("extract_code_blocks", "format_observations"),
}
"""What training code and harnesses import."""

VALUES = {"ChildHandle", "ChildState", "ChildStatus", "CleanupReport", "Completion", "SharedContext", "Usage"}
"""What the helpers, the errors and the model clients hand out or take."""


def type_checking_imports() -> dict[str, set[str]]:
    """Return what type checkers see: module below the package → names."""
    tree = ast.parse(Path(rlm_kernel.__file__).read_text("utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    found: dict[str, set[str]] = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        assert statement.module is not None
        found[statement.module.removeprefix("rlm_kernel.")] = {alias.name for alias in statement.names}
    return found


def test_exactly_these_names_are_public() -> None:
    own_errors = {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.RLMError)
    }
    assert set(rlm_kernel.__all__) == {"__version__", *LIBRARY, *VALUES, *own_errors}
    assert len(rlm_kernel.__all__) == len(set(rlm_kernel.__all__))


def test_what_is_loaded_what_type_checkers_see_and_what_is_exported_are_the_same() -> None:
    homes = {module: set(names) for module, names in rlm_kernel._HOMES.items()}
    assert homes == type_checking_imports()
    assert {name for names in homes.values() for name in names} | {"__version__"} == set(rlm_kernel.__all__)


@pytest.mark.parametrize("name", rlm_kernel.__all__)
def test_each_public_name_is_there(name: str) -> None:
    value = getattr(rlm_kernel, name)
    assert getattr(rlm_kernel, name) is value
    if isinstance(value, type):
        assert value.__name__ == name
        assert value.__module__.startswith("rlm_kernel.")


def test_dir_shows_the_public_names_and_others_do_not_exist() -> None:
    assert dir(rlm_kernel) == sorted(rlm_kernel.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'REPLEnviroment'"):
        _ = rlm_kernel.REPLEnviroment  # type: ignore[attr-defined]
    with pytest.raises(ImportError):
        from rlm_kernel import nothing_of_that_name  # type: ignore[attr-defined]  # noqa: F401


def test_importing_the_package_loads_nothing_of_it_but_its_version() -> None:
    program = "import sys; before = set(sys.modules); import rlm_kernel, json; print(json.dumps(sorted(set(sys.modules) - before)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)
    assert [name for name in loaded if name.startswith("rlm_kernel")] == ["rlm_kernel", "rlm_kernel._version"]
    assert {name.partition(".")[0] for name in loaded} - {"rlm_kernel"} <= sys.stdlib_module_names


@pytest.fixture(scope="module")
def without_posix() -> dict[str, object]:
    """What a process without anything of POSIX says."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.without_posix"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_everything_but_the_nursery_can_be_imported_on_windows(without_posix: dict[str, object]) -> None:
    """Nothing that only POSIX has is needed at the import of a module outside ``children/`` (nor of those that it imports)."""
    assert without_posix["before"] == {}
    assert {"rlm_kernel.session.session", "rlm_kernel.jupyter.kernel"} <= set(without_posix["modules"])  # type: ignore[call-overload]
    assert without_posix["failed"] == {}


def test_blocking_queries_work_on_windows_and_background_ones_say_what_they_need(
    without_posix: dict[str, object],
) -> None:
    said = dict(without_posix["session"])  # type: ignore[call-overload]
    background = said.pop("background")
    assert said == {"llm_query": "to: one", "rlm_query": "to: two", "batch": "to: three, to: four", "shutdown": "True"}
    assert background.startswith("ManagedModeRequired: children are forked processes, which need a POSIX system")
    assert "Windows Subsystem for Linux" in background


def test_a_runner_recurses_in_its_own_process_on_windows(without_posix: dict[str, object]) -> None:
    assert without_posix["runner"] == "from within"
