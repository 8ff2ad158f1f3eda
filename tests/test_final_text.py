"""Promises of `rlm_kernel.final_text`: which text ends a run, and which only talks about ending it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.final_text import FinalCall, find_final, find_final_in_reply, match_fence


def final(argument: str) -> FinalCall:
    return FinalCall("FINAL", argument)


def final_var(argument: str) -> FinalCall:
    return FinalCall("FINAL_VAR", argument)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FINAL(42)", final("42")),
        ("FINAL()", final("")),
        ("before\nFINAL( 42 )\nafter", final("42")),
        ("   FINAL(three spaces)", final("three spaces")),
        ("FINAL(f(x) + g(y)) and so on", final("f(x) + g(y)")),
        ("FINAL(one\n(two)\nthree) tail", final("one\n(two)\nthree")),
        ("FINAL(a)\r\nFINAL(b)\r\n", final("a")),
        ("FINAL(x) FINAL(y)", final("x")),
        ('FINAL("quoted")', final('"quoted"')),
        ("FINAL_VAR(result)", final_var("result")),
        ("FINAL_VAR( 'result' ) tail", final_var("result")),
        ('FINAL_VAR("result")', final_var("result")),
        ("FINAL_VAR(`result`)", final_var("result")),
        ("FINAL_VAR('odd\")", final_var("'odd\"")),
        ("FINAL_VAR()", final_var("")),
    ],
)
def test_a_call_at_the_start_of_a_line_is_found(text: str, expected: FinalCall) -> None:
    """The argument ends at the balancing parenthesis; a name loses its quotes, an answer keeps them."""
    assert find_final(text) == expected
    assert find_final_in_reply(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "FINAL",
        "FINAL (42)",
        "FINALLY(42)",
        "final(42)",
        "I will call FINAL(x) later",
        "# FINAL(x)",
        "> FINAL(x)",
        "'FINAL(x)'",
        "    FINAL(indented code)",
        "\tFINAL(indented by a tab)",
        "print(FINAL(x))",
        "FINAL(cut off",
        "FINAL_VAR(cut off\nand more",
        "FINAL(((",
    ],
)
def test_text_that_only_mentions_or_truncates_a_call_finalizes_nothing(text: str) -> None:
    assert find_final(text) is None
    assert find_final_in_reply(text) is None


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ('FINAL("a) b") tail)', '"a) b"'),
        (r'FINAL("a \") b") tail)', r'"a \") b"'),
        ("FINAL(['x)', \"y(\"]) tail", "['x)', \"y(\"]"),
        ("FINAL(don't) and I won't (really)", "don't"),
        ("FINAL(the '90s (good)) tail", "the '90s (good)"),
        ('FINAL(6" of (pipe)) tail', '6" of (pipe)'),
        ('FINAL(a ") b " c', 'a "'),
        ('FINAL("""many\nlines :) here""") tail', '"""many\nlines :) here"""'),
        ("FINAL('''it's )''') tail", "'''it's )'''"),
        ('FINAL("""never closed) tail', '"""never closed'),
    ],
)
def test_parentheses_inside_strings_do_not_count(text: str, argument: str) -> None:
    """Where the quotes do not make sense as strings, they are ordinary characters."""
    assert find_final(text) == final(argument)


def test_an_unbalanced_call_ends_where_its_own_line_ends_with_a_parenthesis() -> None:
    assert find_final("FINAL(sad :( indeed)\nmore") == final("sad :( indeed")
    assert find_final("FINAL(sad :( indeed)  \r\nmore") == final("sad :( indeed")
    assert find_final("FINAL(sad :( indeed) more") is None


def test_a_truncated_call_does_not_hide_a_later_whole_one() -> None:
    assert find_final("FINAL(cut (off\nFINAL(whole)") == final("whole")


def test_calls_in_fenced_blocks_and_quotations_of_a_reply_do_not_count() -> None:
    assert find_final_in_reply("```python\nFINAL(1)\n```\nFINAL(2)") == final("2")
    assert find_final_in_reply("~~~\nFINAL(1)\n```\n~~~~\nFINAL(2)") == final("2")
    assert find_final_in_reply("````\n```\nFINAL(1)\n```\n````\n") is None
    assert find_final_in_reply("  ```\nFINAL(1)\n  ```\r\nFINAL(2)") == final("2")
    assert find_final_in_reply("```\nFINAL(never closed)") is None
    assert find_final_in_reply("> FINAL(1)\nFINAL(2)") == final("2")
    assert find_final_in_reply("```inline``` code\nFINAL(2)") == final("2")


def test_an_answer_may_hold_a_fenced_block() -> None:
    text = "FINAL(Use this:\n```python\nprint(1)\n```\n> FINAL(no)\n)\n"
    assert find_final_in_reply(text) == final("Use this:\n```python\nprint(1)\n```\n> FINAL(no)")


def test_anywhere_accepts_a_call_in_the_middle_of_a_line_outside_fences() -> None:
    assert find_final_in_reply("So: FINAL(f(1)) it is.", anywhere=True) == final("f(1)")
    assert find_final_in_reply("xFINAL(1) m.FINAL(2)", anywhere=True) is None
    assert find_final_in_reply("```\nx = FINAL(1)\n```\n> say FINAL(2)", anywhere=True) is None


def test_a_fence_needs_three_characters_and_no_backtick_in_its_info() -> None:
    fence = match_fence("  ````repl \r")
    assert fence is not None
    assert (fence.indent, fence.char, fence.length, fence.info) == ("  ", "`", 4, "repl")
    assert match_fence("``repl") is None
    assert match_fence("x ```") is None
    assert match_fence("```a```") is None


@pytest.mark.parametrize(
    "text",
    [
        "FINAL(" * 11_000,
        "FINAL(\n" * 10_000,
        "FINAL(\"'\n" * 8_000,
        "FINAL(" + " 'a" * 20_000,
        "FINAL(" + "\\'" * 33_000,
        'FINAL("""\n' * 6_000,
        'FINAL("""' + " " * 66_000,
        "FINAL(" + "()" * 33_000,
        "FINAL(a)b\n" * 6_000 + "```\n" * 1000,
        "```\n" * 16_000 + "FINAL(x",
        "> FINAL(x\n" * 6_000,
        " " * 66_000 + "FINAL(",
    ],
    ids=lambda text: text[:12],
)
def test_hostile_text_is_read_in_linear_time(text: str) -> None:
    """A quadratic reading of 66,000 characters would take minutes; the bound is generous for slow machines."""
    started = time.process_time()
    find_final(text)
    find_final_in_reply(text)
    find_final_in_reply(text, anywhere=True)
    assert time.process_time() - started < 4


final_ish = st.text(alphabet="FINAL_VR()\"'`\\\n >~ab", max_size=200) | st.lists(
    st.sampled_from(["FINAL(", "FINAL_VAR(", ")", "(", '"', "'", '"""', "\n", "```", "> ", "x", "\\", " ", "\r\n"])
).map("".join)


@given(final_ish)
def test_any_text_is_read_without_an_error_and_arguments_come_from_the_text(text: str) -> None:
    for call in (find_final(text), find_final_in_reply(text), find_final_in_reply(text, anywhere=True)):
        assert call is None or call.argument in text
        assert call is None or call.argument == call.argument.strip()


@given(final_ish)
def test_no_line_that_starts_with_a_call_means_no_final(text: str) -> None:
    shifted = "\n".join("x" + line for line in text.split("\n"))
    assert find_final(shifted) is None
    assert find_final_in_reply(shifted) is None


balanced = st.recursive(
    st.text(alphabet="abc \n.,", max_size=8),
    lambda inner: st.tuples(inner, inner, st.text(alphabet="abc ", max_size=3)).map(lambda t: f"{t[0]}({t[1]}){t[2]}"),
)


@given(balanced, st.text(alphabet="abc )(\n", max_size=20))
def test_every_balanced_answer_comes_back_as_it_was_written(answer: str, tail: str) -> None:
    assert find_final(f"FINAL({answer}){tail}") == final(answer.strip())


@given(st.text(max_size=40))
def test_every_answer_comes_back_from_a_quoted_one_line_string(answer: str) -> None:
    """A repr is plainly a string, whatever parentheses and escapes it has."""
    literal = repr(answer.replace("'", "").replace('"', ""))
    assert find_final(f"FINAL({literal}) tail (x)") == final(literal)
