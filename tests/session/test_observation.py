"""Promises of `rlm_kernel.session.observation`."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from IPython.core.formatters import DisplayFormatter

from rlm_kernel.session import observation
from rlm_kernel.session.observation import Observer, observe
from tests.session.conftest import HELD, Root, final


class RanCode(BaseException):
    """An observation ran code of the user's."""


class Odd:
    """Fails a test whose code asks it for anything."""

    def _refuse(self, *_: object) -> Any:
        raise RanCode

    __repr__ = __str__ = __len__ = __iter__ = __eq__ = __lt__ = __bool__ = _refuse
    __hash__ = _refuse
    __getattr__ = _refuse


class OddText(str):
    __len__ = __repr__ = __str__ = __getitem__ = __eq__ = __iter__ = Odd._refuse


class OddMeta(type):
    __name__ = property(Odd._refuse)
    __class__ = property(Odd._refuse)


class Nameless(metaclass=OddMeta):
    __class__ = property(Odd._refuse)


def seen(root: Root) -> dict[str, Any]:
    """Observe, and send it through JSON as strictly as a message does."""
    found = observe(root.session)
    text = json.dumps(found, allow_nan=False, ensure_ascii=False)
    text.encode()
    again: dict[str, Any] = json.loads(text)
    assert again == found
    return again


def test_an_episode_without_an_answer(root: Root) -> None:
    root.namespace.update(x=1, _hidden=2, context=["a", {"b": 2}])
    found = seen(root)
    assert (found["episode_id"], found["done"], found["final_answer"]) == (root.session.episode_id, False, None)
    assert "final_value" not in found
    assert found["variables"] == {"x": "int"}, "ours and those with an underscore are not shown"
    assert found["context"] == {"type": "list", "length": 2, "preview": "['a', {'b': 2}]"}
    assert found["children"] == {"total": 0, "live": 0, "counts": {}, "shown": []}
    assert found["partial_answer"] is found["cleanup_failure"] is None


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), ("", ""), (None, "None"), (False, "False"), ([1, {"a": None}], "[1, {'a': None}]")]
)
def test_the_answer_is_shown_as_text_and_as_a_value(root: Root, value: Any, text: str) -> None:
    root.say_final(value)
    found = seen(root)
    assert (found["done"], found["final_answer"], found["final_value"]) == (True, text, value)
    assert (found["final_answer_length"], found["final_answer_type"]) == (len(text), type(value).__name__)


DEEP: list[Any] = []
for _ in range(5000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "value",
    [float("nan"), 2**70, {1: 2}, (1, 2), b"x", list(range(5000)), "x" * 200_000, DEEP[0][0], {"a": Nameless()}],
    ids=lambda value: type(value).__name__,
)
def test_an_answer_that_json_cannot_carry_is_shown_as_text_only(root: Root, value: Any) -> None:
    root.say_final(value)
    found = seen(root)
    assert found["done"] is True
    assert found["final_answer"]
    assert "final_value" not in found


def test_an_answer_keeps_the_text_that_it_had_when_it_was_given(root: Root) -> None:
    answer = [1]
    root.say_final(answer)
    answer.append(2)
    assert seen(root)["final_answer"] == "[1]"


def test_a_long_answer_is_cut_and_says_how_long_it_was(root: Root) -> None:
    root.say_final("x" * 3_000_000)
    found = seen(root)
    assert len(found["final_answer"]) == observation.FINAL_LIMIT
    assert found["final_answer_length"] == 3_000_000


def test_odd_objects_are_named_and_nothing_of_them_is_run(root: Root) -> None:
    """Raising SystemExit, blocking, lying: no method of an object of the user's is called."""
    root.namespace.update(odd=Odd(), text=OddText("abc"), nameless=Nameless(), lone="\ud800", context=OddText("abc"))
    names: dict[Any, Any] = root.namespace
    names[1] = names["\udcff"] = 2
    root.namespace["answer"]["content"] = Odd()
    found = seen(root)
    assert found["variables"] == {"odd": "Odd", "text": "OddText", "nameless": "Nameless", "lone": "str", "?": "int"}
    assert found["context"] == {"type": "OddText", "length": 3, "preview": "abc"}
    assert found["partial_answer"] is None
    for odd in (Odd(), Nameless(), [Odd()], {"a": Odd()}, {1, 2}, (), DEEP):
        root.namespace["context"] = odd
        assert seen(root)["context"]["type"] == type.__dict__["__name__"].__get__(type(odd))
    assert root.session.finalization.answer_dict.pop("content") is not None


@pytest.mark.parametrize("size", [0, 7, 10**6])
def test_a_preview_of_a_large_context_is_short_and_takes_no_time(root: Root, size: int) -> None:
    root.namespace["context"] = [{"k": list(range(50)), b"x" * size: "y" * size}] * max(1, size)
    began = time.monotonic()
    context = seen(root)["context"]
    assert time.monotonic() - began < 0.2
    assert context["length"] == max(1, size)
    assert len(context["preview"]) <= observation.PREVIEW_LIMIT
    assert context["preview"].startswith("[{'k': [0, 1, 2")


@pytest.mark.parametrize(
    ("content", "shown"), [("so far", "so far"), ("", None), (12, "12"), (None, None), ([0], "[0]")]
)
def test_a_partial_answer_is_shown(root: Root, content: Any, shown: str | None) -> None:
    root.namespace["answer"]["content"] = content
    assert seen(root)["partial_answer"] == shown


def test_of_many_variables_the_newest_are_shown(root: Root) -> None:
    root.namespace.update({f"v{i}": i for i in range(10_000)})
    found = seen(root)
    assert found["variables_total"] == 10_000
    assert list(found["variables"])[-1] == "v9999"
    assert len(found["variables"]) == observation.VARIABLES


def test_variables_that_another_thread_makes_meanwhile_break_nothing(root: Root) -> None:
    stop = threading.Event()

    def make() -> None:
        for i in range(10**9):
            root.namespace[f"v{i % 5000}_{i}"] = i
            root.namespace.pop(f"v{(i - 500) % 5000}_{i - 500}", None)
            if stop.is_set():
                return

    thread = threading.Thread(target=make)
    thread.start()
    try:
        assert all(observe(root.session)["variables"] is not None for _ in range(300))
    finally:
        stop.set()
        thread.join()


def test_children_are_counted_and_the_live_and_latest_are_shown(root: Root, server: Any, monkeypatch: Any) -> None:
    root.scripted(final("a"))
    assert root.rlm_query_batched(["x"] * 3) == ["a"] * 3
    root.served(server, monkeypatch)
    handle = root.rlm_query(HELD, blocking=False, name="held one")
    server.wait_for_request("block held")
    monkeypatch.setattr(observation, "CHILDREN", 2)
    children = seen(root)["children"]
    assert (children["total"], children["live"]) == (4, 1)
    assert children["counts"] == {"completed": 3, "running": 1}
    last, live = children["shown"]
    assert (last["state"], last["done"], last["exited"], last["error"]) == ("completed", True, True, None)
    assert live.pop("elapsed_s") >= 0
    assert live == {
        "id": handle.id, "name": "held one", "state": "running", "done": False, "exited": False, "depth": 1,
        "parent_id": None, "error": None,
    }  # fmt: skip
    assert seen(root)["usage"]["calls"] == 3
    root.rlm_cancel(handle)


def test_a_failed_cleanup_is_shown_with_its_survivors(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlm_kernel.errors import ChildCleanupError

    monkeypatch.setattr(root.session.lifecycle, "failure", ChildCleanupError("not gone", (12, 13)))
    assert seen(root)["cleanup_failure"] == {"message": "not gone", "survivors": [12, 13]}


def test_a_part_that_fails_is_null_and_the_others_are_there(
    root: Root, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(root.session.supervisor, "status", lambda: 1 / 0)
    found = seen(root)
    assert found["children"] is None
    assert found["done"] is False
    assert "ZeroDivisionError" in caplog.text


def test_the_observer_shows_as_json_and_can_be_used_as_a_dict(root: Root) -> None:
    observer = Observer(root.session)
    found = observer.observation()
    data, _ = DisplayFormatter().format(found)
    assert data["application/json"] == dict(found) == observe(root.session)
    assert "episode_id" in data["text/plain"]
    assert found["done"] is False
    assert root.session.episode_id in repr(observer)
