"""What the episode's model calls have used, by model and by run, and never with a price that nobody gave.

That the sum is the episode's usage to the token, with real children: ``tests/session/test_limits.py``.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rlm_kernel.children.history import ChildHistory, History
from rlm_kernel.clients.specs import SpecFactory
from rlm_kernel.errors import ConfigurationError
from rlm_kernel.jupyter.views.costs import CostView, Price, cost_view, parse_price
from rlm_kernel.session.models import name_for_usage
from rlm_kernel.values import ChildState, ChildStatus, Usage

ByModel = dict[str, Usage]
BIG, SMALL = "openai/big", "openai/small"


def child(number: int, usage: ByModel, parent: int | None = None, name: str = "") -> ChildHistory:
    history = History()
    history.enter(ChildState.QUEUED, float(number))
    total = sum(usage.values(), Usage())
    parent_id = None if parent is None else f"c{parent}"
    status = ChildStatus(f"c{number}", name or f"c{number}", 1, parent_id, ChildState.RUNNING, usage=total)
    return history.snapshot(status, usage, 100.0, 0.0)


def view(root: ByModel, *children: ChildHistory, **options: Any) -> CostView:
    session: Any = SimpleNamespace(
        episode_id="e1", root_usage_by_model=root, supervisor=SimpleNamespace(histories=lambda: list(children))
    )
    return cost_view(session, **options)


def cells(shown: CostView, table: int, first: str) -> list[str]:
    """Return the numbers of the row that begins like this."""
    [row] = [row for row in shown.tables[table] if row[0].strip().startswith(first)]
    return list(row[1:])


def a_family() -> tuple[ByModel, ChildHistory, ChildHistory, ChildHistory]:
    return (
        {BIG: Usage(1, 100, 10)},
        child(1, {BIG: Usage(2, 2000, 200)}, name="planner"),
        child(2, {BIG: Usage(1, 10, 1), SMALL: Usage(3, 30, 3)}, parent=1),
        child(3, {SMALL: Usage(1, 5, 5)}, parent=2),
    )


# ------------------------------------------------------------------------------------------------------------- counting


def test_usage_is_shown_by_model_by_run_and_with_descendants() -> None:
    shown = view(*a_family())
    assert shown.title == "8 model calls in episode e1: 2,145 + 219 = 2,364 tokens"
    assert cells(shown, 0, BIG) == ["4", "2,110", "211"]
    assert cells(shown, 0, SMALL) == ["4", "35", "8"]
    assert cells(shown, 0, "all models") == ["8", "2,145", "219"]
    assert cells(shown, 1, "notebook") == ["1", "100", "10", "", "", ""]
    assert cells(shown, 1, "c1 planner") == ["2", "2,000", "200", "7", "2,045", "209"]
    assert cells(shown, 1, "c2") == ["4", "40", "4", "5", "45", "9"]
    assert cells(shown, 1, "c3") == ["1", "5", "5", "", "", ""]
    assert cells(shown, 1, "all runs")[:3] == ["8", "2,145", "219"]
    assert [row[0] for row in shown.tables[1][2:5]] == ["c1 planner", "  c2", "    c3"]


def test_of_very_many_children_those_with_few_tokens_share_a_row_and_the_sum_holds() -> None:
    children = [child(i, {BIG: Usage(1, i, 0)}) for i in range(1, 201)]
    shown = view({}, *children)
    rows = shown.tables[1]
    assert len(rows) < 70
    numbers = [int(row[2].replace(",", "")) for row in rows[1:]]
    assert sum(numbers[:-1]) == numbers[-1] == sum(range(1, 201))
    assert cells(shown, 1, "140 more children")[0] == "140"


def test_an_episode_without_calls_says_so() -> None:
    assert view({}, child(1, {})).text() == "No model call has ended in episode e1 yet"


def test_names_from_outside_are_no_markup_and_move_no_cursor() -> None:
    hostile = "</td><script>alert(1)</script>\x1b[2J"
    shown = view(
        {hostile: Usage(1, 1, 1)}, child(1, {hostile: Usage(1, 1, 1)}, name=hostile), prices={hostile: Price(1, 1)}
    )
    assert "<script>" not in shown.html()
    assert "\x1b" not in shown.text()


def test_columns_stand_below_each_other() -> None:
    from rich.cells import cell_len

    lines = view({BIG: Usage(1, 100, 10)}, child(1, {BIG: Usage(1, 1, 1)}, name="数据")).text().splitlines()
    table = lines[lines.index(next(line for line in lines if line.startswith("run "))) :][:4]
    assert len(set(map(cell_len, table))) == 1


# ---------------------------------------------------------------------------------------------------------------- money


def test_without_prices_there_is_no_money_and_a_line_on_how_to_give_them() -> None:
    shown = view(*a_family())
    assert "dollars" not in "".join(shown.tables[0][0] + shown.tables[1][0])
    assert "--price MODEL=IN/OUT" in shown.text()
    assert "--price MODEL=IN/OUT" in shown.html()


@pytest.mark.parametrize(
    "given", [["big=1/10", "openai/small=100/1000"], {"big": Price(1, 10), SMALL: Price(100, 1000)}]
)
def test_given_prices_are_dollars_per_million_tokens_with_or_without_the_provider(given: Any) -> None:
    shown = view(*a_family(), prices=given)
    assert cells(shown, 0, BIG)[-1] == "0.0042"
    assert cells(shown, 0, SMALL)[-1] == "0.0115"
    assert cells(shown, 0, "all models")[-1] == "0.0157"
    assert cells(shown, 1, "c3")[3] == "0.0055"
    assert shown.title.endswith("0.0157 dollars")
    assert shown.notes == ()


def test_what_has_no_price_has_none_and_the_sum_says_at_least() -> None:
    shown = view(*a_family(), prices=["big=1/10", "nobody=1/1"])
    assert cells(shown, 0, SMALL)[-1] == "?"
    assert cells(shown, 0, "all models")[-1] == "at least 0.0042"
    assert f"no price for {SMALL}" in shown.text()
    assert "no call went to nobody" in shown.text()


@pytest.mark.parametrize("text", ["", "big", "big=1", "=1/2", "big=a/b", "big=1/-2", "big=nan/1", "big=inf/1", "1/2"])
def test_a_wrong_price_is_an_error_that_says_what_one_looks_like(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--price=.*MODEL=IN/OUT"):
        parse_price(text)


def test_a_model_may_have_an_equals_sign_in_its_name() -> None:
    assert parse_price("a=b/c=0.5/2") == ("a=b/c", Price(0.5, 2))


def listed(provider: str, prompt: float, completion: float) -> dict[str, Any]:
    return {"litellm_provider": provider, "input_cost_per_token": prompt, "output_cost_per_token": completion}


def test_litellms_list_is_used_where_it_is_loaded_and_only_for_the_models_own_provider(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = {"big": listed("openai", 1e-6, 2e-6), "groq/small": listed("groq", 1.0, 1.0), "free": {"mode": "chat"}}
    usage = {
        name: Usage(1, 1_000_000, 0) for name in (BIG, "vllm/big", "big", "groq/small", "openai/small", "openai/free")
    }
    monkeypatch.setitem(sys.modules, "litellm", SimpleNamespace(model_cost=table))
    shown = view(usage)
    money = {row[0]: row[-1] for row in shown.tables[0][1:-1]}
    assert money == {
        BIG: "1.0000",
        "vllm/big": "?",
        "big": "?",
        "groq/small": "1,000,000.0000",
        SMALL: "?",
        "openai/free": "?",
    }
    assert "LiteLLM's price list" in shown.text()
    assert cells(view(usage, prices=["openai/big=7/0"]), 0, BIG)[-1] == "7.0000", "what is given comes first"


def test_litellm_is_not_imported_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "litellm", raising=False)
    view(*a_family())
    assert "litellm" not in sys.modules
    monkeypatch.setitem(sys.modules, "litellm", None)
    with pytest.raises(ConfigurationError, match=r"rlm-kernel\[litellm\]"):
        view(*a_family(), litellm=True)


# ---------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("factory", "model", "name"),
    [
        (SpecFactory("openai/big"), None, "openai/big"),
        (SpecFactory("openai/big"), "small", "openai/small"),
        (SpecFactory("openai/big"), "openai/small", "openai/small"),
        (SpecFactory("openrouter/openai/big"), "openai/small", "openrouter/openai/small"),
        (SpecFactory("demo"), "anything", "demo"),
        ("module:make", None, "module:make"),
        ("module:make", "small", "small"),
    ],
)
def test_usage_is_counted_under_the_full_name_where_that_is_known(factory: Any, model: str | None, name: str) -> None:
    assert name_for_usage(factory, model) == name
