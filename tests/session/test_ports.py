"""Promises of `rlm_kernel.session.ports` and `rlm_kernel.session.tasks` that need no process."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import pytest

from rlm_kernel import errors
from rlm_kernel.session.ports import ChildRequest, LinkPort, Surroundings
from rlm_kernel.session.tasks import (
    PREVIEW_LENGTH,
    ChildTask,
    Inherited,
    pack,
    pickle_factory,
    preview,
    sendable_text,
    unpack_inherited,
    unpack_task,
)
from rlm_kernel.wire import messages as m
from rlm_kernel.wire.channel import ChannelClosed, close_fds


class FakeLink:
    """Answers each request with a prepared reply, or raises it; keeps what was asked."""

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.asked: list[Any] = []

    def request(self, build: Any, fds: tuple[int, ...] = ()) -> m.Reply:
        self.asked.append(build(1))
        close_fds(fds)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


def port(*replies: Any) -> LinkPort:
    return LinkPort(FakeLink(*replies))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kind", ["UnknownHandleError", "StaleHandleError", "EpisodeClosing", "NurseryError", "UsageMistake", "RLMError"]
)
def test_what_the_supervisor_raises_is_raised_in_the_child(kind: str) -> None:
    with pytest.raises(errors.RLMError, match="said so") as raised:
        port(m.Reply(1, error="said so", error_class=kind)).status(None)
    assert type(raised.value) is getattr(errors, kind)


def test_a_limit_keeps_its_name_and_value() -> None:
    reply = m.Reply(1, error="too many", error_class="ChildLimitError", limit="max_children_total", limit_value=3)
    with pytest.raises(errors.ChildLimitError, match="too many") as raised:
        port(reply).start([ChildRequest("p")])
    assert (raised.value.limit, raised.value.value) == ("max_children_total", 3)


def test_an_error_of_an_unknown_class_is_one_of_ours_all_the_same() -> None:
    with pytest.raises(errors.RLMError, match="what"):
        port(m.Reply(1, error="what", error_class="NoSuchError")).status(None)


@pytest.mark.parametrize(
    "outcome", [m.Reply(1), m.Reply(1, error="x", error_class="UnknownHandleError"), ChannelClosed("gone")], ids=repr
)
def test_whoever_awaits_a_child_is_woken_whatever_becomes_of_the_wait(outcome: Any) -> None:
    woken = threading.Event()
    assert port(outcome).call_when_done(("c1", None), woken.set)
    assert woken.wait(5)


def test_a_failed_start_of_a_child_closes_what_was_opened() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(errors.PayloadError):
        port().start([ChildRequest("p", context="x" * 100_000), ChildRequest("q", context=threading.Lock())])
    assert len(os.listdir("/proc/self/fd")) == before


def test_surroundings_are_those_of_the_moment(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_NOW", "1")
    monkeypatch.setattr(sys, "path", ["/of/now"])
    here = Surroundings.now()
    assert (here.cwd, here.environ["OF_NOW"], here.sys_path) == (str(tmp_path.resolve()), "1", ("/of/now",))
    monkeypatch.setenv("OF_NOW", "2")
    assert here.environ["OF_NOW"] == "1"


def test_what_is_no_utf8_is_left_out_of_the_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIRD", "\udcff")
    monkeypatch.setattr(sys, "path", ["/ok", "/\udcff"])
    here = Surroundings.now()
    assert "WEIRD" not in here.environ
    assert here.sys_path == ("/ok",)


def test_a_directory_whose_name_is_no_utf8_is_a_readable_error(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    weird = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(weird)
    monkeypatch.chdir(os.fsdecode(weird))
    with pytest.raises(errors.PayloadError, match="no valid UTF-8"):
        Surroundings.now()


@pytest.mark.parametrize("prompt", ["p", "é😀", "lone \ud800", "x" * 100_000])
def test_a_task_arrives_as_it_was(prompt: str) -> None:
    task = unpack_task(pack(ChildTask.of(prompt, "m", None)))
    assert (task.prompt, task.model, task.context) == (prompt, "m", None)


def test_what_a_tree_inherits_arrives_as_it_was() -> None:
    inherited = Inherited(b"\x00factory", "root", None, 3, 30, None)
    assert unpack_inherited(pack(inherited)) == inherited


def test_a_factory_that_cannot_be_pickled_says_what_to_do() -> None:
    lock = threading.Lock()
    with pytest.raises(errors.PayloadError, match="Build the client inside the factory"):
        pickle_factory(lambda: lock)


def test_a_preview_is_one_short_line() -> None:
    assert preview("a\n  b\tc") == "a b c"
    assert len(preview("word " * 1000)) == PREVIEW_LENGTH
    assert preview("word " * 1000).endswith("…")
    assert preview("\ud800") == "\\ud800"


def test_text_for_a_channel_keeps_everything_that_is_text() -> None:
    assert sendable_text("é😀\n") == "é😀\n"
    assert sendable_text("a\udcffb").encode() == b"a\\udcffb"
