"""What the Tab key offers on a line of ``%rlm`` and on the first line of ``%%rlm``.

A matcher of IPython's completer, run by whatever thread serves a completion. It looks at what this process knows already (no network, no
files), and when something goes wrong, it has nothing to offer: a completion must neither raise nor make anybody wait.
"""

from __future__ import annotations

import logging
import re
from argparse import Action, ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher

from rlm_kernel.clients.specs import DEMO, KNOWN_PROVIDERS
from rlm_kernel.jupyter.magics.rlm import COMMANDS, cell_parser
from rlm_kernel.session.config import SETTINGS
from rlm_kernel.session.session import RLMSession

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_log = logging.getLogger(__name__)

_LINE = re.compile(r"\s*(?:[^=%]+=\s*)?%rlm\s+(?P<rest>.*)")
_BARE_LINE = re.compile(r"\s*rlm\s+(?P<rest>.*)")
_CELL = re.compile(r"%%rlm\s+(?P<rest>.*)")

_PLAIN_NAME = re.compile(r"[^\s\-'\"\\{}$][^\s'\"\\{}$]*")
"""A name that can be typed as it is: no quotes needed, and nothing in it that IPython expands."""

_PRIORITY = 50
"""Before IPython's own matchers, which then need not run: Jedi takes its time over what is no Python."""

_LIMIT = 200
"""Completions that are offered at most."""

_FOR_LIVE = ("cancel", "send")
"""Commands that have nothing to do with children that have ended."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One completion: the text that takes the place of what has been typed of the word, and what kind of thing it is."""

    text: str
    kind: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a word stands: of which command it is an argument (empty: ``%%rlm``), and what was given before it."""

    command: str
    given: tuple[str, ...] = ()


class RLMCompleter:
    """Completes the magics of one session.

    Args:
        shell: whose completer it joins.
        session: whose children, settings and models it offers.
    """

    def __init__(self, shell: InteractiveShell, session: RLMSession) -> None:
        self._shell = shell
        self._session = session
        self._values: dict[str, Callable[[Place], Iterable[Offer]]] = {
            "ids": self._children,
            "id": self._children,
            "spec": self._specs,
            "model": self._models,
            "setting": self._settings,
            "topic": self._commands,
            "context": self._variables,
            "into": self._variables,
        }

    def register(self) -> None:
        """Join the shell's completer."""
        self._shell.Completer.custom_matchers.append(self.match)

    def unregister(self) -> None:
        """Leave it again."""
        matchers = self._shell.Completer.custom_matchers
        if self.match in matchers:
            matchers.remove(self.match)

    @context_matcher(priority=_PRIORITY, identifier="rlm")  # type: ignore[untyped-decorator]
    def match(self, context: CompletionContext) -> SimpleMatcherResult:
        """Answer IPython's completer."""
        try:
            typed, offers = self.complete(context.full_text, context.cursor_line, context.cursor_position)
        except Exception:
            _log.debug("no completion", exc_info=True)
            typed, offers = "", []
        return {
            "completions": [SimpleCompletion(text=offer.text, type=offer.kind) for offer in offers],
            "matched_fragment": typed,
            "ordered": True,
            "suppress": bool(offers),
        }

    def complete(self, text: str, line_number: int, column: int) -> tuple[str, list[Offer]]:
        """Complete a word.

        Args:
            text: the cell, or the line that the cursor is in.
            line_number, column: where the cursor is in it, from 0.

        Returns:
            what has been typed of the word (or of that part of it that is completed), and what could stand there.
        """
        lines = text.split("\n")
        before = lines[line_number][:column]
        first = next((number for number, line in enumerate(lines) if line.strip()), line_number)
        if line_number > first and lines[first].startswith("%%rlm"):
            return "", []  # within a task
        if found := _LINE.fullmatch(before) or self._match_automagic(before):
            typed, offers = self._of_line(found["rest"])
        elif (found := _CELL.fullmatch(before)) and line_number == first:
            typed, offers = self._of_arguments(found["rest"], cell_parser(), Place(""))
        else:
            return "", []
        fitting = {offer.text: offer for offer in offers if offer.text.startswith(typed)}
        return typed, list(fitting.values())[:_LIMIT]

    def _match_automagic(self, before: str) -> re.Match[str] | None:
        """Match ``rlm …`` without the percent sign, where IPython takes it for the magic."""
        automagic = self._shell.automagic and "rlm" not in self._shell.user_ns
        return _BARE_LINE.fullmatch(before) if automagic else None

    def _of_line(self, rest: str) -> tuple[str, Iterable[Offer]]:
        name, space, rest = rest.partition(" ")
        if not space:
            return name, self._commands(Place(""))
        command = COMMANDS.get(name)
        if command is None:
            return "", ()
        rest = rest.lstrip()
        if name == "config" and "=" in rest:
            setting, _, value = rest.partition("=")
            return value.lstrip(), self._setting_values(setting.strip())
        if command.tail == "text" and " " in rest:
            return "", ()  # within the text of a message
        return self._of_arguments(rest, command.parser, Place(name))

    def _of_arguments(self, rest: str, parser: ArgumentParser, place: Place) -> tuple[str, Iterable[Offer]]:
        *words, typed = rest.split(" ")
        options = {name: action for action in parser._actions for name in action.option_strings}
        given: list[str] = []
        option: Action | None = None
        for word in filter(None, words):
            if option is not None:
                option = None  # it has got its value
            elif word in options:
                option = options[word] if options[word].nargs != 0 else None
            elif not word.startswith("-"):
                given.append(word)
        place = Place(place.command, tuple(given))
        name, equals, value = typed.partition("=")
        if option is None and equals and name in options:
            option, typed = options[name], value
        if option is not None:
            return typed, self._of_action(option, place)
        left = [name for name in options if name.startswith("--") and name not in words]
        flags = [Offer(name, "option") for name in left]
        if typed.startswith("-"):
            return typed, [*flags, Offer("--help", "option")]
        action = _positional(parser, len(given))
        if action is not None and action.dest not in self._values:
            return "", ()  # a file's name, or a text: not ours to know
        return typed, [*(() if action is None else self._of_action(action, place)), *flags]

    def _of_action(self, action: Action, place: Place) -> Iterable[Offer]:
        values = self._values.get(action.dest)
        return self._setting_values(action.dest) if values is None else values(place)

    # -- what there is to offer

    def _commands(self, place: Place) -> Iterator[Offer]:
        yield from (Offer(name, "command") for name in COMMANDS)

    def _children(self, place: Place) -> Iterator[Offer]:
        """Offer children by id and name, with their state; those that have not ended first."""
        statuses = self._session.supervisor.status()
        bearers = Counter(child.name for child in statuses)
        for child in sorted(statuses, key=lambda child: child.done):
            if (place.command in _FOR_LIVE and child.done) or {child.id, child.name} & set(place.given):
                continue
            yield Offer(child.id, str(child.state))
            if bearers[child.name] == 1 and _PLAIN_NAME.fullmatch(child.name):
                yield Offer(child.name, str(child.state))
        if place.command == "export":
            yield Offer("root", "latest %%rlm")

    def _settings(self, place: Place) -> Iterator[Offer]:
        yield from (Offer(f"{name}=", "setting") for name in SETTINGS)

    def _setting_values(self, name: str) -> Iterator[Offer]:
        if name not in SETTINGS:
            return
        what, value = SETTINGS[name].what, self._session.settings[name]
        if name == "model":
            yield from self._specs(Place("config"))
        elif name == "client_factory":
            yield from self._names(lambda each: callable(each) and not isinstance(each, type))
        elif isinstance(value, bool):
            yield from (Offer(word, "value") for word in ("true", "false"))
        elif isinstance(value, int | float | str):
            yield Offer(str(value), "value now")
        if value is None or "none" in what:
            yield Offer("none", "value")

    def _seen_models(self) -> Iterator[str]:
        """Give the names of models that this session has to do with."""
        configured = self._session.settings["model"]
        if configured:
            yield configured
        yield from (child.model for child in self._session.supervisor.status() if child.model)

    def _specs(self, place: Place) -> Iterator[Offer]:
        """Offer model specs: those that are known to be in use, then what a spec begins with."""
        for name in self._seen_models():
            if name.partition("/")[0] in KNOWN_PROVIDERS:
                yield Offer(name, "model")
        yield Offer(DEMO, "model")
        yield from (Offer(f"{provider}/", "provider") for provider in KNOWN_PROVIDERS if provider != DEMO)

    def _models(self, place: Place) -> Iterator[Offer]:
        """Offer what a single call may name: also the name alone, as its provider knows it."""
        yield from (Offer(name, "model") for name in self._seen_models())
        yield from self._specs(place)

    def _variables(self, place: Place) -> Iterator[Offer]:
        yield from self._names(lambda each: not callable(each) and not isinstance(each, ModuleType))

    def _names(self, fits: Callable[[object], bool]) -> Iterator[Offer]:
        """Offer variables of the user's."""
        hidden = self._shell.user_ns_hidden
        missing = object()
        for name, value in list(self._session.namespace.items()):
            if not name.startswith("_") and hidden.get(name, missing) is not value and fits(value):
                yield Offer(name, type(value).__name__)


def _positional(parser: ArgumentParser, index: int) -> Action | None:
    """Return the argument that takes the positional word of that number."""
    actions = parser._get_positional_actions()
    for action in actions[:index]:
        if action.nargs in ("*", "+"):
            return action
    return actions[index] if index < len(actions) else None
