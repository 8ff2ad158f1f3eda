"""OOLONG-style counting: questions about a long list of records, each easy by itself, whose right answers are known.

    python examples/counting.py --records 5000 --model openai/gpt-5-mini

After *OOLONG* (Bertsch et al. 2025), whose score for a number is 0.75 to the power of the distance from the right one.
The context is made from a seed, so a run can be repeated.
"""

from __future__ import annotations

import argparse
import random
import re
import sys

from rlm_kernel import LocalRLMRunner, ManagedChildConfig
from rlm_kernel.clients.specs import SpecFactory

LABELS = ("entity", "location", "number", "person", "abbreviation")
WORDS = ["amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "jetty", "knoll", "lagoon"]


def make_records(count: int, rng: random.Random) -> list[tuple[str, str]]:
    """Return so many lines of text, each with the label that it carries."""
    records = []
    for number in range(count):
        label = rng.choices(LABELS, weights=(5, 4, 3, 2, 1))[0]
        words = " ".join(rng.choices(WORDS, k=8))
        line = f"Date: 2025-{rng.randint(1, 12):02}-{rng.randint(1, 28):02} || User: {number % 97} || {words} || Label: {label}"
        records.append((line, label))
    return records


def score(answer: str | None, right: int) -> float:
    """Return 1 if the first number in the answer is right, and less the further away it is; 0 without a number."""
    number = re.search(r"\d+", (answer or "").replace(",", ""))
    return 0.0 if number is None else float(0.75 ** abs(int(number[0]) - right))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="default: %(default)s")
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    records = make_records(options.records, random.Random(options.seed))
    context = "\n".join(line for line, _ in records)
    factory = SpecFactory(options.model)
    scores = []
    with LocalRLMRunner(factory(), managed=ManagedChildConfig(client_factory=factory)) as runner:
        for label in LABELS:
            right = sum(labelled == label for _, labelled in records)
            answer = runner.run(context, f"How many lines contain 'Label: {label}'?").final_answer
            scores.append(score(answer, right))
            print(f"{label:>12}: {answer} (right: {right})  score {scores[-1]:.2f}")
    print(f"mean score over {len(context):,} characters: {sum(scores) / len(scores):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
