"""Promises of `rlm_kernel.credentials`."""

from __future__ import annotations

import pytest

from rlm_kernel.credentials import REDACTED, looks_secret, redact, secret_values, without_secrets


@pytest.mark.parametrize(
    "name",
    [
        "OPENAI_API_KEY",
        "openai_api_key",
        "HF_TOKEN",
        "TOKEN",
        "GITHUB_TOKEN_2",
        "CLIENT_SECRET",
        "SECRET_SAUCE",
        "DB_PASSWORD",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "AWS_REGION",
        "aws_session",
    ],
)
def test_a_name_that_looks_like_a_secret_is_one(name: str) -> None:
    assert looks_secret(name)
    assert not looks_secret(name, [name])


@pytest.mark.parametrize("name", ["PATH", "HOME", "API_KEYS_FILE", "OPENAI_BASE_URL", "LAWS_1", "KEY", "RLM_MODEL"])
def test_other_names_are_none(name: str) -> None:
    assert not looks_secret(name)


def test_an_exemption_is_for_exactly_that_name() -> None:
    assert looks_secret("my_token", ["MY_TOKEN"])
    assert looks_secret("MY_TOKEN_2", ["MY_TOKEN"])


def test_secrets_are_left_out_and_the_rest_is_kept() -> None:
    environ = {"PATH": "/bin", "A_TOKEN": "1", "B_TOKEN": "2"}
    assert without_secrets(environ) == {"PATH": "/bin"}
    assert without_secrets(environ, iter(["B_TOKEN"])) == {"PATH": "/bin", "B_TOKEN": "2"}
    assert len(environ) == 3


def test_values_long_enough_to_be_told_from_words_are_redacted_longest_first() -> None:
    environ = {"A_TOKEN": "abcdef", "B_TOKEN": "abcdefgh", "C_TOKEN": "short", "PATH": "/usr/bin", "D_TOKEN": "abcdef"}
    assert secret_values(environ) == ("abcdefgh", "abcdef")
    assert secret_values(environ, ["B_TOKEN"]) == ("abcdef",)


def test_every_occurrence_goes_and_a_secret_within_a_secret_leaves_nothing_standing() -> None:
    secrets = secret_values({"A_TOKEN": "abcdef", "B_TOKEN": "abcdefgh"})
    assert redact("abcdefgh, abcdef; abcdefgh", secrets) == f"{REDACTED}, {REDACTED}; {REDACTED}"
    assert redact("nothing here", secrets) == "nothing here"
