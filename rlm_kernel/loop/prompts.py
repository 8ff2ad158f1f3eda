"""What the model is told: the system prompt, the first message, the messages between turns, the last chance. Pure.

The system prompt describes exactly the helpers that are there (`PromptFeatures`). The two constants are renderings for
the plain blocking set; `build_rlm_system_prompt` renders them anew for the features of the run at hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rlm_kernel.values import CodeResult, Message

MAX_TASK_CHARS = 4_000
"""A longer task is previewed in the first message; a huge prompt never goes whole into the model's messages."""

MAX_OBSERVATION_CHARS = 20_000
"""Code and output of one block are each cut at this length in what the model sees."""

_TASK_REMINDER_CHARS = 600
_SIZES_SHOWN = 20
HELPERS_MARKER = "{helpers}"
"""In a system prompt of the user's own, this is replaced by the description of the helpers."""


class ContextMetadata(Protocol):
    """What the prompts need to know about the context; `QueryMetadata` is one."""

    @property
    def context_lengths(self) -> Sequence[int]: ...
    @property
    def context_total_length(self) -> int: ...
    @property
    def context_type(self) -> str: ...


@dataclass(frozen=True)
class QueryMetadata:
    """Type and size of a context.

    Attributes:
        context_lengths: characters (bytes for binary data) of each item of a list or value of a dict; else one number.
        context_total_length: their sum.
        context_type: readable name of the type, such as ``str`` or ``list[str]``.
    """

    context_lengths: list[int]
    context_total_length: int
    context_type: str = "str"

    @classmethod
    def of(cls, context: object) -> QueryMetadata:
        """Measure any object. Never raises: what cannot be shown as text has length 0."""
        if context is None:
            return cls([], 0, "None")
        items: Iterable[object]
        if isinstance(context, dict):
            items = list(context.values())
        elif isinstance(context, list | tuple):
            items = context
        else:
            items = (context,)
        lengths = [_length(item) for item in items]
        return cls(lengths, sum(lengths), _type_name(context))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFeatures:
    """Which helpers the namespace really has.

    Attributes:
        llm_query: direct model calls.
        rlm_query: recursive calls that block.
        background: ``blocking=False`` and the calls that inspect children.
        steering: cancelling, sending messages, taking children as they end; needs ``background``.
        share: sharing one object with many children; needs ``background``.
        depth: of this run; 0 is the root.
        max_depth: children exist at depths 1 … ``max_depth - 1``.
    """

    llm_query: bool = True
    rlm_query: bool = True
    background: bool = False
    steering: bool = False
    share: bool = False
    depth: int = 0
    max_depth: int = 2

    @property
    def may_have_children(self) -> bool:
        """Whether a recursive call starts a run of its own (at the limit it falls back to one direct call)."""
        return self.rlm_query and self.depth + 1 < self.max_depth


_HOW_IT_WORKS = """\
You solve a task by writing Python that runs in a persistent REPL. You work in turns: you write code, it runs, you see \
what it printed, and you go on from there until you hand in a final answer.

# How a turn works
Put code in a fenced block tagged `repl`:
```repl
print(type(context), len(context))
```
- Only blocks tagged `repl` or `python` run. If a reply holds several, all of them run, in order, in one namespace, \
before you see any output.
- Variables, imports and functions stay from turn to turn. When code raises, everything assigned before the error is \
kept: read the traceback, repair that part, go on.
- You see only what the code prints (and the value of its last expression). Long output is cut to its beginning and \
its end. Keep results in variables, and print counts, samples and slices rather than everything.
- Say briefly what you are about to do, then do it in the same reply. A reply without a block runs nothing."""

_NAMESPACE = """\
# What the namespace holds
- `context`: the material that the task is about. It can be far larger than what you can read at once."""

_LLM_QUERY = """\
- `llm_query(prompt, model=None) -> str`: asks a language model once. That model sees nothing but the prompt, so put \
both the question and the text it is about into it. Right for reading, extracting, classifying, summarizing.
- `llm_query_batched(prompts, model=None) -> list[str]`: the same for many prompts at once, side by side; the answers \
come in the order of the prompts. A failed entry reads `Error: …`: check for those. Use this instead of a loop."""

_RLM_QUERY = """\
- `rlm_query(prompt, model=None) -> str`: hands a sub-task to a child that works as you do: in its own REPL, over \
several turns. It has none of your variables, so the prompt must state the whole sub-task; the prompt is also its \
`context`. Right where a sub-task needs code and several steps of its own.
- `rlm_query_batched(prompts, model=None) -> list[str]`: many such children side by side, answers in order."""

_RLM_QUERY_AT_LIMIT = """\
- `rlm_query(prompt, model=None) -> str` and `rlm_query_batched(prompts, model=None) -> list[str]`: at this depth no \
further children exist, so these make one direct model call per prompt."""

_BACKGROUND = """\
- `rlm_query(prompt, blocking=False) -> handle` and `rlm_query_batched(prompts, blocking=False) -> list of handles`: \
start children in the background and return at once, so that you can go on working, in this turn and in later ones. \
Each child is a process of its own; when you hand in your final answer, children that still run are stopped.
- Every form of `rlm_query` also takes `context=obj` (the child's `context`, instead of the prompt), `timeout_s=` and \
`name=`.
- `rlm_status(handle=None)`: a snapshot of one child, or of all of yours; never waits. Fields: `.state`, `.done`, \
`.elapsed_s`, `.last_activity_s`, `.iterations`, `.result`, `.error`.
- `rlm_wait(handle_or_handles, timeout_s=None, return_when="all")`: waits and returns the status or the statuses. A \
timeout cancels nothing: the status then has `.done == False`.
- `rlm_result(handle) -> str`: the child's answer; raises if there is none."""

_SHARE = """\
- `rlm_share(obj)`: takes one snapshot of a large object; pass what it returns as `context=` to as many \
children as you like."""

_STEERING = """\
- `rlm_as_completed(handles, timeout_s=None)`: gives the statuses of children one by one as they end.
- `rlm_cancel(handle)`: stops a child and everything that it started.
- `rlm_send(handle, message)`: the child sees the message before its next model call."""

_SHOW_VARS = """\
- `SHOW_VARS()`: the variables that you have made so far."""

_METHOD = """\
# How to go about it
1. Look first: type, size, and a few slices of `context`. Find out how it is structured before you decide anything.
2. Let code do what code does exactly: searching, counting, splitting, sorting, comparing."""

_METHOD_LLM = """\
3. Let model calls do what needs understanding. Cut the material at natural borders into pieces of up to about \
100,000 characters, ask a precise question about each, keep the answers in a list, then combine them by code or by \
one more call:
```repl
pieces = [context[i:i + 50_000] for i in range(0, len(context), 50_000)]
notes = llm_query_batched([f"List every date and what happened on it.\\n\\n{piece}" for piece in pieces])
print(len(notes), notes[0][:500])
```
4. Check what you got against the material before you rely on it."""

_METHOD_PLAIN = """\
3. Check what you got against the material before you rely on it."""

_METHOD_BACKGROUND = """\
Sub-tasks that are independent and long can run while you work on something else:
```repl
handles = rlm_query_batched(["Sub-task one: …", "Sub-task two: …"], blocking=False)
```
Collect them in a later turn:
```repl
for status in rlm_wait(handles, timeout_s=60):
    print(status.name, status.state, (status.result or status.error or "")[:300])
```"""

_COST = """\
# Calls are expensive
Every model call and every child costs time and money. Put as much material into one call as it can well take, \
use the batched form for independent pieces, and make no call whose answer plain code could give. A handful of large \
calls is nearly always better than hundreds of small ones."""

_ANSWER = """\
# Handing in the answer
Do this only once you have seen the output that your answer rests on. Any one of these ends the run:
- `FINAL(value)` in a block, for example `FINAL(total)`;
- `FINAL_VAR("name")` in a block: the value of that variable; best for long answers that you have built up by code;
- `answer["content"] = ...` and then `answer["ready"] = True` in a block. Content that is not marked ready is kept as \
your draft, in case the turns run out;
- a reply without any block in which a line starts with `FINAL(your answer)`, or with `FINAL_VAR(name)`.
If the block that hands in the answer raises, nothing was handed in. Answer exactly what the task asks, in the form \
it asks for."""


def _describe_helpers(features: PromptFeatures) -> str:
    parts = [_NAMESPACE]
    if features.llm_query:
        parts.append(_LLM_QUERY)
    if features.rlm_query:
        parts.append(_RLM_QUERY if features.may_have_children else _RLM_QUERY_AT_LIMIT)
    if features.background and features.may_have_children:
        parts.append(_BACKGROUND)
        if features.share:
            parts.append(_SHARE)
        if features.steering:
            parts.append(_STEERING)
    parts.append(_SHOW_VARS)
    return "\n".join(parts)


def _render(features: PromptFeatures, *, costly: bool) -> str:
    method = [_METHOD, _METHOD_LLM if features.llm_query else _METHOD_PLAIN]
    if features.background and features.may_have_children:
        method.append(_METHOD_BACKGROUND)
    parts = [_HOW_IT_WORKS, _describe_helpers(features), "\n".join(method)]
    if costly and (features.llm_query or features.rlm_query):
        parts.append(_COST)
    return "\n\n".join([*parts, _ANSWER])


RLM_SYSTEM_PROMPT = _render(PromptFeatures(), costly=False)
"""The system prompt for a run with ``llm_query`` and blocking ``rlm_query``."""

RLM_SYSTEM_PROMPT_QWEN = _render(PromptFeatures(), costly=True)
"""The same with a warning about the cost of calls, for models that make too many."""


def build_rlm_system_prompt(
    system_prompt: str | None, query_metadata: ContextMetadata, features: PromptFeatures | None = None
) -> list[Message]:
    """Build the messages that open a run.

    Args:
        system_prompt: one of the two constants or None for the first: rendered for ``features``. Any other text is
            used as it is, with ``{helpers}`` in it replaced by the description of the helpers.
        query_metadata: type and size of the context, described at the end.
        features: what the namespace has; None for the plain blocking set.

    Returns:
        One system message.
    """
    features = features or PromptFeatures()
    if system_prompt is None or system_prompt == RLM_SYSTEM_PROMPT:
        text = _render(features, costly=False)
    elif system_prompt == RLM_SYSTEM_PROMPT_QWEN:
        text = _render(features, costly=True)
    else:
        text = system_prompt.replace(HELPERS_MARKER, _describe_helpers(features))
    return [{"role": "system", "content": f"{text}\n\n# Your context\n{describe_context(query_metadata)}"}]


def build_user_prompt(
    root_prompt: str | None = None,
    iteration: int = 0,
    context_count: int = 1,
    history_count: int = 0,
    *,
    query_metadata: ContextMetadata | None = None,
    max_iterations: int | None = None,
    task_variable: str = "context",
) -> Message:
    """Build the user message that asks for the next turn.

    Args:
        root_prompt: the task.
        iteration: how many turns have been made; 0 gives the first message.
        context_count: how many context variables there are (``context_0`` … if more than one).
        history_count: how many earlier conversations are at hand.
        query_metadata: type and size of the context, for the first message.
        max_iterations: turns in all, if that is to be said.
        task_variable: the expression under which a task too long to show is whole.

    Returns:
        A user message.
    """
    if iteration == 0:
        text = _first_message(root_prompt, query_metadata, task_variable)
    else:
        text = _continue_message(root_prompt, iteration, max_iterations)
    if context_count > 1:
        text += f"\n\nThere are {context_count} contexts: `context_0` to `context_{context_count - 1}`."
    if history_count > 0:
        text += f"\n\nEarlier conversations at hand: {history_count}, in `history`."
    return {"role": "user", "content": text}


def _first_message(task: str | None, metadata: ContextMetadata | None, task_variable: str) -> str:
    parts = []
    if task is not None:
        shown = task
        if len(task) > MAX_TASK_CHARS:
            shown = cut(task, MAX_TASK_CHARS)
            parts.append(
                f"Your task is {len(task):,} characters long. Below are its beginning and its end; it is whole in "
                f"`{task_variable}`, so read it there."
            )
        parts.append(f"<task>\n{shown}\n</task>")
    if metadata is not None:
        parts.append(describe_context(metadata))
    parts.append(
        "You have not looked at the context yet. Start with a ```repl block that does; do not hand in an answer before "
        "you have seen what it rests on."
    )
    return "\n\n".join(parts)


def _continue_message(task: str | None, iteration: int, max_iterations: int | None) -> str:
    number = iteration + 1
    head = f"Iteration {number}" + (f" of {max_iterations}." if max_iterations else ".")
    if max_iterations and number >= max_iterations:
        head += " This is the last one in which code runs: hand in your answer now, by FINAL(...) or FINAL_VAR(...)."
    if task is not None:
        head += f" The task: {cut(task, _TASK_REMINDER_CHARS)}"
    return (
        f"{head}\n\nWrite your next step in a ```repl block. If what you have seen settles the task, hand in the "
        'answer: FINAL(value) or FINAL_VAR("name").'
    )


def build_reminder(explanation: str | None = None, *, empty: bool = False) -> str:
    """Build the text for a reply that ran nothing and answered nothing.

    Args:
        explanation: why, if it is known better.
        empty: the reply held no text at all.

    Returns:
        The text that stands before the next continue prompt.
    """
    what = explanation or ("Your reply was empty." if empty else "Your reply held no code block, so nothing ran.")
    return (
        f"{what} Either write code between ```repl and ```, or, if you are done, answer with a line that starts "
        "with FINAL(your answer) or FINAL_VAR(name)."
    )


def build_last_chance_prompt(task: str, reason: Literal["iterations", "stalled"] = "iterations") -> str:
    """Build the text of the one model call after the last turn.

    Args:
        task: the task.
        reason: the turns are used up, or reply after reply ran nothing.
    """
    if reason == "iterations":
        why = "The REPL iterations have run out, so no more code will run. As you have run out of REPL iterations,"
    else:
        why = "Several replies in a row ran nothing, so no more code will run. From what you have found so far,"
    return (
        f"{why} give the best answer you can, now: write FINAL(your answer) at the start of a line, or FINAL_VAR(name) "
        f"if a variable holds it.\n\nThe task: {cut(task, _TASK_REMINDER_CHARS)}"
    )


def describe_context(metadata: ContextMetadata) -> str:
    """Describe type and size of the context in a sentence or two."""
    kind, lengths = metadata.context_type, list(metadata.context_lengths)
    if kind in {"None", "NoneType"}:
        return "There is no context beyond the task: `context` is None or missing."
    unit = "bytes" if kind in {"bytes", "bytearray"} else "characters"
    text = f"`context` is of type {kind}, {metadata.context_total_length:,} {unit} in all"
    if len(lengths) <= 1:
        return f"{text}."
    sizes = ", ".join(f"{length:,}" for length in lengths[:_SIZES_SHOWN])
    more = f" … and {len(lengths) - _SIZES_SHOWN:,} more" if len(lengths) > _SIZES_SHOWN else ""
    return (
        f"{text}, in {len(lengths):,} parts of {min(lengths):,} to {max(lengths):,} {unit}. Their sizes: {sizes}{more}."
    )


def format_observations(
    observations: Sequence[Any],
    code_blocks: Sequence[str] | None = None,
    max_character_length: int = MAX_OBSERVATION_CHARS,
) -> str:
    """Show the model the code that ran and what came of it.

    Args:
        observations: one `CodeResult` per block, or anything that has ``stdout stderr success exception``, itself or
            as its ``.result``.
        code_blocks: the code of each, where it is to be shown.
        max_character_length: code and output are each cut at this many characters, with a note.

    Returns:
        One section per block; nothing is escaped.
    """
    codes = list(code_blocks or ())
    sections = []
    for index, observation in enumerate(observations):
        lines = [f"Block {index + 1} of {len(observations)}:"]
        if index < len(codes):
            lines.append(_fenced(cut(codes[index], max_character_length)))
        lines.append(_outcome(getattr(observation, "result", observation), max_character_length))
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def _outcome(result: CodeResult | Any, limit: int) -> str:
    output = "\n".join(part.rstrip("\n") for part in (result.stdout, result.stderr) if part and part.strip())
    text = f"Output:\n{cut(output, limit)}" if output else "Output: (none)"
    if result.success:
        return text
    error = result.exception or "the code did not run to its end"
    return f"{text}\nERROR: {cut(error, limit)}"


def _fenced(code: str) -> str:
    longest = max(map(len, re.findall("`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}repl\n{code}\n{fence}"


def cut(text: str, limit: int) -> str:
    """Keep the head and the tail of a text that is longer than ``limit`` characters, with a note how long it was."""
    if len(text) <= limit:
        return text
    tail = limit // 3
    head = limit - tail
    note = f"[… {len(text) - limit:,} of {len(text):,} characters left out here …]"
    return f"{text[:head]}\n{note}\n{text[len(text) - tail :]}"


def _length(item: object) -> int:
    try:
        return len(item) if isinstance(item, str | bytes | bytearray) else len(str(item))
    except Exception:  # an object of the user's may fail in any way when it is shown; its size is then unknown
        return 0


def _type_name(context: object) -> str:
    name = type(context).__name__
    if isinstance(context, list | tuple) and context and len(kinds := {type(item).__name__ for item in context}) == 1:
        return f"{name}[{kinds.pop()}]"
    return name
