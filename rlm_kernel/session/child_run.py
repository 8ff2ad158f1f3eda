"""The run of one child: what `rlm_kernel.children.worker` calls in the forked process, and what the nursery warms up
for it.

Who runs it: one of the two ``warm_up…`` in the nursery, before it forks anything; `run` in the child, on its main thread. The order in
`run` matters: the client is built while the environment still has its secrets, which are removed before any code of the
model's runs.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlm_kernel.children.worker import Link, StopRequested
from rlm_kernel.clients.base import build_client
from rlm_kernel.credentials import secret_values
from rlm_kernel.environment.finalization import Finalization
from rlm_kernel.environment.interpreter import Interpreter, make_shell
from rlm_kernel.errors import ChildFailedError
from rlm_kernel.loop.prompts import PromptFeatures, QueryMetadata
from rlm_kernel.loop.runner import LoopRunner, RunEvents
from rlm_kernel.loop.trajectory import MAX_FIELD_CHARS, RunMetadata, TrajectoryWriter
from rlm_kernel.session import contexts
from rlm_kernel.session.helpers import HIDDEN_NAMES, HelperEnvironment, Helpers
from rlm_kernel.session.kept_contexts import describe_kept
from rlm_kernel.session.model_repl import ModelREPL
from rlm_kernel.session.models import ModelAccess, name_for_usage
from rlm_kernel.session.ports import LinkPort, checked
from rlm_kernel.session.structured import SCHEMA_VARIABLE, AnswerCheck, describe_form, why_no_answer
from rlm_kernel.session.tasks import ChildTask, Inherited, sendable_text, unpack_inherited, unpack_task
from rlm_kernel.values import CodeResult, Usage
from rlm_kernel.wire import messages as m

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


@functools.cache
def shell() -> InteractiveShell:
    """Return this process's shell, made at the first call: in the nursery, before the fork."""
    return make_shell()


def warm_up() -> None:
    """Import and exercise what children need, so that the fork inherits it."""
    from rlm_kernel.clients import openai_compatible

    openai_compatible.prewarm()
    warm_up_without_openai()


def warm_up_without_openai() -> None:
    """The same where the model client does not use ``openai``, which takes more than half of the time."""
    AnswerCheck.of({"type": "object"})
    interpreter = Interpreter(shell(), echo=False)
    interpreter.execute("None")
    interpreter.execute("raise ValueError('warming up')")


def run(link: Link, start: m.Start) -> str:
    """Run the loop on the child's task and return its answer.

    Raises:
        ModelCallError: a model call failed.
        ChildFailedError: the loop ended without an answer.
    """
    inherited = unpack_inherited(start.inherited)
    task = unpack_task(start.task)
    factory = pickle.loads(inherited.factory)
    models = ModelAccess(
        functools.partial(build_client, factory),
        model=task.model or inherited.model,
        name_of=functools.partial(name_for_usage, factory),
        meter=LinkMeter(link, asks=inherited.asks_for_calls),
    )
    _ = models.client  # built now, with the secrets still in the environment
    secrets = secret_values(start.secret_environ)
    remove_secrets(start.secret_environ)
    attachments, link.attachments = link.attachments, ()
    context = task.prompt if task.context is None else contexts.decode(task.context, attachments)

    interpreter = Interpreter(shell())
    finalization, functions = _furnish(link, interpreter, models, inherited, start, context)
    if task.context is not None:
        interpreter.namespace["task"] = task.prompt
    check, form = None, ""
    if task.schema_json is not None:
        check, form = AnswerCheck.from_json(task.schema_json), describe_form(task.schema_json, variable=True)
        interpreter.namespace[SCHEMA_VARIABLE] = check.schema
    repl = ModelREPL(interpreter, finalization, models, context, functions, check)
    with TrajectoryWriter(
        start.trajectory_path or os.devnull,
        metadata=RunMetadata(
            root_model=inherited.root_model,
            max_depth=inherited.max_depth,
            max_iterations=inherited.max_iterations,
            run_id=start.id,
            parent_id=start.parent_id,
            depth=start.depth,
            episode_id=inherited.episode_id,
            task=task.prompt,
            context=_described(task, context, repl.context_metadata(), start.trajectory_path, secrets),
            answer_schema=None if task.schema_json is None else task.schema_json.decode(),
        ),
        secrets=secrets,
    ) as trajectory:
        trajectory.write_metadata()
        runner = LoopRunner(
            models,
            repl,
            max_iterations=inherited.max_iterations,
            features=features(start.depth, inherited.max_depth),
            system_prompt=inherited.system_prompt,
            trajectory=trajectory,
            task_variable="context" if task.context is None else "task",
            answer_form=form,
            ended_by_others=(StopRequested,),  # the root writes: cancelled, or timed out
            events=RunEvents(
                before_model_call=lambda messages: _with_messages(link, _check_stop(link, messages)),
                on_block_end=lambda _iteration, _index, _code, result: _check_memory(inherited, result),
                on_iteration=lambda record: link.notify(m.Iteration(record.iteration)),
            ),
        )
        result = runner.run(task.prompt)
    _check_stop(link, [])
    if result.answer is None:
        raise ChildFailedError(
            f"no answer after {result.iterations} iteration{'' if result.iterations == 1 else 's'}"
            + ("; raise max_iterations, or ask for less" if check is None else why_no_answer(check))
        )
    return sendable_text(result.answer.text)


def _described(
    task: ChildTask, context: Any, metadata: QueryMetadata, trajectory_path: str, secrets: tuple[str, ...]
) -> dict[str, Any]:
    """Describe the context for the trajectory. One that is the task is in there already, unless it is too long for it."""
    if task.context is None and len(context) <= MAX_FIELD_CHARS:
        return {"type": "str", "length": len(context), "is_task": True}
    return describe_kept(context, metadata, Path(trajectory_path).parent if trajectory_path else None, secrets)


def _check_stop(link: Link, messages: list[Any]) -> list[Any]:
    """Raise a stop again that code of the model's has swallowed."""
    if link.stop_requested:
        raise StopRequested("the parent asked this run to stop")
    return messages


def _check_memory(inherited: Inherited, result: CodeResult) -> None:
    """End the run if an allocation of its code ran into the bound on its address space."""
    if inherited.memory_limit_bytes is not None and (result.exception or "").startswith("MemoryError"):
        raise ChildFailedError(f"memory limit: an allocation failed, memory_limit_bytes={inherited.memory_limit_bytes}")


def _with_messages(link: Link, messages: list[Any]) -> list[Any]:
    """Add what the parent has sent since the last model call."""
    return messages + [
        {"role": "user", "content": f"A message from the run that started you:\n{text}"}
        for text in link.take_messages()
    ]


class LinkMeter:
    """The meter of a child: tells the supervisor what calls cost and, where they are bounded, asks before each."""

    def __init__(self, link: Link, *, asks: bool) -> None:
        self._link = link
        self._asks = asks

    def begin_call(self) -> None:
        if self._asks:
            checked(self._link.request(m.AskCall))

    def end_call(self, usage: Usage, model: str = "", duration_s: float = 0.0) -> None:
        self._link.notify(m.CallEnded(usage, permitted=self._asks, model=model, duration_s=duration_s))


def features(depth: int, max_depth: int) -> PromptFeatures:
    """Say which helpers a managed run of this depth has."""
    may_nest = depth + 1 < max_depth
    return PromptFeatures(background=may_nest, steering=may_nest, share=may_nest, depth=depth, max_depth=max_depth)


def _furnish(
    link: Link, interpreter: Interpreter, models: ModelAccess, inherited: Inherited, start: m.Start, context: Any
) -> tuple[Finalization, dict[str, Any]]:
    """Put the helpers, ``context`` and ``answer`` into the namespace."""
    finalization = Finalization(lambda: interpreter.namespace, lambda: HIDDEN_NAMES)
    port = LinkPort(link, inherited.root_model or None)
    helpers = Helpers(
        HelperEnvironment(
            children=lambda: port,
            models=lambda: models,
            depth=start.depth,
            max_depth=lambda: inherited.max_depth,
            episode_id=lambda: start.id,
            batch_limit=lambda: inherited.max_children_per_batch,
        ),
        finalization,
    )
    functions = helpers.functions()
    interpreter.namespace.update(functions, context=context, answer=finalization.answer_dict)
    return finalization, functions


def remove_secrets(secrets: Mapping[str, str]) -> None:
    """Take the secret-looking variables out of this process's environment."""
    for name in secrets:
        os.environ.pop(name, None)
