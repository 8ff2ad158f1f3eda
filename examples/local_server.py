"""Several children share one local inference server.

    vllm serve Qwen/Qwen3-8B --port 8000        python examples/local_server.py vllm
    python -m sglang.launch_server --model …    python examples/local_server.py sglang
    ollama serve                                python examples/local_server.py ollama --model llama3.2
    llama-server -m MODEL.gguf                  python examples/local_server.py llamacpp

Where the server listens somewhere else, ``--url`` says so. ``--at-once`` bounds how many calls are under way at a time over the
whole tree of children: more than the server has slots only makes each of them slower.
"""

from __future__ import annotations

import argparse
import os
import sys

from rlm_kernel import ManagedChildConfig, ManagedChildren
from rlm_kernel.clients.openai_compatible import OpenAICompatibleClient
from rlm_kernel.clients.specs import PROVIDERS, SpecFactory

QUESTIONS = ("Name a colour.", "Name a river.", "Name a number between 1 and 9.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", choices=["vllm", "sglang", "ollama", "llamacpp", "lmstudio"])
    parser.add_argument("--url", help="such as http://gpu-box:8000/v1")
    parser.add_argument("--model", help="default: the first that the server offers")
    parser.add_argument("--at-once", type=int, default=4)
    options = parser.parse_args()
    if options.url:
        os.environ[PROVIDERS[options.server].url_variable] = options.url

    model = options.model or served_models(options.server)[0]
    print(f"model: {options.server}/{model}", file=sys.stderr)
    config = ManagedChildConfig(
        client_factory=SpecFactory(f"{options.server}/{model}"),
        max_iterations=4,
        max_concurrent_model_calls=options.at_once,
    )
    children = ManagedChildren(config)
    try:
        helpers = children.helpers()
        handles = [helpers["rlm_query"](question, blocking=False) for question in QUESTIONS]
        failed = 0
        for status in helpers["rlm_as_completed"](handles):
            failed += status.state != "completed"
            print(f"{status.prompt_preview} → {status.result or status.error}")
    finally:
        children.close()
    return 1 if failed else 0


def served_models(server: str) -> list[str]:
    """Return what the server offers."""
    client = SpecFactory(f"{server}/any")()
    assert isinstance(client, OpenAICompatibleClient)
    models = client.models()
    client.close()
    return models or ["default"]


if __name__ == "__main__":
    sys.exit(main())
