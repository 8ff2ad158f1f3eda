"""The notation by which a prompt steers the replies of `model_server`.

Directives in a prompt::

    [[delay 1.5]]        wait that many seconds first          [[block]]  [[block NAME]]  wait for release() (of NAME)
    [[status 500]]       fail; also [[status 429 retry-after 0.2]]
    [[garbage]]          an HTML page with status 200          [[bad-json]]       half a JSON document
    [[close]]            close the connection, no reply        [[truncate]]       close it in the middle of the reply
    [[empty-choices]]  [[no-choices]]  [[null-content]]  [[no-usage]]   replies that lack something
    [[usage 100 20]]     report these token counts
    [[reply: TEXT]]      answer with TEXT                      [[code: PYTHON]]   answer with a ```repl block of it
    [[reply64: …]]  [[code64: …]]   the same in base64, for texts whose brackets do not balance
    [[turn]]             what follows is for the next turn

``once`` within a directive limits it to the first time that this prompt is seen:
``[[status 429 retry-after 0.2 once]]``. A turn may hold several directives. The number of assistant messages so far
selects the turn; the last one goes on for ever.

Runtimes repeat a task (as a preview of the context, for instance), which would double its turns. So put a script of
several turns between ``[[script]]`` and ``[[/script]]``: the first whole one counts. `script`, `code` and `reply` write
that notation, and nest: ``script(code(f"print(rlm_query({script(reply('42'))!r}))"), reply("FINAL(ok)"))``.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_NAME = re.compile(r"\[\[(/?[a-z][a-z0-9-]*)(?=[\s:\]])")
_ENVELOPE = re.compile(r"\[\[(/?)script\]\]")
_FAULTS = {"garbage", "bad-json", "close", "truncate", "empty-choices", "no-choices", "null-content", "no-usage"}
_TEXTS = {"reply", "reply64", "code", "code64"}
_WORDS = _FAULTS | {"delay", "block", "status", "usage", "turn"}


@dataclass(slots=True)
class Turn:
    """What is said about one turn: texts to answer with, and the other directives with their words."""

    texts: list[str] = field(default_factory=list)
    directives: list[tuple[str, list[str]]] = field(default_factory=list)


def script(*turns: str) -> str:
    """Write a script: each argument (one or more directives) is one turn."""
    return f"[[script]]{'[[turn]]'.join(turns)}[[/script]]"


def code(python: str) -> str:
    """Write a turn that answers with a block of code."""
    return _text_directive("code", python)


def reply(text: str) -> str:
    """Write a turn that answers with a text, such as ``FINAL(42)``."""
    return _text_directive("reply", text)


def _text_directive(name: str, text: str) -> str:
    if _balances(text) and not _ENVELOPE.search(text):
        return f"[[{name}: {text}]]"
    # An inner script is hidden as well, lest it be taken for the first whole one.
    return f"[[{name}64: {base64.b64encode(text.encode()).decode()}]]"


def _balances(text: str) -> bool:
    depth = 0
    for character in text:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth < 0:
            return False
    return depth == 0


def parse_turns(text: str) -> list[Turn]:
    """Parse the directives in a text; an empty list if there are none."""
    found = list(_directives(_first_script(text)))
    if not found:
        return []
    turns = [Turn()]
    for name, argument in found:
        if name == "turn":
            turns.append(Turn())
        elif name in _TEXTS:
            decoded = base64.b64decode(argument).decode() if name.endswith("64") else argument
            turns[-1].texts.append(f"```repl\n{decoded}\n```" if name.startswith("code") else decoded)
        else:
            turns[-1].directives.append((name, argument.split()))
    return turns


def _first_script(text: str) -> str:
    """Return what is inside the first whole envelope, envelopes within it included; without one, the whole text.

    A beginning without an end is passed over: a preview may have cut it.
    """
    marks = list(_ENVELOPE.finditer(text))
    for number, first in enumerate(marks):
        depth = 0
        for mark in marks[number:] if not first[1] else ():
            depth += -1 if mark[1] else 1
            if depth == 0:
                return text[first.end() : mark.start()]
    return text


def _directives(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while (match := _NAME.search(text, position)) is not None:
        position = match.end()
        name = match[1]
        if name in _TEXTS and text[position] == ":":
            end = _end_of_text(text, position + 1)
            if end >= 0:
                yield name, text[position + 1 : end].strip()
                position = end + 2
        elif name in _WORDS and (end := text.find("]]", position)) >= 0:
            yield name, text[position:end].strip()
            position = end + 2


def _end_of_text(text: str, start: int) -> int:
    """Find the ``]]`` that ends a text: the first before which its brackets balance, else the first of all."""
    depth = 0
    for index in range(start, len(text) - 1):
        if depth == 0 and text.startswith("]]", index):
            return index
        depth += {"[": 1, "]": -1}.get(text[index], 0)
    return text.find("]]", start)
