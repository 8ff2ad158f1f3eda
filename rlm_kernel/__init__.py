"""A Jupyter kernel in which the notebook is the REPL of a Recursive Language Model.

Only the names in ``__all__`` are public. Each is loaded when it is first asked for, so importing the package, for a
``%load_ext`` or a command line, costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlm_kernel._version import __version__

if TYPE_CHECKING:  # what type checkers and editors see of `_HOMES`
    from rlm_kernel.environment.executor import PythonExecutor
    from rlm_kernel.environment.local import LocalREPLEnv
    from rlm_kernel.environment.models import CodeBlockResult, REPLAction, REPLObservation, REPLState, StepResult
    from rlm_kernel.environment.repl import REPLEnvironment
    from rlm_kernel.environment.rubrics import (
        CodeExecutionRubric,
        CustomMetricRubric,
        ExactMatchRubric,
        FuzzyMatchRubric,
        REPLRubric,
    )
    from rlm_kernel.errors import (
        ChildCleanupError,
        ChildFailedError,
        ChildLimitError,
        ConfigurationError,
        EpisodeClosing,
        EpisodeFinalized,
        ForkedProcessError,
        HandleError,
        KernelDied,
        LifecycleError,
        LimitReached,
        ManagedModeRequired,
        ModelCallError,
        ModelNotConfigured,
        NurseryError,
        PayloadError,
        PeerFailed,
        ResultNotReady,
        RLMError,
        StaleHandleError,
        UnknownHandleError,
        UsageMistake,
        WaitTimedOut,
    )
    from rlm_kernel.jupyter.harness import KernelREPLEnv
    from rlm_kernel.loop.parsing import extract_code_blocks
    from rlm_kernel.loop.prompts import (
        RLM_SYSTEM_PROMPT,
        RLM_SYSTEM_PROMPT_QWEN,
        QueryMetadata,
        build_rlm_system_prompt,
        build_user_prompt,
        format_observations,
    )
    from rlm_kernel.session.backends import BackendLimits, DirectLMBackend, LocalChildRLMBackend, ManagedChildBackend
    from rlm_kernel.session.contexts import SharedContext
    from rlm_kernel.session.controller import RecursiveController, create_server_recursive_controller
    from rlm_kernel.session.handles import ChildHandle
    from rlm_kernel.session.local_runner import LocalRLMRunner, RLMRunResult
    from rlm_kernel.session.managed import ManagedChildren
    from rlm_kernel.values import ChildState, ChildStatus, CleanupReport, Completion, ManagedChildConfig, Usage

__all__ = [
    "RLM_SYSTEM_PROMPT",
    "RLM_SYSTEM_PROMPT_QWEN",
    "BackendLimits",
    "ChildCleanupError",
    "ChildFailedError",
    "ChildHandle",
    "ChildLimitError",
    "ChildState",
    "ChildStatus",
    "CleanupReport",
    "CodeBlockResult",
    "CodeExecutionRubric",
    "Completion",
    "ConfigurationError",
    "CustomMetricRubric",
    "DirectLMBackend",
    "EpisodeClosing",
    "EpisodeFinalized",
    "ExactMatchRubric",
    "ForkedProcessError",
    "FuzzyMatchRubric",
    "HandleError",
    "KernelDied",
    "KernelREPLEnv",
    "LifecycleError",
    "LimitReached",
    "LocalChildRLMBackend",
    "LocalREPLEnv",
    "LocalRLMRunner",
    "ManagedChildBackend",
    "ManagedChildConfig",
    "ManagedChildren",
    "ManagedModeRequired",
    "ModelCallError",
    "ModelNotConfigured",
    "NurseryError",
    "PayloadError",
    "PeerFailed",
    "PythonExecutor",
    "QueryMetadata",
    "REPLAction",
    "REPLEnvironment",
    "REPLObservation",
    "REPLRubric",
    "REPLState",
    "RLMError",
    "RLMRunResult",
    "RecursiveController",
    "ResultNotReady",
    "SharedContext",
    "StaleHandleError",
    "StepResult",
    "UnknownHandleError",
    "Usage",
    "UsageMistake",
    "WaitTimedOut",
    "__version__",
    "build_rlm_system_prompt",
    "build_user_prompt",
    "create_server_recursive_controller",
    "extract_code_blocks",
    "format_observations",
]

_HOMES: dict[str, tuple[str, ...]] = {
    "environment.executor": ("PythonExecutor",),
    "environment.local": ("LocalREPLEnv",),
    "environment.models": ("CodeBlockResult", "REPLAction", "REPLObservation", "REPLState", "StepResult"),
    "environment.repl": ("REPLEnvironment",),
    "environment.rubrics": (
        "CodeExecutionRubric",
        "CustomMetricRubric",
        "ExactMatchRubric",
        "FuzzyMatchRubric",
        "REPLRubric",
    ),
    "errors": (
        "ChildCleanupError",
        "ChildFailedError",
        "ChildLimitError",
        "ConfigurationError",
        "EpisodeClosing",
        "EpisodeFinalized",
        "ForkedProcessError",
        "HandleError",
        "KernelDied",
        "LifecycleError",
        "LimitReached",
        "ManagedModeRequired",
        "ModelCallError",
        "ModelNotConfigured",
        "NurseryError",
        "PayloadError",
        "PeerFailed",
        "RLMError",
        "ResultNotReady",
        "StaleHandleError",
        "UnknownHandleError",
        "UsageMistake",
        "WaitTimedOut",
    ),
    "jupyter.harness": ("KernelREPLEnv",),
    "loop.parsing": ("extract_code_blocks",),
    "loop.prompts": (
        "QueryMetadata",
        "RLM_SYSTEM_PROMPT",
        "RLM_SYSTEM_PROMPT_QWEN",
        "build_rlm_system_prompt",
        "build_user_prompt",
        "format_observations",
    ),
    "session.backends": ("BackendLimits", "DirectLMBackend", "LocalChildRLMBackend", "ManagedChildBackend"),
    "session.contexts": ("SharedContext",),
    "session.controller": ("RecursiveController", "create_server_recursive_controller"),
    "session.handles": ("ChildHandle",),
    "session.local_runner": ("LocalRLMRunner", "RLMRunResult"),
    "session.managed": ("ManagedChildren",),
    "values": ("ChildState", "ChildStatus", "CleanupReport", "Completion", "ManagedChildConfig", "Usage"),
}
"""Where each public name is defined: module below this package → names."""

_HOME_OF = {name: f"{__name__}.{module}" for module, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # which would take any name for a known one

    def __getattr__(name: str) -> Any:
        """Load a public name when it is first asked for."""
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(ipython: Any) -> None:
    """Give a running IPython the helpers, the magics and the lifecycle: what ``%load_ext rlm_kernel`` calls."""
    from rlm_kernel.jupyter.extension import load_ipython_extension as load

    load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Take all of it away again: what ``%unload_ext rlm_kernel`` calls."""
    from rlm_kernel.jupyter.extension import unload_ipython_extension as unload

    unload(ipython)
