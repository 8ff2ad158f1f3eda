"""docs/lifecycle.md names what exists: settings, variables, magics, commands, errors, headings and files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import rlm_kernel
from rlm_kernel.children.worker import MARKER_VARIABLE
from rlm_kernel.cli import build_parser
from rlm_kernel.jupyter.exits import UNWIND_S
from rlm_kernel.jupyter.magics import RLMMagics
from rlm_kernel.session.config import JUPYTER_SHUTDOWN_WAIT_S, SETTINGS, Settings

CHECKOUT = Path(__file__).resolve().parents[1]
TEXT = (CHECKOUT / "docs" / "lifecycle.md").read_text("utf-8")


def spans(pattern: str) -> set[str]:
    found = set(re.findall(rf"`({pattern})`", TEXT))
    assert found
    return found


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_settings_variables_and_errors_exist() -> None:
    variables = {setting.env for setting in SETTINGS.values() if setting.env} | {MARKER_VARIABLE}
    assert spans(r"RLM_\w+") <= variables
    assert spans(r"[a-z]+_(?:grace_s|alive_s|runs|bytes)") <= set(SETTINGS)
    assert set(re.findall(r"c\.RLM\.(\w+)", TEXT)) == {"limits_locked"} <= set(SETTINGS)
    assert spans(r"[A-Z]\w+(?:Error|Closing|Required)") <= {*rlm_kernel.__all__}


def test_magics_and_commands_exist() -> None:
    assert RLMMagics.rlm.__doc__ is not None
    for command in set(re.findall(r"`%rlm (\w+)", TEXT)):
        assert f"%rlm {command}" in RLMMagics.rlm.__doc__
    for command in spans(r"rlm-kernel [^`]+"):
        assert build_parser().parse_args(shlex.split(command)[1:]).command


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert links
    for link in links:
        name, _, anchor = link.partition("#")
        path = CHECKOUT / "docs" / name if name else CHECKOUT / "docs" / "lifecycle.md"
        assert path.is_file(), link
        assert not anchor or anchor in anchors(path), link


def test_times_are_those_of_the_defaults() -> None:
    values = Settings(environ={}).items()
    graces = [values[name] for name in ("shutdown_grace_s", "terminate_grace_s", "kill_grace_s")]
    assert f"({graces[0]}, {graces[1]}, {graces[2]})" in TEXT
    assert f"{graces[0]} s (`shutdown_grace_s`)" in TEXT
    assert f"{sum(graces[:2])} s (and `terminate_grace_s`)" in TEXT
    assert f"{sum(graces)} s (and `kill_grace_s`)" in TEXT
    assert f"shutdown wait ({JUPYTER_SHUTDOWN_WAIT_S:g} s)" in TEXT
    assert f"has {UNWIND_S:g} s to leave its cell" in TEXT
    assert f"(`RLM_KEEP_ALIVE_S`, {values['keep_alive_s']:g};" in TEXT
