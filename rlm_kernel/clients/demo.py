"""The `demo` model: a rule-based stand-in for a language model, for trying things out offline.

It is a *client* like any other (`DemoClient.complete`), plays by the same rules as a model, and knows only what stands
in the messages. It never sees the context: like a model it writes REPL code that looks at it, cuts it at line ends,
hands the pieces to background children, goes on working, collects, and finalizes. What it can do is to count and find
texts (`demo_tasks`); everything else it declines, saying what it is.

The step is read off the conversation: which step its own last reply was (a comment in its code), and whether the marker
line that ends that step (`demo: …`) is among the observations. No marker means that the code failed: then it counts
directly, without children; if that fails too, it says so.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from rlm_kernel.clients.base import ModelClient
from rlm_kernel.clients.demo_code import SHOWN_NEEDLE, collect_code, direct_code, look_code, piece_code, start_code
from rlm_kernel.clients.demo_tasks import Kind, Piece, Refusal, SearchTask, read_task
from rlm_kernel.values import Completion, Message, Usage

DEMO_NOTICE = (
    "The demo model is a rule-based stand-in for a language model: it works offline and can only count and find texts "
    "in the context."
)
SAMPLE_TASK = "How often does 'comet' occur in this log?"

_EXAMPLES = (
    "I can do tasks such as: how often does 'whale' occur? which lines contain 'error'? find the code that looks like "
    "AB-1234. For everything else configure a real model, for example with %rlm model openai/gpt-5-mini."
)
_MIN_LINES = 20  # a shorter text is counted faster than a child is started
_MIN_ITEMS = 4
_MAX_PIECES = 8
_LINES_PER_PIECE = 60
_MAX_NEEDLE_IN_PROMPT = 1000  # characters; a longer prompt may reach the child's model as a preview only


def sample_text() -> str:
    """Give the text of the sample log that comes with the package."""
    return resources.files("rlm_kernel").joinpath("data", "sample.txt").read_text(encoding="utf-8")


class DemoClient(ModelClient):
    """A model client that follows rules instead of running a model. Stateless; safe in any thread or process."""

    def complete(self, messages: list[Message], model: str | None = None) -> Completion:
        """Give the demo model's next reply.

        Args:
            messages: the conversation so far.
            model: ignored; there is only one.

        Returns:
            The reply, with its tokens estimated at four characters each.
        """
        texts = [str(message.get("content") or "") for message in messages]
        reply = _reply(_Conversation.read(messages))
        return Completion(reply, Usage(1, sum(map(len, texts)) // 4, len(reply) // 4))


# --- reading the conversation ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Conversation:
    """What matters of the messages: the task, whether children can run in the background, the turns since the task.

    Attributes:
        turns: own reply → the observations that came back for it.
    """

    task: str | None
    background: bool
    turns: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, messages: Sequence[Message]) -> _Conversation:
        task: str | None = None
        background = False
        turns: list[tuple[str, str]] = []
        for message in messages:
            role, content = message.get("role"), str(message.get("content") or "")
            if role == "system":
                background = background or "blocking=False" in content
            elif task is None:
                task = _task_in(content) if role == "user" else None
            elif role == "assistant":
                turns.append((content, ""))
            elif turns:
                turns[-1] = (turns[-1][0], f"{turns[-1][1]}\n{content}")
        return cls(task, background, tuple(turns))


def _task_in(content: str) -> str | None:
    lines = content.split("\n")
    marks = [line.strip() for line in lines]
    if "<task>" not in marks or "</task>" not in marks:
        return None
    start, end = marks.index("<task>"), len(marks) - 1 - marks[::-1].index("</task>")
    return "\n".join(lines[start + 1 : end]).strip("\r\n") if start < end else None


@dataclass(frozen=True, slots=True)
class _Looked:
    """What the first step found out about the context.

    Attributes:
        kind: ``"text"`` or ``"list"`` (of texts).
        texts, lines: how many there are.
        longest, length: characters of the longest line, and of all.
        odd: how many items are not text.
        begins: the first characters of a text.
    """

    kind: str
    texts: int
    lines: int
    longest: int
    length: int
    odd: int
    begins: str

    @classmethod
    def read(cls, observations: str) -> _Looked | None:
        """Read the marker lines. The last ones count: what a context prints stands before them, in one line each."""
        marks = _LOOKED.findall(observations)
        if not marks:
            return None
        begins = _BEGINS.findall(observations)
        texts, lines, longest, length, odd = map(int, marks[-1][1:])
        return cls(marks[-1][0], texts, lines, longest, length, odd, ast.literal_eval(begins[-1]) if begins else "")

    def pieces(self, task: SearchTask) -> int:
        """How many pieces to give to children; 0 if it is better, or only right, to count directly."""
        if task.spans_lines or len(task.needle) > _MAX_NEEDLE_IN_PROMPT:
            return 0
        if self.kind == "list":
            return min(_MAX_PIECES, self.texts) if self.texts >= _MIN_ITEMS else 0
        # A line that is half of the text leaves nothing to cut: cuts are made at line ends only.
        if self.lines < _MIN_LINES or self.longest * 2 > self.length:
            return 0
        return max(4, min(_MAX_PIECES, self.lines // _LINES_PER_PIECE))


_LOOKED = re.compile(
    r"^[\s>|]*demo: kind=(text|list) texts=(\d+) lines=(\d+) longest=(\d+) length=(\d+) odd=(\d+)\s*$", re.MULTILINE
)
_BEGINS = re.compile(r"""^[\s>|]*demo: begins=('(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")\s*$""", re.MULTILINE)
_STARTED = re.compile(r"^[\s>|]*demo: started=(\d+)\s*$", re.MULTILINE)
_OUT_OF_TURNS = re.compile(r"""^[^'"\n]{0,40}iterations have run out""", re.MULTILINE)
_LAST_TURN = re.compile(r"""^[^'"\n]{0,60}the last one in which code runs""", re.MULTILINE)

# The first line of the code of each step, by which the next turn knows what the last one was.
_LOOK, _START, _COLLECT, _DIRECT = (
    f"# Step: {step}.\n" for step in ("look at the context", "start the children", "collect", "count directly")
)


# --- deciding -------------------------------------------------------------------------------------------------------


def _reply(talk: _Conversation) -> str:
    if talk.task is None:
        return f"{DEMO_NOTICE} It cannot answer a free prompt like this one. {_EXAMPLES}"
    task = read_task(talk.task)
    if isinstance(task, Refusal):
        return _decline(f"{task.reason}. {_EXAMPLES}")
    if not talk.turns:
        return _in_a_piece(task, task.piece) if task.piece else _look(task)
    own, observations = talk.turns[-1]
    if _OUT_OF_TURNS.search(observations):
        return _decline("The iterations ran out before I had the answer.")
    if _DIRECT in own:
        return _decline("My code failed twice, so I have no answer that I could vouch for.")
    looked = _Looked.read(talk.turns[0][1]) if _LOOK in talk.turns[0][0] else None
    if _LOOK in own and looked is not None:
        return _after_look(task, looked, talk, last=_LAST_TURN.search(observations) is not None)
    if _START in own and (started := _STARTED.findall(observations)):
        return _collect(task, int(started[-1]), looked)
    return _direct(task, "That did not work. I will go the simplest way and search directly, in one go.", looked)


def _decline(why: str) -> str:
    return f"FINAL({DEMO_NOTICE} {why})"


def _after_look(task: SearchTask, looked: _Looked, talk: _Conversation, *, last: bool) -> str:
    if looked.kind == "text" and looked.odd:
        return _decline("The context here is neither a text nor a list of texts, so I cannot search it.")
    embedded = _is_prompt(looked, talk)
    pieces = looked.pieces(task)
    if pieces and talk.background and not last and not embedded:
        return _start(task, looked, pieces)
    if embedded:
        why = "The context is the prompt itself, so I leave the question out and search what follows it."
    elif not looked.length:
        why = "The context is empty; I will still search it, to be sure."
    elif task.spans_lines:
        why = "What I look for spans lines, and a cut at a line end could tear it. I will search the whole directly."
    elif not pieces:
        why = "There is little here to divide among children, so I will search directly."
    elif last and talk.background:
        why = "There is no turn left to collect children in, so I will search directly."
    else:
        why = "I have no background children here, so I will search directly."
    return _direct(task, why, looked, embedded=embedded)


def _is_prompt(looked: _Looked, talk: _Conversation) -> bool:
    """Whether the context is the prompt itself: `rlm_query` without `context=` makes it so."""
    begins = looked.begins.lstrip() if looked.kind == "text" else ""
    return len(begins) >= 8 and talk.task is not None and talk.task.strip().startswith(begins)


# --- replies with code ----------------------------------------------------------------------------------------------


def _with_code(words: str, code: str, step: str = "") -> str:
    return f"{words}\n\n```repl\n{step}{code}\n```\n"


def _look(task: SearchTask) -> str:
    words = (
        f"I am the demo model, a rule-based stand-in. I have to find {_shown(task)}. "
        "I have not seen the context yet, so I look at its type, its size and its first lines."
    )
    return _with_code(words, look_code(task), _LOOK)


def _start(task: SearchTask, looked: _Looked, pieces: int) -> str:
    is_list = looked.kind == "list"
    size, where = (f"{looked.texts} texts", "between texts") if is_list else (f"{looked.lines} lines", "at line ends")
    words = (
        f"The context has {size}. I will split it {where} into up to {pieces} pieces, start a child on each of them in "
        "the background, and look at the lines myself while they work."
    )
    return _with_code(words, start_code(task, pieces, is_list=is_list), _START)


def _collect(task: SearchTask, started: int, looked: _Looked | None) -> str:
    words = (
        f"The {started} children are at work. Now I wait for them, collect their answers and add them up. "
        "A piece whose child fails I will search myself."
    )
    return _with_code(words, collect_code(task, _note(looked)), _COLLECT)


def _direct(task: SearchTask, words: str, looked: _Looked | None, *, embedded: bool = False) -> str:
    return _with_code(words, direct_code(task, _note(looked), skip_question=embedded), _DIRECT)


def _note(looked: _Looked | None) -> str:
    """What the reader of the answer must know about the context."""
    if looked and not looked.length:
        return "The context is empty."
    if looked and looked.odd:
        return "Items that are not text were searched in the form in which Python prints them."
    return ""


def _in_a_piece(task: SearchTask, piece: Piece) -> str:
    words = f"This is part {piece.number} of {piece.total}: I look for {_shown(task)} in it."
    return _with_code(words, piece_code(task))


def _shown(task: SearchTask) -> str:
    needle = task.needle if len(task.needle) <= SHOWN_NEEDLE else task.needle[:SHOWN_NEEDLE] + "…"
    return f"{'what looks like ' if task.kind is Kind.CODES else ''}{needle!r}"
