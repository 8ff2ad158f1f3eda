"""What is shown of a run of ``%%rlm`` while it goes on: each iteration in its order, and the children in one table.

Who runs it: the thread of the cell, in the loop's events. The output of code comes in on whatever thread writes it. Threads "rlm-view" draw
what changes; one place (a `Surface`) first shows that a step is under way, and then what came of it.

How each step can fail: an interrupt comes at any point (what is under way is closed when the iteration is, or at the latest when `shown` is
left); a view cannot be drawn (see `views.live`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rlm_kernel.environment.capture import BoundedText
from rlm_kernel.jupyter.views.base import View
from rlm_kernel.jupyter.views.children import live_table
from rlm_kernel.jupyter.views.iteration import Code, Note, Output, Reply, Running
from rlm_kernel.jupyter.views.live import LiveView, watching
from rlm_kernel.jupyter.views.surfaces import Surface, Terminal, Updating, request_of, surface_of, wants_no_views
from rlm_kernel.loop.parsing import runnable_blocks, strip_reasoning
from rlm_kernel.loop.runner import RunEvents
from rlm_kernel.loop.trajectory import IterationRecord
from rlm_kernel.values import CodeResult, Completion, Usage

if TYPE_CHECKING:
    from rlm_kernel.session.root_run import RootRun
    from rlm_kernel.session.session import RLMSession

_DELAY_S = 0.5
"""Seconds after which a step that is still under way says so."""

_TAIL = 20_000
"""Characters of a running block's output that are kept for showing its end."""

_WORTH_TELLING_S = 1.0
"""Seconds that a block takes before it is said how many they were."""

_TABLE = "This run"


class _Step:
    """One place in the cell's output: something is under way, then what came of it."""

    def __init__(self, shell: Any, publish: Callable[[View], None], under_way: Callable[[float], View]) -> None:
        self._began = time.monotonic()
        self._publish = publish
        self._surface: Surface = surface_of(shell)
        self._live = LiveView(
            shell,
            lambda: under_way(self.elapsed_s),
            delay_s=_DELAY_S,
            surface=self._surface,
            keep=lambda: False,
        )
        self._live.__enter__()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def is_shown(self) -> bool:
        return self._surface.is_shown and isinstance(self._surface, Updating)

    def stir(self) -> None:
        self._live.stir()

    def end(self, view: View | None) -> None:
        """Put what came of it into the place. None only if nothing is to be seen there."""
        self._live.close()
        if view is None:
            return
        if self.is_shown:
            self._surface.finish(view)
        else:
            self._publish(view)


class RunViews:
    """See the module's docstring.

    Args:
        session: whose children there may be.
        shell: whose display is used, as it is now: code that runs later finds another one in its place.
        run: the run.
        label: how the model is called.

    Attributes:
        iterations: how many have ended well.
        usage: what the model calls of the run's own have cost.
    """

    def __init__(self, session: RLMSession, shell: Any, run: RootRun, label: str) -> None:
        self._session = session
        self._shell = shell
        self._run = run
        self._label = label
        self._is_quiet = wants_no_views(request_of(shell))
        self._publish = shell.display_pub.publish
        self._in_terminal = isinstance(surface_of(shell), Terminal)
        self._step: _Step | None = None
        self._tail = BoundedText(_TAIL)
        self._reply = ""
        self._blocks: list[tuple[str, str]] = []
        self._after = ""
        self._begun = 0
        self.iterations = 0
        self.usage = Usage()

    def publish(self, view: View) -> None:
        """Show a view at the end of the cell's output."""
        if not self._is_quiet:
            self._publish(view.bundle())

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Keep the table of children for the length of the block, and leave nothing open."""
        if self._is_quiet:
            yield
            return
        # Two live displays of one terminal would write over each other: there the table stands in the step's own view.
        table = watching(self._session, self._shell, self._run.children, title=_TABLE, delay_s=0.0)
        try:
            with contextlib.nullcontext() if self._in_terminal else table:
                yield
        finally:
            self._end_step(None)
            if self._in_terminal and self._run.children():
                self.publish(live_table(self._run.children(), _TABLE))

    def begin(self, context: str) -> None:
        """Say what is going to run."""
        turns = self._run.max_iterations
        most = f"at most {turns:,} {'iteration' if turns == 1 else 'iterations'}"
        self.publish(Note(f"%%rlm with {self._label} · {most} · context: {context}"))

    def events(self) -> RunEvents:
        """Return what the loop is to call."""
        return RunEvents(
            on_model_call_start=self._on_model_call_start,
            on_model_call_end=self._on_model_call_end,
            on_block_start=self._on_block_start,
            on_block_end=self._on_block_end,
            on_iteration=self._on_iteration,
        )

    def on_output(self, text: str) -> None:
        """Take in output of a block that runs. On any thread."""
        self._tail.add(text)
        step = self._step
        if step is not None:
            step.stir()

    # -- the loop's events, in its thread

    def _on_model_call_start(self, iteration: int) -> None:
        head = self._head(iteration)
        self._blocks, self._after, self._begun = [], "", 0
        self._begin_step(lambda seconds: Note(f"{head}: {self._label} is thinking… {seconds:.0f} s"))

    def _on_model_call_end(self, iteration: int, completion: Completion, duration_s: float) -> None:
        self.usage += completion.usage
        text: Any = completion.text
        text = text if isinstance(text, str) else ""
        reply = strip_reasoning(text)
        self._blocks, self._after = _parts(reply)
        words, self._after = (self._after, "") if not self._blocks else (self._blocks[0][0], self._after)
        if self._blocks:
            self._blocks[0] = ("", self._blocks[0][1])
        notes = [f"{len(text) - len(reply):,} characters of reasoning are not shown"] if len(reply) < len(text) else []
        if not reply.strip():
            notes.append("the reply is empty")
        facts = [self._label, f"{duration_s:.1f} s"]
        if completion.usage.total_tokens:
            facts.append(f"{completion.usage.total_tokens:,} tokens")
        self._end_step(Reply(self._head(iteration), tuple(facts), words, "; ".join(notes)))

    def _on_block_start(self, iteration: int, index: int, code: str) -> None:
        words = self._blocks[index][0] if index < len(self._blocks) else ""
        self._begun = index + 1
        self._tail = BoundedText(_TAIL)
        self.publish(Code(code, words))
        self._begin_step(self._running)

    def _on_block_end(self, iteration: int, index: int, code: str, result: CodeResult) -> None:
        took = f"{result.duration_s:.1f} s" if result.duration_s >= _WORTH_TELLING_S else ""
        view = Output.of(result, took)
        silent = not (view.stdout or view.stderr)
        if silent and (took or (self._step is not None and self._step.is_shown)):
            view = Output(note=f"no output; {result.duration_s:.1f} s")
        self._end_step(None if view.is_empty else view)

    def _on_iteration(self, record: IterationRecord) -> None:
        self.usage += sum((call.usage for block in record.blocks for call in block.result.model_calls), Usage())
        if record.error is None:
            self.iterations += 0 if record.last_chance else 1
        elif self._step is not None:
            how = f"broken off after {self._step.elapsed_s:.1f} s: {record.error}"
            if self._begun:
                self._end_step(Output(self._tail.value(), note=how))
            else:
                self._end_step(Reply(self._head(record.iteration), (self._label,), note=how))
        for words, code in self._blocks[self._begun :]:
            self.publish(Code(code, words, note="this code did not run"))
        nothing_ran = record.error is None and not record.blocks and record.final is None and not record.last_chance
        note = "no code ran, and there is no answer yet; the model is told so" if nothing_ran else ""
        if self._after.strip() or note:
            self.publish(Code("", self._after, note))
        self._blocks, self._after = [], ""

    # -- steps

    def _head(self, iteration: int) -> str:
        turns = self._run.max_iterations
        return f"Iteration {iteration} of {turns}" if iteration <= turns else "The last chance to answer"

    def _running(self, seconds: float) -> View:
        line = f"the code runs… {seconds:.0f} s"
        tail = self._tail.value()
        if self._in_terminal and (children := self._run.children()):
            tail = f"{tail}\n{live_table(children, _TABLE).text()}".strip()
        return Running(line, tail)

    def _begin_step(self, under_way: Callable[[float], View]) -> None:
        if not self._is_quiet:
            self._step = _Step(self._shell, self.publish, under_way)

    def _end_step(self, view: View | None) -> None:
        step = self._step
        if step is not None:
            step.end(view)
            self._step = None


def _parts(reply: str) -> tuple[list[tuple[str, str]], str]:
    """Cut a reply at the blocks that run: each with the words before it; and the words after the last."""
    lines = reply.split("\n")
    parts = []
    position = 0
    for block in runnable_blocks(reply):
        parts.append(("\n".join(lines[position : block.line - 1]).strip("\n"), block.code))
        position = block.end
    return parts, "\n".join(lines[position:]).strip("\n")
