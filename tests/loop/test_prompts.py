"""Promises of `rlm_kernel.loop.prompts`: the model is told what is there, all of it, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.loop.parsing import runnable_blocks
from rlm_kernel.loop.prompts import (
    RLM_SYSTEM_PROMPT,
    RLM_SYSTEM_PROMPT_QWEN,
    PromptFeatures,
    QueryMetadata,
    build_last_chance_prompt,
    build_reminder,
    build_rlm_system_prompt,
    build_user_prompt,
    cut,
    format_observations,
)
from rlm_kernel.values import CodeResult

BACKGROUND = ["blocking=False", "rlm_status", "rlm_wait", "rlm_result"]
STEERING = ["rlm_cancel", "rlm_send", "rlm_as_completed"]
SHARE = ["rlm_share"]
ALWAYS = ["context", "SHOW_VARS", "FINAL(", "FINAL_VAR(", 'answer["ready"]', "```repl"]
TEXT = QueryMetadata([12_345], 12_345, "str")


def system(features: PromptFeatures | None = None, prompt: str | None = None) -> str:
    (message,) = build_rlm_system_prompt(prompt, TEXT, features)
    assert message["role"] == "system"
    return message["content"]


def names_in(text: str) -> set[str]:
    words = [
        "llm_query(",
        "llm_query_batched",
        "rlm_query(",
        "rlm_query_batched",
        *BACKGROUND,
        *STEERING,
        *SHARE,
        *ALWAYS,
    ]
    return {word for word in words if word in text}


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (PromptFeatures(llm_query=False, rlm_query=False), []),
        (PromptFeatures(rlm_query=False), ["llm_query(", "llm_query_batched"]),
        (PromptFeatures(), ["llm_query(", "llm_query_batched", "rlm_query(", "rlm_query_batched"]),
        (
            PromptFeatures(background=True),
            ["llm_query(", "llm_query_batched", "rlm_query(", "rlm_query_batched", *BACKGROUND],
        ),
        (
            PromptFeatures(background=True, steering=True, share=True),
            ["llm_query(", "llm_query_batched", "rlm_query(", "rlm_query_batched", *BACKGROUND, *STEERING, *SHARE],
        ),
        (
            PromptFeatures(steering=True, share=True),
            ["llm_query(", "llm_query_batched", "rlm_query(", "rlm_query_batched"],
        ),
        (
            PromptFeatures(background=True, steering=True, share=True, depth=1, max_depth=2),
            ["llm_query(", "llm_query_batched", "rlm_query(", "rlm_query_batched"],
        ),
    ],
)
def test_the_system_prompt_names_exactly_the_helpers_that_are_there(
    features: PromptFeatures, expected: list[str]
) -> None:
    """Background calls only where children can exist, steering and sharing only together with them."""
    assert names_in(system(features)) == {*expected, *ALWAYS}


def test_at_the_depth_limit_the_prompt_says_that_recursion_is_one_direct_call() -> None:
    assert "one direct model call" in system(PromptFeatures(depth=1, max_depth=2))
    assert "one direct model call" not in system(PromptFeatures(depth=0, max_depth=2))


def test_the_system_prompt_says_what_the_context_is() -> None:
    assert "of type str, 12,345 characters in all" in system()
    assert "of type str, 12,345 characters in all" in system(prompt="My own prompt.")


def test_the_qwen_prompt_differs_by_a_warning_about_cost() -> None:
    assert "expensive" in RLM_SYSTEM_PROMPT_QWEN
    assert "expensive" not in RLM_SYSTEM_PROMPT
    before, _, after = RLM_SYSTEM_PROMPT_QWEN.partition("# Calls are expensive")
    assert RLM_SYSTEM_PROMPT.startswith(before)
    assert RLM_SYSTEM_PROMPT.endswith(after[after.index("# Handing") :])


def test_the_constants_are_rendered_anew_for_the_features_and_other_texts_are_taken_as_they_are() -> None:
    features = PromptFeatures(background=True)
    assert "rlm_wait" in system(features, RLM_SYSTEM_PROMPT)
    assert "rlm_wait" in system(features, RLM_SYSTEM_PROMPT_QWEN)
    assert "expensive" in system(features, RLM_SYSTEM_PROMPT_QWEN)
    assert system(features, "Own {text} %s.").startswith("Own {text} %s.\n")
    assert "rlm_wait" not in system(features, "Own.")
    assert "rlm_wait" in system(features, "Own.\n{helpers}\nEnd.")


def test_the_examples_in_the_prompts_are_blocks_that_would_run_and_parse() -> None:
    blocks = runnable_blocks(system(PromptFeatures(background=True, steering=True, share=True)))
    assert len(blocks) == 4
    for block in blocks:
        compile(block.code, "<prompt>", "exec")
        assert block.closed


def test_the_first_message_holds_the_task_verbatim_between_its_marks() -> None:
    task = 'Count "x" & <y>\n```repl\nFINAL(1)\n```  '
    message = build_user_prompt(task, 0, query_metadata=TEXT)
    assert message["role"] == "user"
    assert f"\n<task>\n{task}\n</task>\n" in f"\n{message['content']}\n"
    assert "12,345 characters" in message["content"]
    assert "not looked at the context yet" in message["content"]


def test_a_long_task_is_previewed_and_said_to_be_whole_in_the_context() -> None:
    task = "HEAD" + "x" * 1_000_000 + "TAIL"
    content = build_user_prompt(task, 0)["content"]
    assert len(content) < 6_000
    assert "<task>\nHEAD" in content
    assert "TAIL\n</task>" in content
    assert "1,000,008 characters" in content
    assert "whole in `context`" in content
    assert "whole in `history[0]`" in build_user_prompt(task, 0, task_variable="history[0]")["content"]
    assert "whole in" not in build_user_prompt("x" * 4_000, 0)["content"]


def test_the_continue_prompt_names_the_task_and_the_iteration() -> None:
    content = build_user_prompt("Count the words", 2, max_iterations=5)["content"]
    assert "Iteration 3 of 5." in content
    assert "Count the words" in content
    assert "```repl" in content
    assert "not looked at" not in content
    assert len(build_user_prompt("x" * 100_000, 2, max_iterations=5)["content"]) < 1_500


def test_the_continue_prompt_says_when_it_is_the_last() -> None:
    assert "last one" in build_user_prompt("t", 4, max_iterations=5)["content"]
    assert "last one" not in build_user_prompt("t", 3, max_iterations=5)["content"]
    assert "last one" not in build_user_prompt("t", 4)["content"]


def test_the_published_form_of_the_user_prompt_still_works() -> None:
    assert build_user_prompt()["role"] == "user"
    assert "task" not in build_user_prompt(None, 1)["content"].split("\n")[0]
    content = build_user_prompt(root_prompt="t", iteration=0, context_count=3, history_count=2)["content"]
    assert "context_2" in content
    assert "`history`" in content


def test_the_reminder_says_what_was_missing_and_what_to_do() -> None:
    assert build_reminder().startswith("Your reply held no code block")
    assert build_reminder(empty=True).startswith("Your reply was empty.")
    assert build_reminder("Because.", empty=True).startswith("Because.")
    assert "FINAL(" in build_reminder()
    assert "```repl" in build_reminder()


def test_the_last_chance_says_that_the_iterations_have_run_out_and_asks_for_the_answer() -> None:
    text = build_last_chance_prompt("Count the words")
    assert "REPL iterations have run out" in text
    assert "FINAL(" in text
    assert "Count the words" in text
    assert "run out" not in build_last_chance_prompt("t", "stalled")


def test_observations_show_code_output_and_marked_errors_unescaped() -> None:
    results = [
        CodeResult(stdout="<b>&\n", stderr="a warning\n"),
        CodeResult(
            stderr="Traceback …\nNameError: name 'y' is not defined", success=False, exception="NameError: no y"
        ),
        CodeResult(),
    ]
    text = format_observations(results, ["print('<b>&')", "y", "s = '```'"])
    first, second, third = text.split("\n\n")
    assert first == "Block 1 of 3:\n```repl\nprint('<b>&')\n```\nOutput:\n<b>&\na warning"
    assert "Traceback …" in second
    assert second.endswith("ERROR: NameError: no y")
    assert third == "Block 3 of 3:\n````repl\ns = '```'\n````\nOutput: (none)"
    assert "ERROR" not in first + third


def test_code_and_output_are_each_cut_at_twenty_thousand_characters_with_a_note() -> None:
    result = CodeResult(stdout="OUT" + "o" * 30_000 + "END", success=False, exception="E: e")
    text = format_observations([result], ["CODE" + "c" * 30_000 + "LAST"])
    for mark in ("OUT", "END", "CODE", "LAST", "30,006 characters", "30,008 characters", "ERROR: E: e"):
        assert mark in text
    assert text.count("o") < 20_100
    assert len(text) < 40_500
    assert "left out" not in format_observations([CodeResult(stdout="o" * 20_000)])


def test_observations_of_an_environment_are_accepted_too() -> None:
    @dataclass
    class Observation:
        result: CodeResult

    assert "hello" in format_observations([Observation(CodeResult(stdout="hello"))])


@given(st.text(max_size=300), st.integers(0, 100))
def test_cutting_keeps_head_and_tail_and_never_more_than_the_limit(text: str, limit: int) -> None:
    shown = cut(text, limit)
    if len(text) <= limit:
        assert shown == text
    else:
        head, _, rest = shown.partition("\n[… ")
        tail = rest.partition(" …]\n")[2]
        assert f"{len(text):,} characters" in shown
        if "\n[… " not in text and " …]\n" not in text:
            assert len(head) + len(tail) == limit
            assert text.startswith(head)
            assert text.endswith(tail)


class Unshowable:
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ("abc", ([3], 3, "str")),
        ("", ([0], 0, "str")),
        (b"abcd", ([4], 4, "bytes")),
        (["a", "bb"], ([1, 2], 3, "list[str]")),
        (["a", 10], ([1, 2], 3, "list")),
        ([], ([], 0, "list")),
        ({"k": "abc", "l": b"x"}, ([3, 1], 4, "dict")),
        (1234, ([4], 4, "int")),
        (None, ([], 0, "None")),
        (Unshowable(), ([0], 0, "Unshowable")),
    ],
)
def test_any_context_can_be_measured(context: object, expected: tuple[list[int], int, str]) -> None:
    metadata = QueryMetadata.of(context)
    assert (metadata.context_lengths, metadata.context_total_length, metadata.context_type) == expected
    assert build_rlm_system_prompt(None, metadata)[0]["content"]


def test_a_context_of_many_parts_is_described_without_listing_them_all() -> None:
    content = build_rlm_system_prompt(None, QueryMetadata.of(["x" * n for n in range(1, 1001)]))[0]["content"]
    assert "list[str], 500,500 characters in all, in 1,000 parts of 1 to 1,000 characters" in content
    assert "980 more" in content


def test_a_missing_context_is_said_to_be_missing() -> None:
    assert "no context" in build_rlm_system_prompt(None, QueryMetadata.of(None))[0]["content"]
