"""GRPO-style rollouts: for each task a group of episodes, each in a kernel of its own, with rewards and group advantages.

    python examples/rollouts.py --model vllm/Qwen3-8B --group 8 --kernels 4 --seed 0 --out rollouts.jsonl

The policy is a model that writes code, or, without ``--model``, an offline stand-in which picks among good and bad
programs at random. The expected answer never enters the kernel. The same seed gives the same tasks and, with a server
that honours ``seed``, the same episodes, however many kernels work on them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from queue import SimpleQueue
from typing import Any

from rlm_kernel import (
    ExactMatchRubric,
    KernelREPLEnv,
    QueryMetadata,
    REPLRubric,
    build_rlm_system_prompt,
    build_user_prompt,
    extract_code_blocks,
)
from rlm_kernel.clients.specs import PROVIDERS, parse_spec

MAX_ITERATIONS = 4
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Task:
    prompt: str
    context: str
    expected: str


@dataclass
class Rollout:
    task: int
    sample: int
    seed: int
    reward: float = 0.0
    advantage: float = 0.0
    answer: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)


def make_task(rng: random.Random) -> Task:
    words = rng.choices(["ant", "bee", "cat", "dog", "elk", "fox"], k=3000)
    word = rng.choice(words)
    return Task(f"How often does the word {word!r} stand in the context?", " ".join(words), str(words.count(word)))


class StandIn:
    """Plays a policy that is right about half of the time."""

    PROGRAMS = (
        "word = {word!r}\nprint(len(context))\nFINAL(context.split().count(word))",
        "FINAL(context[: len(context) // 2].split().count({word!r}))",
        "print(context.undefined)",
    )

    def complete(self, messages: list[dict[str, str]], seed: int) -> str:
        word = messages[1]["content"].split("'")[1]
        turn = sum(message["role"] == "assistant" for message in messages)
        program = random.Random(f"{seed} {turn}").choices(self.PROGRAMS, weights=(3, 2, 2))[0]
        return f"```repl\n{program.format(word=word)}\n```"


class ServedModel:
    """A model behind an OpenAI-compatible server; each call carries the episode's seed."""

    def __init__(self, spec: str) -> None:
        import os

        from openai import OpenAI

        parsed = parse_spec(spec)
        provider = PROVIDERS[parsed.provider]
        key = next((os.environ[name] for name in provider.key_variables if os.environ.get(name)), "none")
        self._client = OpenAI(base_url=os.environ.get(provider.url_variable) or provider.base_url, api_key=key)
        self._model = parsed.model

    def complete(self, messages: list[dict[str, str]], seed: int) -> str:
        turns: list[Any] = messages
        reply = self._client.chat.completions.create(model=self._model, messages=turns, seed=seed, temperature=1.0)
        return reply.choices[0].message.content or ""


def roll_out(env: KernelREPLEnv, policy: StandIn | ServedModel, task: Task, rollout: Rollout) -> None:
    """Play one episode, and note what came of it."""
    result = env.reset(task.context, task.prompt, expected_answer=task.expected, seed=rollout.seed)
    messages = build_rlm_system_prompt(None, QueryMetadata.of(task.context))
    while not result.done:
        prompt = build_user_prompt(task.prompt, result.observation.iteration, max_iterations=MAX_ITERATIONS)
        messages.append(prompt)
        reply = policy.complete(messages, rollout.seed)
        messages.append({"role": "assistant", "content": reply})
        # One step for each reply, also for one without code: it costs an iteration, too.
        result = env.execute("\n".join(extract_code_blocks(reply)), timeout_s=TIMEOUT_S)
        seen = result.observation.result
        messages.append({"role": "user", "content": seen.stdout + seen.stderr + (seen.exception or "")})
    rollout.reward = float(result.reward or 0.0)
    rollout.answer = result.observation.metadata["final_answer"]
    rollout.messages = messages


def set_advantages(group: Iterable[Rollout]) -> None:
    """Give each rollout its distance from the group's mean, in standard deviations."""
    rollouts = list(group)
    rewards = [rollout.reward for rollout in rollouts]
    spread = statistics.pstdev(rewards) or 1.0
    for rollout in rollouts:
        rollout.advantage = (rollout.reward - statistics.fmean(rewards)) / spread


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="such as vllm/Qwen3-8B; default: an offline stand-in")
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--group", type=int, default=4, help="episodes per task (default: %(default)s)")
    parser.add_argument("--kernels", type=int, default=2, help="kernels at work at once (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="a JSONL file for the rollouts with their messages")
    options = parser.parse_args()

    rng = random.Random(options.seed)
    tasks = [make_task(rng) for _ in range(options.tasks)]
    rollouts = [
        Rollout(number, sample, seed=rng.randrange(2**31))
        for number in range(len(tasks))
        for sample in range(options.group)
    ]
    policy = ServedModel(options.model) if options.model else StandIn()
    envs: SimpleQueue[KernelREPLEnv] = SimpleQueue()
    made = [
        KernelREPLEnv(max_iterations=MAX_ITERATIONS, rubric=REPLRubric(outcome=ExactMatchRubric()))
        for _ in range(options.kernels)
    ]
    for env in made:
        envs.put(env)

    def play(rollout: Rollout) -> None:
        env = envs.get()
        try:
            roll_out(env, policy, tasks[rollout.task], rollout)
        finally:
            envs.put(env)

    try:
        with ThreadPoolExecutor(options.kernels) as pool:
            list(pool.map(play, rollouts))
    finally:
        for env in made:
            env.close()

    for number, task in enumerate(tasks):
        group = [rollout for rollout in rollouts if rollout.task == number]
        set_advantages(group)
        print(f"task {number}: {task.prompt} (expected: {task.expected})")
        for rollout in group:
            print(
                f"  sample {rollout.sample}: answer {rollout.answer!s:>6}  reward {rollout.reward:+.2f}  advantage {rollout.advantage:+.2f}"
            )
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(rollout)) + "\n" for rollout in rollouts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
