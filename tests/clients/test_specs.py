"""Promises of `rlm_kernel.clients.specs` and of the LiteLLM adapter."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from rlm_kernel.clients.base import ModelClient, build_client
from rlm_kernel.clients.openai_compatible import OpenAICompatibleClient
from rlm_kernel.clients.specs import KNOWN_PROVIDERS, PROVIDERS, ModelSpec, SpecFactory, parse_spec, wire_name
from rlm_kernel.credentials import looks_secret
from rlm_kernel.errors import ConfigurationError, ModelCallError
from rlm_kernel.values import Completion, Usage
from tests.support.model_server import ModelServer

CHECKOUT = Path(__file__).resolve().parents[2]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def _no_provider_variables(monkeypatch):
    for provider in PROVIDERS.values():
        for name in (provider.url_variable, *provider.key_variables):
            monkeypatch.delenv(name, raising=False)


def built(spec: str) -> OpenAICompatibleClient:
    client = SpecFactory(spec)()
    assert isinstance(client, OpenAICompatibleClient)
    client.close()
    return client


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("openai/gpt-5-mini", ModelSpec("openai", "gpt-5-mini")),
        (" OpenAI/gpt-5-mini\n", ModelSpec("openai", "gpt-5-mini")),
        ("openrouter/meta/llama", ModelSpec("openrouter", "meta/llama")),
        ("huggingface/Qwen/Qwen3-8B:fastest", ModelSpec("huggingface", "Qwen/Qwen3-8B:fastest")),
        ("hf/Qwen/Qwen3-8B", ModelSpec("huggingface", "Qwen/Qwen3-8B")),
        ("ollama/llama3:8b", ModelSpec("ollama", "llama3:8b")),
        ("litellm/bedrock/claude", ModelSpec("litellm", "bedrock/claude")),
        ("demo", ModelSpec("demo", "demo")),
    ],
)
def test_a_spec_is_split_at_its_first_slash(text, expected) -> None:
    assert parse_spec(text) == expected
    assert parse_spec(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("opnai/gpt-5", "unknown provider 'opnai'; did you mean 'openai/gpt-5'"),
        ("nonsense/gpt-5", "unknown provider 'nonsense'. Providers: openai, vllm"),
        ("gpt-5-mini", "did you mean 'openai/gpt-5-mini'"),
        ("ollama", "must name a model, as in 'ollama/MODEL'"),
        ("openai/", "must name a model"),
        ("dem", "did you mean 'demo'"),
        ("/gpt-5", "must be 'provider/model'"),
        ("", "must be 'provider/model'"),
        ("openai/gpt 5", "no spaces"),
        (None, "must be a string"),
        (5, "must be a string"),
    ],
)
def test_what_is_no_spec_is_refused_with_what_would_be(text, reason) -> None:
    for parse in (parse_spec, SpecFactory):
        with pytest.raises(ConfigurationError, match=reason) as caught:
            parse(text)
        assert (caught.value.field, caught.value.value) == ("model", text)


def test_an_unknown_provider_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_spec("zzz/x")
    assert all(name in str(caught.value) for name in KNOWN_PROVIDERS)


def test_parsing_a_spec_and_pickling_its_factory_load_nothing_heavy() -> None:
    program = (
        "import sys, pickle; from rlm_kernel.clients.specs import SpecFactory; pickle.dumps(SpecFactory('openai/x'));"
        "print(sorted({'openai', 'httpx2', 'pydantic', 'litellm', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_spec_factory_travels_by_pickle_and_knows_its_model() -> None:
    factory = pickle.loads(pickle.dumps(SpecFactory(" openrouter/meta/llama ")))
    assert factory == SpecFactory("openrouter/meta/llama")
    assert factory.model_name == "meta/llama"


@pytest.mark.parametrize("name", PROVIDERS)
def test_every_provider_can_be_built_from_its_table_row(name, monkeypatch) -> None:
    provider = PROVIDERS[name]
    monkeypatch.setenv("OPENAI_API_KEY", "must-not-go-elsewhere")
    monkeypatch.setenv(provider.key_variables[0], "the-right-key")
    client = built(f"{name}/some-model")
    assert client.base_url == provider.base_url
    assert client.default_model == "some-model"
    assert client._key == "the-right-key"
    assert all(looks_secret(variable) for variable in provider.key_variables), "the nursery would inherit it"


@pytest.mark.parametrize("name", [name for name, provider in PROVIDERS.items() if provider.needs_key])
def test_a_missing_key_is_reported_when_the_client_is_built_and_names_the_variable(name, monkeypatch) -> None:
    if name != "openai":
        monkeypatch.setenv("OPENAI_API_KEY", "must-not-go-elsewhere")
    with pytest.raises(ModelCallError, match=f"{name}/m needs a key. Set {PROVIDERS[name].key_variables[0]} "):
        build_client(SpecFactory(f"{name}/m"))


@pytest.mark.parametrize("name", [name for name, provider in PROVIDERS.items() if not provider.needs_key])
def test_a_local_server_needs_no_key_and_never_gets_another_providers(name, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "must-not-go-elsewhere")
    assert built(f"{name}/m")._key == "no-key"


def test_the_second_variable_for_a_key_is_used_if_the_first_is_not_set(monkeypatch) -> None:
    monkeypatch.setenv("GOOGLE_API_KEY", "from-google")
    assert built("gemini/m")._key == "from-google"


@pytest.mark.parametrize(
    ("spec", "variable", "value", "expected"),
    [
        ("openai/m", "OPENAI_BASE_URL", "http://127.0.0.1:9/api", "http://127.0.0.1:9/api"),
        ("vllm/m", "VLLM_BASE_URL", "http://gpu:8001", "http://gpu:8001/v1"),
        ("vllm/m", "VLLM_BASE_URL", "https://gpu/serve/v1", "https://gpu/serve/v1"),
        ("ollama/m", "OLLAMA_HOST", "http://box:11434", "http://box:11434/v1"),
        ("ollama/m", "OLLAMA_HOST", "box", "http://box:11434/v1"),
        ("ollama/m", "OLLAMA_HOST", "box:1", "http://box:1/v1"),
        ("ollama/m", "OLLAMA_HOST", "0.0.0.0", "http://localhost:11434/v1"),
        ("ollama/m", "OLLAMA_HOST", "0.0.0.0:5000", "http://localhost:5000/v1"),
        ("ollama/m", "OLLAMA_HOST", "[::1]:5000", "http://[::1]:5000/v1"),
        ("ollama/m", "OLLAMA_HOST", "  ", "http://localhost:11434/v1"),
        ("groq/m", "GROQ_BASE_URL", "http://proxy:9", "http://proxy:9/openai/v1"),
    ],
)
def test_a_variable_overrides_the_base_url_and_is_completed(spec, variable, value, expected, monkeypatch) -> None:
    monkeypatch.setenv(variable, value)
    assert built(spec).base_url == expected


def test_an_overriding_url_that_is_none_says_which_variable(monkeypatch) -> None:
    monkeypatch.setenv("OLLAMA_HOST", "box:notaport")
    with pytest.raises(ConfigurationError, match="OLLAMA_HOST='box:notaport'"):
        SpecFactory("ollama/m")()


@pytest.mark.parametrize(
    ("provider", "model", "sent"),
    [
        ("openai", "gpt-5", "gpt-5"),
        ("openai", "openai/gpt-5", "gpt-5"),
        ("openai", "mistral/x", "mistral/x"),
        ("vllm", "openai/gpt-oss-20b", "openai/gpt-oss-20b"),
        ("vllm", "vllm/openai/gpt-oss-20b", "openai/gpt-oss-20b"),
        ("openrouter", "openrouter/auto", "openrouter/auto"),
        ("openrouter", "openrouter/meta/llama", "meta/llama"),
        ("openrouter", "openai/gpt-5", "openai/gpt-5"),
        ("groq", "groq/compound", "groq/compound"),
        ("huggingface", "hf/Qwen/Qwen3", "Qwen/Qwen3"),
        ("openai", "openai/", "openai/"),
    ],
)
def test_a_call_may_name_its_model_by_spec(provider, model, sent) -> None:
    assert wire_name(provider, model) == sent


def test_a_spec_completes_over_http_with_the_key_and_model_of_the_spec(monkeypatch) -> None:
    with ModelServer(reply="hi") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        client = SpecFactory("openai/some/model")()
        assert client.complete(HELLO).text == "hi"
        assert client.complete(HELLO, "openai/other").text == "hi"
        assert isinstance(client, OpenAICompatibleClient)
        client.close()
        assert [request.body["model"] for request in server.requests] == ["some/model", "other"]
        assert server.requests[0].headers["authorization"] == f"Bearer {server.api_key}"


def test_an_overridden_url_may_belong_to_a_server_that_wants_no_key(monkeypatch) -> None:
    with ModelServer(reply="hi") as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        client = SpecFactory("openai/m")()
        assert client.complete(HELLO).text == "hi"
        assert isinstance(client, OpenAICompatibleClient)
        client.close()


# --- demo and LiteLLM


def test_the_demo_spec_builds_the_embedded_client() -> None:
    client = SpecFactory("demo")()
    assert isinstance(client, ModelClient)
    assert SpecFactory("demo").model_name == "demo"


class FakeReply:
    def __init__(self, payload) -> None:
        self.payload = payload

    def model_dump(self):
        return self.payload


class FakeLiteLLM:
    """Stands in for the module."""

    def __init__(self) -> None:
        self.reply: object = None
        self.calls: list[dict] = []

    def completion(self, **arguments):
        self.calls.append(arguments)
        if isinstance(self.reply, Exception):
            raise self.reply
        return FakeReply(self.reply)


@pytest.fixture
def litellm(monkeypatch) -> FakeLiteLLM:
    fake = FakeLiteLLM()
    monkeypatch.setitem(sys.modules, "litellm", fake)
    return fake


def test_litellm_gets_the_model_and_its_reply_is_read(litellm) -> None:
    litellm.reply = {"choices": [{"message": {"content": "hi"}}], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}
    client = SpecFactory("litellm/bedrock/claude")()
    assert client.complete(HELLO) == Completion("hi", Usage(1, 2, 1))
    client.complete(HELLO, "litellm/other/x")
    assert [call["model"] for call in litellm.calls] == ["bedrock/claude", "other/x"]
    assert litellm.calls[0]["messages"] == HELLO


def test_a_failing_litellm_call_is_one_readable_line(litellm) -> None:
    litellm.reply = ValueError("no\nregion")
    with pytest.raises(ModelCallError) as caught:
        SpecFactory("litellm/bedrock/claude")().complete(HELLO)
    assert "ValueError: no region" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_litellm_the_error_says_how_to_install_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "litellm", None)  # makes the import fail
    with pytest.raises(ModelCallError, match=r'pip install "rlm-kernel\[litellm\]"'):
        SpecFactory("litellm/x")()
