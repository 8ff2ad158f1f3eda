"""Several children share one real inference server: llama.cpp with a small model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlm_kernel.clients.openai_compatible import OpenAICompatibleClient
from rlm_kernel.session.config import Settings
from rlm_kernel.session.session import RLMSession
from rlm_kernel.values import Completion, Message
from tests.support.llama import SLOTS, LlamaServer

pytestmark = pytest.mark.slow

FREED_S = 10.0
"""Seconds within which the server has noticed that nobody waits for a generation any more. It finds out with the next token,
which comes when it has read what is new of the other prompts; the generation itself would take minutes."""

ANSWER = r'root ::= "```repl\nFINAL(" [1-9] [0-9]? ")\n```"'
"""What the small model may say, so that its answer is one that the loop can use: a number below 100."""


class Client:
    """Asks the server for an answer in the form of `ANSWER`; the model ``endless`` goes on for minutes."""

    def __init__(self) -> None:
        url = os.environ["LLAMACPP_BASE_URL"]
        self._short = OpenAICompatibleClient(
            url, default_model="m", extra_body={"grammar": ANSWER, "seed": 1}, stream=True
        )
        self._endless = OpenAICompatibleClient(
            url, default_model="m", extra_body={"ignore_eos": True, "max_tokens": 100_000}, stream=True
        )

    def complete(self, messages: list[Message], model: str | None = None) -> Completion:
        # Such a small model makes nothing of the long prompt, and would take many seconds to read it.
        short: list[Message] = [{"role": "user", "content": messages[-1]["content"][-200:]}]
        return (self._endless if model == "endless" else self._short).complete(short)


@pytest.fixture(scope="module")
def server() -> Iterator[LlamaServer]:
    with LlamaServer() as running:
        yield running


@pytest.fixture
def names(server: LlamaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    namespace: dict[str, Any] = {}
    settings = Settings({"run_dir": str(tmp_path / "runs"), "client_factory": f"{__name__}:Client"}, environ={})
    session = RLMSession(settings, namespace)
    yield namespace
    assert session.shutdown().ok


def test_a_cancelled_child_gives_its_slot_back_and_the_others_finish(server, names) -> None:
    endless = names["rlm_query"]("Tell a long story.", model="endless", blocking=False)
    server.wait_for_tokens(30)
    others = [names["rlm_query"](f"What is {n} plus {n}?", blocking=False) for n in range(1, SLOTS)]
    server.wait_for_busy(SLOTS, 30)
    status = names["rlm_cancel"](endless)
    assert (status.state, status.exited) == ("cancelled", True)
    freed_s = server.wait_for_busy(SLOTS - 1, FREED_S, at_most=True)
    print(f"the slot of the cancelled child was free {freed_s:.3f} s after the confirmation of its exit")
    done = names["rlm_wait"](others, timeout_s=60)
    assert [status.state for status in done] == ["completed"] * len(others)
    assert all(0 < int(status.result) < 100 for status in done)
    assert all(status.usage.prompt_tokens > 10 and status.usage.completion_tokens > 0 for status in done)
    server.wait_for_busy(0, FREED_S)
