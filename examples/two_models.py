"""One model plans, a cheaper one reads: the outer loop and its children use different models.

    python examples/two_models.py --planner openai/gpt-5 --reader openai/gpt-5-mini --context FILE --task TEXT

Without options: the offline ``demo`` model for both, over a sample text.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlm_kernel import LocalRLMRunner, ManagedChildConfig
from rlm_kernel.clients.demo import sample_text
from rlm_kernel.clients.specs import SpecFactory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planner", default="demo", help="model of the outer loop (default: %(default)s)")
    parser.add_argument("--reader", default="demo", help="model of the children (default: %(default)s)")
    parser.add_argument("--context", type=Path, help="a text file")
    parser.add_argument("--task", default="How often does 'comet' occur?")
    options = parser.parse_args()

    context = options.context.read_text("utf-8") if options.context else sample_text()
    planner = SpecFactory(options.planner)()
    # Each child builds its own client from this, in its own process.
    children = ManagedChildConfig(client_factory=SpecFactory(options.reader), max_concurrent_children=4)
    with LocalRLMRunner(planner, managed=children) as runner:
        result = runner.run(context, options.task)

    print(result.final_answer)
    print(f"{options.planner} made {result.iterations} iterations, {options.reader} worked in", file=sys.stderr)
    print(f"{len(result.child_traces)} children; in all {result.usage}", file=sys.stderr)
    return 0 if result.final_answer is not None else 1


if __name__ == "__main__":
    sys.exit(main())
