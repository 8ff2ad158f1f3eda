"""Model specs: ``provider/model`` strings, and the clients that they stand for.

One table says, for each provider, where it listens and which variable holds its key. Parsing needs nothing but that
table; ``openai`` is imported when a client is built, in the process that uses it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from rlm_kernel.clients.base import ModelClient, build_client
from rlm_kernel.errors import ConfigurationError, ModelCallError


@dataclass(frozen=True, slots=True)
class Provider:
    """An OpenAI-compatible endpoint.

    Attributes:
        base_url: where it is, unless ``url_variable`` says otherwise.
        url_variable: the environment variable that overrides ``base_url``.
        key_variables: environment variables that may hold the key, the usual one first.
        needs_key: whether it is no use without a key.
        aggregator: whether its model names are themselves of the form ``vendor/model``.
        exact_url: take an overriding URL as it is, without completing scheme and path.
        stream: ask for replies piece by piece (see `OpenAICompatibleClient`).
    """

    base_url: str
    url_variable: str
    key_variables: tuple[str, ...]
    needs_key: bool = True
    aggregator: bool = False
    exact_url: bool = False
    stream: bool = False


def _local(port: int, name: str, url_variable: str | None = None, *, stream: bool = False) -> Provider:
    url = f"http://localhost:{port}/v1"
    return Provider(url, url_variable or f"{name}_BASE_URL", (f"{name}_API_KEY",), needs_key=False, stream=stream)


def _hosted(base_url: str, name: str, *other_keys: str, aggregator: bool = False) -> Provider:
    return Provider(base_url, f"{name}_BASE_URL", (f"{name}_API_KEY", *other_keys), aggregator=aggregator)


PROVIDERS: Mapping[str, Provider] = {
    "openai": Provider("https://api.openai.com/v1", "OPENAI_BASE_URL", ("OPENAI_API_KEY",), exact_url=True),
    "vllm": _local(8000, "VLLM"),
    "sglang": _local(30000, "SGLANG"),
    "llamacpp": _local(8080, "LLAMACPP", stream=True),
    "lmstudio": _local(1234, "LMSTUDIO"),
    "ollama": _local(11434, "OLLAMA", "OLLAMA_HOST"),
    "openrouter": _hosted("https://openrouter.ai/api/v1", "OPENROUTER", aggregator=True),
    "huggingface": Provider(
        "https://router.huggingface.co/v1", "HUGGINGFACE_BASE_URL", ("HF_TOKEN", "HUGGINGFACE_API_KEY"), aggregator=True
    ),
    "together": _hosted("https://api.together.xyz/v1", "TOGETHER", aggregator=True),
    "groq": _hosted("https://api.groq.com/openai/v1", "GROQ", aggregator=True),
    "nvidia": _hosted("https://integrate.api.nvidia.com/v1", "NVIDIA", aggregator=True),
    "fireworks": _hosted("https://api.fireworks.ai/inference/v1", "FIREWORKS", aggregator=True),
    "cerebras": _hosted("https://api.cerebras.ai/v1", "CEREBRAS"),
    "mistral": _hosted("https://api.mistral.ai/v1", "MISTRAL"),
    "deepseek": _hosted("https://api.deepseek.com/v1", "DEEPSEEK"),
    "xai": _hosted("https://api.x.ai/v1", "XAI"),
    "moonshot": _hosted("https://api.moonshot.ai/v1", "MOONSHOT"),
    "perplexity": _hosted("https://api.perplexity.ai", "PERPLEXITY"),
    "gemini": _hosted("https://generativelanguage.googleapis.com/v1beta/openai", "GEMINI", "GOOGLE_API_KEY"),
    "anthropic": _hosted("https://api.anthropic.com/v1", "ANTHROPIC"),
}
"""Every provider that is reached through the ``openai`` package."""

DEMO = "demo"
LITELLM = "litellm"
KNOWN_PROVIDERS = (*PROVIDERS, LITELLM, DEMO)

_ALIASES = {"hf": "huggingface", "lm-studio": "lmstudio", "llama.cpp": "llamacpp", "google": "gemini", "x-ai": "xai"}
_DEMO_CLIENT = "rlm_kernel.clients.demo:DemoClient"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A parsed spec: one of `KNOWN_PROVIDERS`, and the model's name as that provider knows it (with its slashes)."""

    provider: str
    model: str

    def __str__(self) -> str:
        return self.provider if self.provider == DEMO else f"{self.provider}/{self.model}"


@dataclass(frozen=True, slots=True)
class SpecFactory:
    """A client factory for a model spec: picklable, and cheap until it is called.

    Args:
        spec: ``provider/model``, or ``demo``.

    Raises:
        ConfigurationError: the spec is not one.
    """

    spec: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", str(parse_spec(self.spec)))

    @property
    def model_name(self) -> str:
        """The model's name as its provider knows it."""
        return parse_spec(self.spec).model

    @property
    def uses_openai(self) -> bool:
        """Whether the client works through the ``openai`` package."""
        return parse_spec(self.spec).provider not in (DEMO, LITELLM)

    def __call__(self) -> ModelClient:
        """Build the client in this process, from the environment as it is now.

        Raises:
            ModelCallError: a key that the provider needs is missing, or LiteLLM is.
            ConfigurationError: the environment overrides the base URL with something that is none.
        """
        spec = parse_spec(self.spec)
        if spec.provider == DEMO:
            return build_client(_DEMO_CLIENT)
        if spec.provider == LITELLM:
            from rlm_kernel.clients.litellm_adapter import LiteLLMClient

            return LiteLLMClient(spec.model)
        return _openai_compatible(spec)


def parse_spec(text: str) -> ModelSpec:
    """Parse a model spec.

    Args:
        text: ``provider/model``; everything after the first slash is the model's name. ``demo`` stands alone.

    Raises:
        ConfigurationError: unknown provider or no model; the message shows what would be right.
    """
    if not isinstance(text, str):
        raise ConfigurationError("model", text, "must be a string such as 'openai/gpt-5-mini'")
    head, slash, model = text.strip().partition("/")
    provider, model = _ALIASES.get(head.strip().lower(), head.strip().lower()), model.strip()
    if provider == DEMO:
        return ModelSpec(DEMO, DEMO)
    if not provider:
        raise ConfigurationError("model", text, f"must be 'provider/model', with a provider of: {_known()}")
    if provider not in KNOWN_PROVIDERS:
        raise ConfigurationError("model", text, _unknown_provider(head.strip(), slash, model))
    if not model:
        raise ConfigurationError("model", text, f"must name a model, as in '{provider}/MODEL'")
    if any(c.isspace() or not c.isprintable() for c in model):
        raise ConfigurationError("model", text, "a model's name has no spaces in it")
    return ModelSpec(provider, model)


def wire_name(provider: str, model: str) -> str:
    """Return the name that is sent for a model named in a call, which may be a whole spec of this provider.

    ``openai/gpt-5`` is sent to OpenAI as ``gpt-5``. Where names have slashes of their own, a prefix is taken for the
    provider's only if what follows has one too: OpenRouter has a model ``openrouter/auto``.
    """
    head, slash, rest = model.partition("/")
    if not (slash and rest and _ALIASES.get(head, head) == provider):
        return model
    aggregator = provider in PROVIDERS and PROVIDERS[provider].aggregator
    return model if aggregator and "/" not in rest else rest


def _known() -> str:
    return ", ".join(KNOWN_PROVIDERS)


def _unknown_provider(head: str, slash: str, model: str) -> str:
    import difflib

    if not slash:  # a bare model's name, or a misspelt "demo"
        close = difflib.get_close_matches(head.lower(), KNOWN_PROVIDERS, n=1, cutoff=0.75)
        suggestion = (close[0] if close[0] == DEMO else f"{close[0]}/MODEL") if close else f"openai/{head}"
        return f"must be 'provider/model'; did you mean '{suggestion}'? Providers: {_known()}"
    close = difflib.get_close_matches(head.lower(), (*KNOWN_PROVIDERS, *_ALIASES), n=1, cutoff=0.6)
    hint = f"; did you mean '{_ALIASES.get(close[0], close[0])}/{model}'?" if close else "."
    return f"unknown provider {head!r}{hint} Providers: {_known()}"


def _openai_compatible(spec: ModelSpec) -> ModelClient:
    from rlm_kernel.clients.openai_compatible import OpenAICompatibleClient

    provider = PROVIDERS[spec.provider]
    override = os.environ.get(provider.url_variable, "").strip()
    key_variable = next((name for name in provider.key_variables if os.environ.get(name)), provider.key_variables[0])
    key = os.environ.get(key_variable, "").strip()
    if not key and provider.needs_key and not override:  # behind an overridden URL may be a server that wants none
        raise ModelCallError(f"{spec} needs a key. Set {key_variable} (`%env {key_variable}=…`), then try again.")
    rename: Callable[[str], str] = partial(wire_name, spec.provider)
    return OpenAICompatibleClient(
        base_url=_base_url(provider, override),
        api_key=key or None,
        default_model=spec.model,
        key_variable=key_variable,
        wire_name=rename,
        stream=provider.stream,
    )


def _base_url(provider: Provider, override: str) -> str:
    """Return the base URL, completing an override such as ``myhost:11434`` (what ``OLLAMA_HOST`` looks like)."""
    if not override:
        return provider.base_url
    if provider.exact_url:
        return override
    url = override if "://" in override else f"http://{override}"
    try:
        parts, usual = urlsplit(url), urlsplit(provider.base_url)
        host, port = parts.hostname or "", parts.port
    except ValueError as exc:
        raise ConfigurationError(provider.url_variable, override, f"is no URL ({exc})") from exc
    if host in ("0.0.0.0", "::"):  # where a server listens, not where it can be reached
        parts = parts._replace(netloc=f"localhost:{port}" if port else "localhost")
    if "://" not in override and port is None:
        parts = parts._replace(netloc=f"{parts.netloc}:{usual.port}" if usual.port else parts.netloc)
    if parts.path in ("", "/"):
        parts = parts._replace(path=usual.path)
    return parts.geturl()
