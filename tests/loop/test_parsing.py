"""Promises of `rlm_kernel.loop.parsing`: which code of a reply runs, and what the model is told about the rest."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.loop.parsing import (
    CodeBlock,
    explain_unrun,
    extract_code_blocks,
    parse_blocks,
    runnable_blocks,
    strip_reasoning,
)


def codes(text: str) -> list[str]:
    return [block.code for block in runnable_blocks(text)]


@pytest.mark.parametrize("tag", ["repl", "python", "py", "REPL", "Python3", " repl ", "python title=x", "{repl}"])
def test_every_spelling_of_the_tag_runs(tag: str) -> None:
    assert codes(f"text\n```{tag}\nx = 1\n```\ntext") == ["x = 1"]


@pytest.mark.parametrize("fence", ["```", "````", "~~~", "~~~~~"])
def test_backticks_and_tildes_of_three_or_more_run(fence: str) -> None:
    assert codes(f"{fence}repl\nx = 1\n{fence}\n") == ["x = 1"]


def test_all_blocks_come_in_the_order_of_the_reply() -> None:
    assert codes("```python\na\n```\nand\n~~~repl\nb\n~~~\n```py\nc\n```") == ["a", "b", "c"]


def test_an_empty_block_does_not_swallow_the_next_and_does_not_run() -> None:
    text = "```repl\n```\ntext\n```repl\nx = 1\n```"
    assert codes(text) == ["x = 1"]
    assert [block.code for block in parse_blocks(text)] == ["", "x = 1"]


def test_crlf_and_a_missing_final_line_end_are_fine() -> None:
    assert codes("hi\r\n```repl\r\nx = 1\r\ny = 2\r\n```\r\n") == ["x = 1\ny = 2"]
    assert codes("```repl\nx = 1\n```") == ["x = 1"]


@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_an_unclosed_last_block_still_runs(ending: str) -> None:
    newline = "\r\n" if ending == "\r\n" else "\n"
    (block,) = runnable_blocks(f"text{newline}```repl{newline}x = 1{newline}y = 2{ending}")
    assert block == CodeBlock("repl", "x = 1\ny = 2", closed=False, line=2)


def test_a_shorter_or_other_fence_does_not_end_a_block() -> None:
    assert codes("````repl\ns = '''\n```\n'''\n````") == ["s = '''\n```\n'''"]
    assert codes("~~~repl\nx = 1 # \n```\n~~~") == ["x = 1 # \n```"]


@pytest.mark.parametrize("fence", ["```", "````", "`````"])
def test_a_fence_inside_a_string_does_not_cut_the_code(fence: str) -> None:
    """Also a longer one than the block's own, and also if the string is nested in a call or follows other strings."""
    code = f"a = 'it''s'  # it's\nreport = f'''\n{fence}repl\nprint(1)\n{fence}\n\n{fence}\n'''\nprint(report)"
    assert codes(f"Here:\n```repl\n{code}\n```\nDone.\n```repl\ny = 2\n```") == [code, "y = 2"]
    assert codes(f"```repl\n{code}\n") == [code]


def test_a_fence_inside_a_string_of_code_with_magics_does_not_cut_it() -> None:
    code = "%time x = 1\nfiles = !ls\nprint?\ns = '''\n```\n'''\nawait f(s)"
    assert codes(f"```repl\n{code}\n```\n") == [code]


def test_a_string_that_is_never_closed_does_not_run_the_rest_of_the_reply() -> None:
    text = '```repl\nx = """oops\n```\nI hope that works. """\n```repl\ny = 2\n```\n'
    assert codes(text) == ['x = """oops', "y = 2"]


def test_a_fence_of_the_next_block_ends_a_block_that_was_not_closed() -> None:
    text = "```repl\nx = 1\n```repl\ny = 2\n```"
    assert [(block.code, block.closed) for block in runnable_blocks(text)] == [
        ("x = 1\n".rstrip(), False),
        ("y = 2", True),
    ]


def test_an_indented_fence_takes_its_indentation_from_the_code() -> None:
    assert codes("1. First\n   ```repl\n   if x:\n       y = '''\n z'''\n\n   ```\n") == ["if x:\n    y = '''\nz'''\n"]
    assert codes("  ```repl\nif x:\n  y\n  ```") == ["if x:\n  y"]
    assert codes("\t```repl\n\tx = 1\n\t```") == ["x = 1"]


def test_a_deeper_indented_fence_does_not_end_a_block() -> None:
    assert codes("```repl\nx = 1\n        ```\n```") == ["x = 1\n        ```"]


def test_other_and_untagged_blocks_do_not_run() -> None:
    text = "```\nplain\n```\n```bash\nls\n```\n```pythonic\nx\n```"
    assert codes(text) == []
    assert [block.language for block in parse_blocks(text)] == ["", "bash", "pythonic"]


def test_a_quoted_block_does_not_run() -> None:
    assert codes("> ```repl\n> x = 1\n> ```") == []


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("```bash\nls\n```", "Your block is tagged `bash`; only blocks tagged ```repl run."),
        ("```\nls\n```", "Your block is not tagged;"),
        ("```\na\n```\n```sh\nb\n```\n```sh\nc\n```", "Your blocks are not tagged and tagged `sh`;"),
        ("```repl\n\n```", "empty"),
        ("```repl print(1)```", "on lines of their own"),
        ("```\nnever closed\n\n```repl\nx = 1\n```", "that line 1 of your reply opened"),
        ("```repl\ny = 1\n```\n```\n\n```repl\nx = 1\n```", "that line 4 of your reply opened"),
    ],
)
def test_what_did_not_run_is_explained(text: str, part: str) -> None:
    explanation = explain_unrun(text)
    assert explanation is not None
    assert part in explanation


@pytest.mark.parametrize(
    "text", ["", "prose", "```repl\nx\n```", "```repl\nx\n```\n```json\n{}\n```", "see ```repl``` blocks"]
)
def test_nothing_is_explained_where_nothing_went_wrong(text: str) -> None:
    assert explain_unrun(text) is None


def test_extract_code_blocks_takes_all_python_tags_as_one_language_and_others_by_name() -> None:
    text = "```repl\na\n```\n```python\nb\n```\n```Bash\nls\n```\n```py\n\n```"
    assert extract_code_blocks(text) == ["a", "b"]
    assert extract_code_blocks(text, "repl") == ["a", "b"]
    assert extract_code_blocks(text, "bash") == ["ls"]


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("<think>```repl\nx\n```</think>\nFINAL(1)", "FINAL(1)"),
        ("\n<thinking>a\nb</thinking>\r\n\r\nhi", "hi"),
        ("<think>never ends", ""),
        ("<think>only</think>", ""),
        ("text <think>x</think>", "text <think>x</think>"),
        ("", ""),
    ],
)
def test_leading_reasoning_is_neither_code_nor_answer(text: str, rest: str) -> None:
    assert strip_reasoning(text) == rest


pieces = st.lists(
    st.sampled_from(
        [
            "```",
            "~~~",
            "````",
            "repl",
            "python",
            "bash",
            "\n",
            "\r\n",
            " ",
            "\t",
            "'''",
            '"""',
            "'",
            '"',
            "\\",
            "x = 1",
            "#",
        ]
    )
    | st.text(max_size=5),
    max_size=60,
).map("".join)


@given(pieces)
def test_any_text_is_read_without_an_error(text: str) -> None:
    for block in parse_blocks(text):
        assert 1 <= block.line <= text.count("\n") + 1
    explain_unrun(text)
    strip_reasoning(text)


@given(st.text(max_size=200) | pieces, st.sampled_from("`~"), st.sampled_from(["\n", "\r\n"]))
def test_any_code_comes_back_exactly_from_a_fence_longer_than_those_it_holds(
    code: str, char: str, newline: str
) -> None:
    longest = max((len(run) for run in code.replace("\n", " ").split() if char in run), default=0)
    fence = char * max(3, longest + 1)
    if newline == "\r\n":
        code = code.replace("\r", "")
    text = newline.join([f"before {char}", f"{fence}repl", *code.split("\n"), fence, "after"])
    blocks = parse_blocks(text)
    assert blocks[0] == CodeBlock("repl", code, closed=True, line=2)
    assert len(blocks) == 1


python_lines = st.sampled_from(
    [
        "x = 1",
        "print('it''s')",
        "s = '''\n```\n'''",
        's = """a\n```repl\nb\n~~~\n```\n"""',
        "# it's \"odd",
        "if x:\n    y = '```'",
        "s = 'a\\\n```\\\nb'",
    ]
)


@given(st.lists(python_lines, min_size=1, max_size=6).map("\n".join), st.sampled_from(["```", "~~~"]))
def test_any_valid_code_comes_back_exactly_from_the_shortest_fence(code: str, fence: str) -> None:
    """Whatever fences its strings hold."""
    compile(code, "<test>", "exec")
    assert codes(f"one\n{fence}repl\n{code}\n{fence}\ntwo\n{fence}py\nz = 3\n{fence}") == [code, "z = 3"]


@pytest.mark.parametrize(
    "text",
    [
        "```repl\n" * 10_000,
        "```repl\n'''\n```\n" * 5_000,
        "```repl\nx = ('''\n```\n" * 5_000,
        "```repl\n'''\n" + "```\n" * 16_000,
        "```repl\nx = \\'''\n```\n" * 3_000,  # opens a string, but closes none that is open
        "```repl\n'''\n```\n'''\n(\n```\n" * 3_000,
        "```repl\n" + "'" * 66_000,
        "```repl\n" + "'''" * 23_000 + "\n```",
        "```repl\n'''\n```\n'''\n" + " " * 50_000 + "\n```",
        "```repl\n'''\n```\n'''\n" + "(" * 50_000 + "\n```",
        "`" * 66_000,
        " " * 66_000 + "```",
        "```repl " + "x" * 66_000,
        "<think>" * 10_000,
    ],
    ids=lambda text: repr(text[:24]),
)
def test_hostile_text_is_read_in_linear_time(text: str) -> None:
    """A quadratic reading would take minutes; the bound is generous for slow machines."""
    started = time.process_time()
    parse_blocks(text)
    explain_unrun(text)
    strip_reasoning(text)
    assert time.process_time() - started < 4


@given(
    st.lists(st.text(alphabet="ab `~'\"#\\\t(", max_size=12), max_size=6).map("\n".join),
    st.sampled_from("`~"),
    st.integers(0, 3),
    st.sampled_from(["repl", "python", "py", "Python3", "repl title"]),
    st.text(alphabet="ab. \n", max_size=20),
)
def test_a_block_of_any_fence_and_any_body_comes_out_whole(
    body: str, char: str, more: int, tag: str, words: str
) -> None:
    """Also between words and before another block."""
    runs = [len(run) for line in body.split("\n") for run in re.findall(rf"{char}+", line)]
    fence = char * (max([2, *runs]) + 1 + more)
    text = f"{words}\n{fence}{tag}\n{body}\n{fence}\n{words}\n~~~repl\nlast = 1\n~~~"
    assert [block.code for block in parse_blocks(text)] == [body, "last = 1"]
    first, _ = parse_blocks(text)
    lines = text.split("\n")
    assert (lines[first.line - 1], lines[first.end - 1]) == (f"{fence}{tag}", fence)
