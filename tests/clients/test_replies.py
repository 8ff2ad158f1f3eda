"""Promises of `rlm_kernel.clients.replies`."""

from __future__ import annotations

import json

import openai
import openai._exceptions
import pytest

from rlm_kernel.clients.replies import EXPLANATIONS, Endpoint, explain_failure, origin_of, read_completion, read_stream
from rlm_kernel.errors import ModelCallError
from rlm_kernel.values import Completion, Usage


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ('{"content": [{"type": "thinking", "thinking": []}, {"type": "text", "text": "a"}, {"text": "b"}]}', "ab"),
        ('{"content": null, "refusal": "I would rather not."}', "I would rather not."),
        ('{"content": null, "tool_calls": [{}]}', ""),
        ("{}", ""),
    ],
)
def test_the_text_is_found_wherever_servers_put_it(message, text) -> None:
    raw = f'{{"choices": [{{"message": {message}}}], "usage": {{"prompt_tokens": null, "completion_tokens": true}}}}'
    assert read_completion(raw, Endpoint("http://h"), "m") == Completion(text, Usage(1, 0, 0))


@pytest.mark.parametrize(
    "raw", ["[]", "null", "3", "", '{"choices": 3}', '{"choices": [3]}', '{"choices": [{}]}', "[" * 99_999]
)
def test_what_is_no_chat_completion_is_a_failed_call(raw) -> None:
    with pytest.raises(ModelCallError, match="malformed reply"):
        read_completion(raw, Endpoint("http://h"), "m")


def event(content: str = "", end: str | None = None, **more: object) -> str:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": end}
    return f"data: {json.dumps({'choices': [choice], **more}, ensure_ascii=False)}"


USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
LAST = f'data: {{"choices": [], "usage": {json.dumps(USAGE)}}}'


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    "lines",
    [
        [event("a\u2028"), "", event("b"), "", event(end="stop"), "", LAST, "", "data: [DONE]", "", ""],
        [": a comment", event("a\u2028b", end="stop", usage=USAGE)],
        ["event: message", event("a\u2028"), event("b", usage=USAGE), "id: 7", "data:[DONE]"],
    ],
)
def test_a_streamed_reply_is_put_together(lines, newline) -> None:
    raw = newline.join(lines).encode()
    assert read_stream(raw, Endpoint("http://h"), "m") == Completion("a\u2028b", Usage(1, 3, 2))


def test_a_server_that_does_not_stream_is_read_all_the_same() -> None:
    raw = '{"choices": [{"message": {"content": "a"}}]}'
    assert read_stream(raw, Endpoint("http://h"), "m").text == "a"


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (event("half of it"), "broke off"),
        (f'{event("half")}\n\ndata: {{"choi', "not a JSON object"),
        (f'{event("half")}\n\ndata: {{"error": {{"message": "the slot was taken away"}}}}', "the slot was taken away"),
        ("", "empty body"),
        ("<html>", "not a JSON object"),
    ],
)
def test_a_stream_without_its_end_is_no_answer(raw, reason) -> None:
    with pytest.raises(ModelCallError, match=reason):
        read_stream(raw, Endpoint("http://h"), "m")


def test_an_error_reported_with_status_200_is_a_failed_call_with_its_words() -> None:
    with pytest.raises(ModelCallError, match="upstream is overloaded"):
        read_completion('{"error": {"message": "upstream is overloaded", "code": 502}}', Endpoint("http://h"), "m")


def test_neither_credentials_nor_paths_in_a_url_are_shown() -> None:
    assert origin_of("https://me:secret@host:8443/v1/secret?key=secret") == "https://host:8443"


def test_a_long_server_message_is_cut() -> None:
    error = openai.OpenAIError("word " * 10_000)
    assert len(str(explain_failure(error, Endpoint("http://h"), "m"))) < 500


def test_control_characters_are_not_shown() -> None:
    colourful = openai.OpenAIError("\x1b[31mred\x1b[0m\r\n\x00next")
    text = str(explain_failure(colourful, Endpoint("http://h"), "m"))
    assert text.isprintable()
    assert "next" in text


def test_what_is_not_known_names_its_type() -> None:
    text = str(explain_failure(UnicodeError("odd"), Endpoint("http://h"), None))
    assert "UnicodeError: odd" in text


def exception_classes() -> dict[str, type[BaseException]]:
    everything = {**vars(openai._exceptions), **vars(openai)}
    # `type(...) is type`, because asking the package's lazy proxies for their class imports half of it.
    classes = {name: value for name, value in everything.items() if type(value) is type}
    return {
        name: value
        for name, value in classes.items()
        if issubclass(value, BaseException) and value.__module__.startswith("openai") and not name.startswith("_")
    }


def test_every_exception_of_openai_is_explained_and_nothing_else_is() -> None:
    assert "RateLimitError" in exception_classes()
    assert set(EXPLANATIONS) == set(exception_classes())
