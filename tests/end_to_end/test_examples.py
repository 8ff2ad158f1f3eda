"""The examples run as they are, and tell the truth."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kernels import environment
from tests.support.model_server import ModelServer, code, script

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.slow


def run(home: Path, name: str, *options: str, **variables: str) -> tuple[str, str]:
    """Run an example, and return what it wrote to stdout and stderr."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *options],
        env=environment(home, **variables),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_every_example_is_listed_and_tested() -> None:
    listed = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())
    here = Path(__file__).read_text()
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert all(f'"{name}"' in here for name in listed)


def test_two_models_each_do_their_part(tmp_path) -> None:
    planner, reader = ModelServer(), ModelServer()
    with planner, reader:
        text = tmp_path / "text"
        text.write_text("one two three")
        child = script(code("FINAL(len(context.split()))"))
        task = script(code(f"FINAL(rlm_query({child!r}, context=context))"))
        variables = {"VLLM_BASE_URL": planner.base_url, "SGLANG_BASE_URL": reader.base_url}
        models = ("--planner", "vllm/large", "--reader", "sglang/small")
        out, err = run(tmp_path, "two_models.py", *models, "--context", str(text), "--task", task, **variables)
        assert out == "3\n"
        assert "1 children" in err
        assert [request.body["model"] for request in planner.requests] == ["large"]
        assert [request.body["model"] for request in reader.requests] == ["small"]


def test_a_local_server_is_asked_what_it_serves_and_is_shared(tmp_path) -> None:
    with ModelServer("```repl\nFINAL('blue')\n```", models=("served",)) as server:
        out, err = run(tmp_path, "local_server.py", "vllm", "--url", server.base_url)
        assert out.count("→ blue") == 3
        assert "vllm/served" in err


def test_counts_over_a_long_context_are_right(tmp_path) -> None:
    out, _ = run(tmp_path, "counting.py", "--records", "300")
    assert out.count("score 1.00") == 5
    assert "mean score" in out


def test_rollouts_are_the_same_with_the_same_seed_however_many_kernels_play_them(tmp_path) -> None:
    def rollouts(kernels: int, name: str) -> list[dict]:
        file = tmp_path / name
        run(tmp_path, "rollouts.py", "--kernels", str(kernels), "--seed", "3", "--out", str(file))
        return [json.loads(line) for line in file.read_text().splitlines()]

    two = rollouts(2, "two")
    assert rollouts(1, "one") == two
    assert len(two) == 8
    assert {rollout["reward"] for rollout in two} >= {0.0, 1.0}
    for number in (0, 1):
        group = [rollout for rollout in two if rollout["task"] == number]
        assert abs(sum(rollout["advantage"] for rollout in group)) < 1e-9
