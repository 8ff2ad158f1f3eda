"""``rlm-kernel doctor``: check an installation, and find (with ``--sweep``: kill) what outlived its kernel.

What it looks at is in `checks`; this shows it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict

from rlm_kernel.children.orphans import kill_orphans
from rlm_kernel.jupyter.checks import CHECKS, Finding, State, carry_out

_SWEEP_S = 5.0


def run(args: argparse.Namespace) -> int:
    """Carry out the command. Returns 0 if there is no problem, else 1."""
    if args.sweep:
        return sweep()
    findings = carry_out(CHECKS)
    if args.json:
        found = list(findings)
        print(json.dumps({"ok": is_well(found), "findings": [asdict(finding) for finding in found]}, indent=2))
    elif sys.stdout.isatty():
        found = list(findings)
        show_table(found)
    else:
        found = show_lines(findings)
    return 0 if is_well(found) else 1


def is_well(findings: Iterable[Finding]) -> bool:
    """Tell whether there is no problem among the findings."""
    return all(finding.state is not State.PROBLEM for finding in findings)


def show_lines(findings: Iterable[Finding]) -> list[Finding]:
    """Print each finding when it is there, in plain lines. Returns them."""
    shown = []
    for finding in findings:
        print(f"{finding.state:8}{finding.check}: {finding.found}", flush=True)
        if finding.mend:
            print(f"{'':8}to mend it: {finding.mend}", flush=True)
        shown.append(finding)
    return shown


def show_table(findings: Iterable[Finding]) -> None:
    """Print a table for a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {State.OK: "green", State.NOTE: "yellow", State.PROBLEM: "bold red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        text = Text(finding.found)
        if finding.mend:
            text.append(f"\nto mend it: {finding.mend}", style="italic")
        table.add_row(Text(str(finding.state), style=colours[finding.state]), Text(finding.check), text)
    Console().print(table)


def sweep() -> int:
    """Kill what is left behind. Returns 0 if nothing is left then, else 1."""
    orphans, survivors = kill_orphans(_SWEEP_S)
    for orphan in orphans:
        print(f"{'NOT gone' if orphan.pid in survivors else 'killed'}: pid {orphan.pid}  {orphan.command}")
    print("nothing was left behind" if not orphans else f"{len(orphans)} found, {len(orphans) - len(survivors)} gone")
    return 1 if survivors else 0
