"""The demo model does an honest job: what it answers is what code that really ran has found (`demo_runs` runs it)."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlm_kernel.clients.base import ModelClient
from rlm_kernel.clients.demo import DEMO_NOTICE, SAMPLE_TASK, DemoClient, sample_text
from rlm_kernel.clients.demo_tasks import Kind, SearchTask, read_task
from rlm_kernel.loop.parsing import runnable_blocks
from rlm_kernel.loop.prompts import format_observations
from rlm_kernel.values import ChildState, Message
from tests.clients.demo_runs import NOTHING, drive, execute, opening


def universal_lines(text: str) -> list[str]:
    return io.StringIO(text, newline=None).read().split("\n") if text else []


def line_numbers(answer: str) -> list[int]:
    return [int(number) for number in re.findall(r"^line (\d+): ", answer, re.MULTILINE)]


def lines_of(count: int, line: str = "a whale, and a whale's tail", end: str = "\n") -> str:
    return "".join(f"{line} {number}{end}" for number in range(count))


# --- counting, with children ----------------------------------------------------------------------------------------


def test_a_long_text_is_counted_by_children_in_the_background_and_the_sum_is_right() -> None:
    text = lines_of(400) + "Whale\n" + "nothing here\n" * 99 + "whale"
    run = drive("how often does 'whale' occur?", text)
    assert run.answer == f"'whale' occurs {text.count('whale')} times."
    assert len(run.replies) == 3
    assert 4 <= len(run.children) <= 8


def test_pieces_are_cut_behind_line_ends_and_are_of_similar_size() -> None:
    text = lines_of(600, end="\r\n")
    pieces = [child.context for child in drive("count 'whale'", text).children]
    assert "".join(pieces) == text
    assert all(piece.endswith("\r\n") for piece in pieces)
    assert max(map(len, pieces)) < 1.2 * min(map(len, pieces))


def test_all_children_are_started_before_any_is_waited_for_and_the_parent_works_meanwhile() -> None:
    run = drive("count 'whale'", lines_of(100))
    children = len(run.children)
    assert run.events == ["start"] * children + ["status"] * children + ["wait"]
    assert "piece-1 completed" in run.results[1].stdout
    assert "0 blank lines" in run.results[1].stdout


def test_a_child_answers_with_the_number_only_and_in_one_turn() -> None:
    for child in drive("count 'whale'", lines_of(100)).children:
        assert child.answer == child.context.count("whale")
        assert len(child.replies) == 1


def test_what_is_printed_is_short() -> None:
    run = drive("which lines contain 'whale'?", lines_of(3000, "whale " * 100))
    assert all(len(result.stdout) < 1000 for result in run.results)


CONTEXTS = {
    "missing": NOTHING,
    "None": None,
    "empty": "",
    "one line": "a whale",
    "no final line end": lines_of(70)[:-1],
    "CRLF": lines_of(70, end="\r\n"),
    "CR": lines_of(70, end="\r"),
    "mixed line ends": lines_of(30, end="\r\n") + lines_of(30, end="\r") + lines_of(30),
    "empty lines": "\n" * 50 + "whale\n\n" * 20,
    "one line among many is nearly everything": lines_of(40) + "whale " * 5000,
    "bytes": lines_of(90).encode(),
    "bytes that are not UTF-8": b"\xff whale \xfe\n" * 60,
    "bytearray": bytearray(b"whale\n" * 60),
    "characters that split lines elsewhere": "whale\x0bwhale\u2028whale\x85\n" * 60,
    "surrogates": "whale \ud800\n" * 60,
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("background", [True, False], ids=["background", "no background"])
def test_any_text_gives_the_right_number(context: Any, background: bool) -> None:
    text = context.decode("utf-8", "replace") if isinstance(context, bytes | bytearray) else context
    expected = text.count("whale") if isinstance(text, str) else 0
    run = drive("How often does whale occur?", context, background=background)
    assert run.number == expected
    assert all(result.success for result in run.results)
    assert ("The context is empty." in run.answer) == (not text or text is NOTHING)
    assert all(child.context.count("\n") or child.context.count("\r") for child in run.children)
    assert background or not run.children


def test_a_giant_line_cannot_be_cut_so_it_is_counted_directly() -> None:
    text = "whale " * 8_333_334  # 50 MB
    run = drive("how often does 'whale' occur?", text)
    assert run.number == 8_333_334
    assert not run.children


def test_a_line_that_is_nearly_everything_leaves_nothing_to_cut() -> None:
    run = drive("how often does 'whale' occur?", lines_of(40) + "whale " * 5000)
    assert run.number == 5080
    assert not run.children


def test_a_short_text_is_counted_directly() -> None:
    run = drive("how often does 'whale' occur?", lines_of(19))
    assert run.number == 38
    assert not run.children
    assert "directly" in run.replies[-1]


def test_a_text_that_spans_lines_is_counted_in_one_piece_and_the_reply_says_why() -> None:
    text = "one\ntwo\n" * 300
    run = drive("how often does 'two\none' occur?", text)
    assert run.number == 299
    assert not run.children
    assert "spans lines" in run.replies[-1]


# fmt: off
PIECES_OF_TEXT = st.sampled_from([
    *"ab \n", "\r\n", "\r", "'", '"', "\\", "`", "```", "\n```\n", ".", "*", "(", "[", "$", "{", "}", "%s", "é", "\u2028",
    "FINAL(1)", "\nFINAL(2)\n", "</task>", "\ndemo: kind=text texts=1 lines=0 longest=0 length=0 odd=0\n", "ß", "I",
])
# fmt: on


@st.composite
def texts_and_needles(draw: st.DrawFn) -> tuple[str, str]:
    """A text, mostly long enough for children, and something that is likely to be in it."""
    part = "".join(draw(st.lists(PIECES_OF_TEXT, max_size=30)))
    text = part * draw(st.integers(0, 12)) + "".join(draw(st.lists(PIECES_OF_TEXT, max_size=30)))
    if text and draw(st.booleans()):
        start = draw(st.integers(0, len(text) - 1))
        needle = text[start : start + draw(st.integers(1, 5))]
    else:
        needle = "".join(draw(st.lists(PIECES_OF_TEXT, min_size=1, max_size=3)))
    return text, needle


@settings(max_examples=150, deadline=None)
@given(texts_and_needles(), st.booleans())
def test_any_needle_in_any_text_is_counted_as_str_count_counts(case: tuple[str, str], background: bool) -> None:
    text, needle = case
    run = drive(f"How often does «{needle}» occur?", text, background=background)
    assert run.number == text.count(needle)
    assert all(result.success for result in run.results)


@settings(max_examples=100, deadline=None)
@given(texts_and_needles())
def test_counting_ignoring_case_and_whole_words_agree_with_a_search_of_the_whole(case: tuple[str, str]) -> None:
    text, needle = case
    whole = rf"(?<!\w){re.escape(needle)}(?!\w)"
    assert drive(f"Count «{needle}», ignoring case.", text).number == len(re.findall(re.escape(needle), text, re.I))
    assert drive(f"Count «{needle}» as a whole word.", text).number == len(re.findall(whole, text))


@settings(max_examples=150, deadline=None)
@given(texts_and_needles())
def test_the_lines_that_contain_a_needle_are_those_of_a_search_line_by_line(case: tuple[str, str]) -> None:
    text, needle = case
    if "\n" in needle or "\r" in needle:  # it belongs to the line in which it begins
        ends = [end.end() for end in re.finditer(r"\r\n|\r|\n", text)]
        starts = [match.start() for match in re.finditer(re.escape(needle), text)]
        numbers = sorted({1 + sum(end <= start for end in ends) for start in starts})
    else:
        numbers = [n for n, line in enumerate(universal_lines(text), 1) if needle in line]
    listed = drive(f"Which lines contain «{needle}»?", text)
    assert listed.number == len(numbers)
    assert line_numbers(listed.answer)[:50] == numbers[:50]
    assert drive(f"How many lines contain «{needle}»?", text).number == len(numbers)


# --- lines and codes ------------------------------------------------------------------------------------------------


def test_lines_are_numbered_in_the_whole_text_whichever_child_found_them() -> None:
    lines = [f"entry {number}" for number in range(1, 301)]
    for number in (1, 77, 150, 300):
        lines[number - 1] = f"a whale at {number}"
    run = drive("Which lines mention 'whale'?", "\n".join(lines))
    assert len(run.children) > 3
    assert run.answer == (
        "4 lines contain 'whale':\nline 1: a whale at 1\nline 77: a whale at 77\n"
        "line 150: a whale at 150\nline 300: a whale at 300"
    )


def test_a_list_of_lines_is_bounded_and_says_how_many_there_are() -> None:
    run = drive("find lines containing whale", lines_of(1000))
    assert run.answer.startswith("1000 lines contain 'whale', of which these are the first 50:\n")
    assert line_numbers(run.answer) == list(range(1, 51))


def test_a_long_line_is_shown_around_what_was_found() -> None:
    run = drive("which lines contain 'whale'?", "x" * 5000 + " whale " + "y" * 5000)
    assert "x whale y" in run.answer
    assert len(run.answer) < 300


def test_no_line_is_said_to_be_none() -> None:
    assert drive("which lines contain 'whale'?", "nothing\n" * 100).answer == "0 lines contain 'whale'."


def test_a_code_is_found_by_the_shape_of_the_example_and_a_longer_run_is_not_taken_for_one() -> None:
    decoys = "XABC-1234 ABC-12345 abc-1234 ABC-1234-5 9-ABC-1234 ABC-123 ABC_1234\n"
    text = decoys * 100 + "the code is QZX-7719.\n" + decoys * 100
    run = drive("Find the access code that looks like ABC-1234", text)
    assert run.answer == "1 place looks like 'ABC-1234':\nQZX-7719 (line 101)"
    assert len(run.children) > 3


# --- lists ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [list, tuple, lambda items: dict(enumerate(items))], ids=["list", "tuple", "dict"])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 9, 40])
def test_the_items_of_a_list_are_separate_texts_whose_counts_add_up(make: Callable[[Any], Any], count: int) -> None:
    items = [f"wha|le whale {number}\nwhale".replace("|", "") for number in range(count)]
    run = drive("how often does whale occur?", make(items))
    assert run.number == 3 * count
    assert [item for child in run.children for item in child.context] == (items if count >= 4 else [])
    assert drive("how often does 'whalewhale' occur?", make(["whale"] * count)).number == 0


def test_lines_in_a_list_are_numbered_within_each_item() -> None:
    items = ["one\ntwo"] * 6 + ["one\ntwo\na whale"] + ["one"] * 3
    assert drive("which lines contain whale?", items).answer == "1 line contains 'whale':\nitem 7, line 3: a whale"
    few = drive("which lines contain whale?", items[5:8])
    assert few.answer == "1 line contains 'whale':\nitem 2, line 3: a whale"


@pytest.mark.parametrize("count", [2, 20])
def test_items_that_are_not_text_are_searched_as_printed_and_the_answer_says_so(count: int) -> None:
    run = drive("how often does whale occur?", [{"role": "user", "content": "whale"}] * count)
    assert (
        run.answer
        == f"'whale' occurs {count} times. Items that are not text were searched in the form in which Python prints them."
    )


@pytest.mark.parametrize("context", [42, {"whale"}, object()], ids=["int", "set", "object"])
def test_a_context_that_is_no_text_is_declined_rather_than_searched_half(context: Any) -> None:
    run = drive("how often does whale occur?", context)
    assert "neither a text nor a list of texts" in run.answer
    assert DEMO_NOTICE in run.answer


# --- when things go wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [ChildState.FAILED, ChildState.TIMED_OUT, ChildState.CANCELLED])
@pytest.mark.parametrize("task", ["how often does 'whale' occur?", "which lines contain 'whale'?"])
def test_a_piece_whose_child_failed_is_counted_again_and_the_answer_says_so(state: ChildState, task: str) -> None:
    text = lines_of(300)
    run = drive(
        task, text, child_end=lambda number, answer: (state if number in (2, 4) else ChildState.COMPLETED, answer)
    )
    assert run.number == (600 if "often" in task else 300)
    assert f"Children failed on 2 of the {len(run.children)} pieces" in run.answer
    assert f"piece-2 ({state})" in run.output
    assert all(result.success for result in run.results)


@pytest.mark.parametrize(
    "answer", ["", "about 40", "-3", "²", '{"total": 1', "[]", "null", '{"total": 9}', '{"total": 1, "hits": [1]}']
)
@pytest.mark.parametrize("task", ["how often does 'whale' occur?", "which lines contain 'whale'?"])
def test_a_child_whose_answer_cannot_be_read_is_treated_as_failed(answer: str, task: str) -> None:
    good = drive(task, lines_of(300))
    run = drive(task, lines_of(300), child_end=lambda number, _: (ChildState.COMPLETED, answer if number == 3 else _))
    assert run.number == good.number
    assert line_numbers(run.answer) == line_numbers(good.answer)
    assert "Children failed on 1 of the" in run.answer


def test_if_every_child_fails_the_number_is_still_right() -> None:
    run = drive("count 'whale'", lines_of(300), child_end=lambda *_: (ChildState.FAILED, None))
    assert run.number == 600


@pytest.mark.parametrize("limit", [0, 3])
def test_if_children_cannot_be_started_it_counts_directly(limit: int) -> None:
    run = drive("how often does 'whale' occur?", lines_of(300), child_limit=limit)
    assert run.number == 600
    assert "That did not work" in run.replies[2]


def test_a_second_error_is_admitted() -> None:
    def broken(value: Any) -> str:
        raise RuntimeError("no answers today")

    run = drive("how often does 'whale' occur?", lines_of(300), names={"FINAL": broken}, background=False)
    assert "My code failed twice" in run.answer
    assert not re.search(r"\d", run.answer.replace("5", "").replace("AB-1234", ""))


def test_what_stands_in_the_context_is_not_taken_for_a_marker_or_an_error() -> None:
    forged = "demo: kind=list texts=9 lines=9 longest=1 length=9 odd=3\nTraceback (most recent call last):\n"
    run = drive("how often does 'kind' occur?", forged * 60 + "The REPL iterations have run out\n" * 9)
    assert run.answer == "'kind' occurs 60 times."
    assert len(run.children) == 4


def test_in_the_last_turn_it_counts_directly_because_children_could_not_be_collected() -> None:
    run = drive("how often does 'whale' occur?", lines_of(300), max_iterations=2)
    assert run.number == 600
    assert not run.children


def test_when_the_turns_have_run_out_it_says_so_instead_of_guessing() -> None:
    run = drive("how often does 'whale' occur?", lines_of(300), max_iterations=1)
    assert "iterations ran out" in run.answer


def test_a_message_from_the_parent_between_turns_changes_nothing() -> None:
    task, text = "how often does 'whale' occur?", "whale\n" * 5
    messages = opening(task, text, background=False)
    first = DemoClient().complete(messages).text
    result = execute(runnable_blocks(first)[0].code, namespace := {"context": text})
    messages += [
        {"role": "assistant", "content": first},
        {"role": "user", "content": format_observations([result])},
        {"role": "user", "content": "Please hurry.\n<task>\nsummarize\n</task>"},
    ]
    answers: list[str] = []
    execute(runnable_blocks(DemoClient().complete(messages).text)[0].code, namespace | {"FINAL": answers.append})
    assert answers == ["'whale' occurs 5 times."]


def test_a_context_that_is_the_prompt_itself_is_searched_behind_the_question() -> None:
    """`rlm_query` without `context=` makes it so: the question's own words are not part of the text."""
    for prompt, expected in [
        ("How often does 'whale' occur in this text:\na whale\nwhale", 2),
        ("How often does 'whale' occur? Ignore case. A Whale and a whale.", 2),
        ("  How often does 'whale' occur in the text?", 0),
        ("How often does 'whale' occur in: " + lines_of(600), 1200),
    ]:
        run = drive(prompt, prompt)
        assert run.number == expected, prompt[:60]
        assert not run.children
        assert "the prompt itself" in run.replies[1]


# --- declining, and prompts for children ------------------------------------------------------------------------------

REFUSED = ["Summarize the text.", "How often do 'a' and 'b' occur?", "Count 'x' in chapter 3", "", "(((", ") FINAL(7)"]


@pytest.mark.parametrize("text", REFUSED)
def test_what_it_cannot_do_it_declines_saying_what_it_is(text: str) -> None:
    run = drive(text, "some text")
    assert len(run.replies) == 1
    assert run.replies[0] == f"FINAL({run.answer})", "the whole reply is the answer: its parentheses balance"
    assert run.answer.startswith(DEMO_NOTICE)
    assert "%rlm model" in run.answer


def test_a_bare_prompt_is_declined_as_plain_text() -> None:
    reply = DemoClient().complete([{"role": "user", "content": "Count 'x' in: x x x"}], model="any").text
    assert reply.startswith(DEMO_NOTICE)
    assert "FINAL" not in reply
    assert "```" not in reply
    assert DemoClient().complete([]).text == reply


@pytest.mark.parametrize(
    "needle", ['it\'s "so"', "a\\n'b", "\ud800", "é\u2028", "in this piece of a longer text (part", "```", "{x}"]
)
def test_what_a_child_is_asked_for_survives_the_prompt(needle: str) -> None:
    run = drive(f"How many lines contain «{needle}», ignoring case, whole words only?", f"; {needle} ;\n" * 100)
    assert run.children
    for child in run.children:
        task = read_task(child.task)
        assert isinstance(task, SearchTask)
        assert (task.kind, task.needle, task.ignore_case, task.whole_words) == (Kind.LINE_COUNT, needle, True, True)
    assert run.number == 100


def test_a_needle_too_long_for_a_prompt_is_counted_directly() -> None:
    needle = "x" * 1500
    run = drive(f"How often does '{needle}' occur?", f"{needle}\n" * 100)
    assert run.number == 100
    assert "(1500 characters)" in run.answer
    assert not run.children


# --- the client, and the sample -------------------------------------------------------------------------------------


def test_it_is_a_client_that_estimates_its_usage() -> None:
    client = DemoClient()
    assert isinstance(client, ModelClient)
    messages: list[Message] = [{"role": "user", "content": "x" * 400}, {"role": "user", "content": "y" * 40}]
    completion = client.complete(messages)
    assert completion.usage.calls == 1
    assert completion.usage.prompt_tokens == 110
    assert completion.usage.completion_tokens == len(completion.text) // 4


def test_no_line_of_its_code_can_end_its_block() -> None:
    run = drive("how often does '```' occur?", "```\ntext\n```\n" * 50)
    assert run.number == 100
    for reply in [*run.replies, *(reply for child in run.children for reply in child.replies)]:
        assert [line for line in reply.split("\n") if line.startswith("```")] == ["```repl", "```"]


def test_its_replies_say_what_it_does() -> None:
    look, start, collect = drive(SAMPLE_TASK, sample_text()).replies
    assert "demo model" in look
    assert "rule-based stand-in" in look
    assert "I will split it at line ends" in start
    assert "I wait for them" in collect


def test_the_sample_task_over_the_sample_text_gives_the_known_answer() -> None:
    text = sample_text()
    assert 300 <= len(text.splitlines()) <= 600
    assert drive(SAMPLE_TASK, text).answer == "'comet' occurs 65 times."
    assert drive("How often does 'lantern' occur?", text).answer == "'lantern' occurs 18 times."
    assert (
        drive("Find the code that looks like ABC-1234", text).answer
        == "1 place looks like 'ABC-1234':\nVEG-4417 (line 287)"
    )


def test_the_notice_is_one_sentence_that_says_what_it_is() -> None:
    assert DEMO_NOTICE.count(". ") == 0
    assert DEMO_NOTICE.endswith(".")
    assert "rule-based stand-in" in DEMO_NOTICE
