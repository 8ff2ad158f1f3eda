"""Which environment variables look like secrets, and how they are kept away from code and files.

This is hygiene, not a sandbox: a process of the same user can read the kernel's own environment.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping

SECRET_NAME_PATTERNS = ("*_API_KEY", "*TOKEN*", "*SECRET*", "*PASSWORD*", "*CREDENTIALS*", "AWS_*")
"""Shell-style patterns; a variable whose upper-cased name matches one is treated as a secret."""

_SHORTEST_REDACTED = 6
"""Shorter values are not replaced in text: they would hit ordinary words."""

REDACTED = "[redacted]"


def looks_secret(name: str, keep: Iterable[str] = ()) -> bool:
    """Tell whether an environment variable of this name is treated as a secret.

    Args:
        name: the variable's name.
        keep: names that are exempt.
    """
    return name not in set(keep) and any(fnmatch.fnmatchcase(name.upper(), pattern) for pattern in SECRET_NAME_PATTERNS)


def without_secrets(environ: Mapping[str, str], keep: Iterable[str] = ()) -> dict[str, str]:
    """Return a copy of ``environ`` without the variables that look like secrets."""
    kept = tuple(keep)
    return {name: value for name, value in environ.items() if not looks_secret(name, kept)}


def secret_values(environ: Mapping[str, str], keep: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the values of the secret-looking variables that are long enough to be redacted from text, longest first."""
    kept = tuple(keep)
    values = {v for name, v in environ.items() if len(v) >= _SHORTEST_REDACTED and looks_secret(name, kept)}
    return tuple(sorted(values, key=len, reverse=True))


def redact(text: str, secrets: Iterable[str]) -> str:
    """Replace every occurrence of each secret in ``text``."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return text
