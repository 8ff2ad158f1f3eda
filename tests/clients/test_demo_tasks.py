"""What the demo model takes a task to be. A wrong reading gives a wrong number, so what is unclear is refused."""

from __future__ import annotations

import re
import time

import pytest

from rlm_kernel.clients.demo_tasks import Kind, Refusal, SearchTask, read_task, shape_pattern

READ = [
    ("how often does 'whale' occur?", Kind.COUNT, "whale"),
    ('How many times is "Captain Ahab" mentioned?', Kind.COUNT, "Captain Ahab"),
    ("How many times is Captain Ahab mentioned in the text?", Kind.COUNT, "Captain Ahab"),
    ("How often does `a.b*` appear", Kind.COUNT, "a.b*"),
    ("how often does “it’s” occur?", Kind.COUNT, "it’s"),
    ("how often does 'it's' occur?", Kind.COUNT, "it's"),
    ("Count whale", Kind.COUNT, "whale"),
    ("Count the word cat.", Kind.COUNT, "cat"),
    ("Please count the occurrences of v1.2 in the text.", Kind.COUNT, "v1.2"),
    ("What is the number of times that the string 'x' appears?", Kind.COUNT, "x"),
    ("How many mentions of whale are there?", Kind.COUNT, "whale"),
    ("How often does 'looks like AB-12' occur?", Kind.COUNT, "looks like AB-12"),
    ("How often does '  ' occur?", Kind.COUNT, "  "),
    ("How often does 'and' occur?", Kind.COUNT, "and"),
    ("how many lines contain error", Kind.LINE_COUNT, "error"),
    ("In how many lines does 'error' occur?", Kind.LINE_COUNT, "error"),
    ("Which lines mention whale?", Kind.LINES, "whale"),
    ("find lines containing 'a b'", Kind.LINES, "a b"),
    ("Show me all lines of the log that have ERROR in them", Kind.LINES, "ERROR"),
    ("In which lines does the word whale appear?", Kind.LINES, "whale"),
    ("Where is the whale mentioned?", Kind.LINES, "whale"),
    ("Find the access code that looks like ABC-1234", Kind.CODES, "ABC-1234"),
    ("what is the secret code of the form XX-0000?", Kind.CODES, "XX-0000"),
    ("Find what looks like '(AB) 12'.", Kind.CODES, "(AB) 12"),
]


@pytest.mark.parametrize(("text", "kind", "needle"), READ)
def test_what_it_understands(text: str, kind: Kind, needle: str) -> None:
    task = read_task(text)
    assert isinstance(task, SearchTask)
    assert (task.kind, task.needle, task.ignore_case, task.whole_words) == (kind, needle, False, False)


@pytest.mark.parametrize(
    ("ending", "ignore_case", "whole_words"),
    [
        (", ignoring case?", True, False),
        ("? Ignore the case.", True, False),
        (" (case-insensitive)?", True, False),
        (", regardless of case?", True, False),
        (" as a whole word?", False, True),
        ("? Count whole words only, regardless of upper or lower case.", True, True),
        ("? Do not ignore case.", False, False),
        (" in 'ignoring case'?", False, False),
    ],
)
def test_how_it_is_to_count(ending: str, ignore_case: bool, whole_words: bool) -> None:
    task = read_task(f"How often does 'whale' occur{ending}")
    assert isinstance(task, SearchTask)
    assert (task.ignore_case, task.whole_words) == (ignore_case, whole_words)


REFUSED = [
    "Summarize the text.",
    "How often does it rain?",
    "How many words are there?",
    "Count the words",
    "How many whales are there?",
    "How often does '' occur?",
    "How often do 'a' and 'b' occur?",
    "How often does cat or dog occur?",
    "How often does 'whale' occur in chapter 3?",
    "In the first chapter, how often does 'whale' occur?",
    "How often does 'whale' occur before 'ship'?",
    "Count 'whale' in each paragraph.",
    "How often does 'whale' not occur?",
    "Which lines do not contain 'x'?",
    "Find the number that looks like a phone number",
    "",
    "(((",
    ") FINAL(7)",
]


@pytest.mark.parametrize("text", REFUSED)
def test_what_it_refuses_gives_a_reason(text: str) -> None:
    task = read_task(text)
    assert isinstance(task, Refusal)
    assert task.reason


@pytest.mark.parametrize(
    ("example", "fits", "does_not"),
    [
        (
            "XX-0000",
            ["QA-1234", "(QA-1234)", "QA-1234.", "see QA-1234, or"],
            ["Qa-1234", "QA-123", "QA-1234-B", "1QA-1234"],
        ),
        ("ab12", ["zz99"], ["ab1", "ab123", "_ab12", "AB12"]),
        ("#42", ["#17", "x#17"], ["#1", "#175"]),
        ("1.2.3", ["v 4.5.6.", "4.5.6"], ["4.5.6.7", "0.4.5.6", "4x5x6"]),
        ("É-1", ["Ü-2"], ["1-1", "ÜÜ-2"]),
    ],
)
def test_the_shape_of_a_code(example: str, fits: list[str], does_not: list[str]) -> None:
    pattern = re.compile(shape_pattern(example))
    assert [text for text in fits if not pattern.search(text)] == []
    assert [text for text in does_not if pattern.search(text)] == []


@pytest.mark.parametrize(
    "part", ["count ", "how many lines of the lines ", "find all the ", "'", "' ", "how often does the word a b c "]
)
def test_reading_a_hostile_task_takes_no_time_to_speak_of(part: str) -> None:
    start = time.process_time()
    read_task(part * 5000)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("literal", ["''", "'\\x'", "'\\N{no such}'"])
def test_a_foreign_prompt_that_resembles_a_childs_is_no_error(literal: str) -> None:
    prompt = (
        f"Count the occurrences of {literal} in this piece of a longer text (part 1 of 2, from line 1); answer with 1"
    )
    task = read_task(prompt)
    assert isinstance(task, Refusal) or task.piece is None


def test_an_empty_needle_cannot_exist() -> None:
    with pytest.raises(ValueError, match="needle=''"):
        SearchTask(kind=Kind.COUNT, needle="")
