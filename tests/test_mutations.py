"""The table of deliberate breaks is kept true: each still applies, names a test that exists, and stands in tests/README.md."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import mutations


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda m: m.what[:60])
def test_each_break_still_applies_and_its_test_exists(mutation: mutations.Mutation) -> None:
    assert mutations.applies(mutation)
    file, _, name = mutation.test.partition("::")
    tree = ast.parse((mutations.ROOT / file).read_text("utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert not name or name in names


def test_the_table_in_the_docs_is_this_one() -> None:
    assert mutations.table() in (Path(__file__).parent / "README.md").read_text("utf-8")


def test_there_are_enough_of_them() -> None:
    assert len(mutations.MUTATIONS) >= 10
