"""``%rlm cost``: model calls and tokens, by model and by run, and what they cost if somebody has said prices.

Options of the magic: ``--price MODEL=IN/OUT`` (repeatable; dollars per million prompt and completion tokens; MODEL with or without its
provider) and ``--litellm`` (take prices from LiteLLM's list, which is imported for it; it takes seconds).

Prices are never made up. Those that are given come first. LiteLLM's list is used if the process has imported it anyway, or if it is asked
for; a model is looked up under its own provider only. What has no price shows none, and a sum over it says "at least".
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlm_kernel.children.history import ChildHistory
from rlm_kernel.errors import ConfigurationError
from rlm_kernel.jupyter.views.base import MUTED, View, escaped, html_table, visible
from rlm_kernel.jupyter.views.children import label, with_levels
from rlm_kernel.values import Usage, count_by_model

if TYPE_CHECKING:
    from rlm_kernel.session.session import RLMSession

_RUNS_SHOWN = 60
"""Children that get a row of their own; beyond that, those with the fewest tokens share one."""

_ROOT_NAME = "notebook (llm_query in cells, %%rlm)"
_HOW_TO_PRICE = "`%rlm cost --price MODEL=IN/OUT` adds money, in dollars per million tokens"

ByModel = Mapping[str, Usage]


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars per million tokens."""

    prompt: float
    completion: float

    def of(self, usage: Usage) -> float:
        """Return dollars."""
        return (usage.prompt_tokens * self.prompt + usage.completion_tokens * self.completion) / 1e6


def parse_price(text: str) -> tuple[str, Price]:
    """Read ``MODEL=IN/OUT``.

    Raises:
        ConfigurationError: it is not of that form.
    """
    model, equals, amounts = text.rpartition("=")
    before, slash, after = amounts.partition("/")
    try:
        prompt, completion = float(before), float(after)
    except ValueError:
        prompt = completion = math.nan
    if not (equals and slash and model.strip() and 0 <= prompt < math.inf and 0 <= completion < math.inf):
        raise ConfigurationError(
            "--price", text, "must be MODEL=IN/OUT in dollars per million tokens, as in openai/gpt-5-mini=0.25/2"
        )
    return model.strip(), Price(prompt, completion)


@dataclass(frozen=True, slots=True)
class Money:
    """An amount, of which parts may be unknown."""

    dollars: float = 0.0
    known: bool = False
    complete: bool = True

    def __str__(self) -> str:
        if not self.known:
            return "0" if self.complete else "?"
        return f"{'' if self.complete else 'at least '}{self.dollars:,.4f}"


class Prices:
    """Prices, and where they are from.

    Args:
        given: prices by model, with or without provider.
        litellm: the module, None to do without.
    """

    def __init__(self, given: Mapping[str, Price], litellm: Any = None) -> None:
        self._given = dict(given)
        self._table = getattr(litellm, "model_cost", None)
        self._listed: set[str] = set()
        self._used: set[str] = set()

    def find(self, model: str) -> Price | None:
        """Return the price of a model, None if there is none."""
        provider, slash, name = model.partition("/")
        for given in (model, name) if slash else (model,):
            if given in self._given:
                self._used.add(given)
                return self._given[given]
        price = _from_litellm(self._table, provider, name) if slash and isinstance(self._table, Mapping) else None
        if price is not None:
            self._listed.add(model)
        return price

    def money(self, usage: ByModel) -> Money:
        """Return what calls have cost."""
        dollars, known, complete = 0.0, False, True
        for model, used in usage.items():
            price = self.find(model)
            if price is not None:
                dollars, known = dollars + price.of(used), True
            elif used.total_tokens:
                complete = False
        return Money(dollars, known, complete)

    def notes(self, models: Iterable[str]) -> list[str]:
        """Say where the prices are from, and what has none."""
        names = list(models)
        without = [name for name in names if self.find(name) is None]
        if len(without) == len(names) and not self._given:
            return [_HOW_TO_PRICE]
        notes = []
        if self._listed:
            notes.append("dollars by LiteLLM's price list; what a provider charges may differ")
        if without:
            notes.append(f"no price for {', '.join(map(visible, without))}; {_HOW_TO_PRICE}")
        unused = [name for name in self._given if name not in self._used]
        if unused:
            notes.append(f"no call went to {', '.join(map(visible, unused))}, for which a price was given")
        return notes


def _from_litellm(table: Mapping[str, Any], provider: str, name: str) -> Price | None:
    """Look a model up in LiteLLM's list: under its provider, or by its own name if that provider is the one listed."""
    candidates = [(f"{provider}/{name}", None), (name, None if provider == "litellm" else provider)]
    for key, wanted in candidates:
        entry = table.get(key)
        if not isinstance(entry, Mapping) or (wanted is not None and entry.get("litellm_provider") != wanted):
            continue
        prompt, completion = entry.get("input_cost_per_token"), entry.get("output_cost_per_token")
        if isinstance(prompt, int | float) and isinstance(completion, int | float):
            return Price(prompt * 1e6, completion * 1e6)
    return None


@dataclass(frozen=True, slots=True, repr=False)
class CostView(View):
    """Tables of usage.

    Attributes:
        title: a line above them.
        tables: rows of cells, the first of each is the header, the last the sum. The first column is text, the others numbers.
        notes: lines below them.
    """

    title: str
    tables: tuple[tuple[tuple[str, ...], ...], ...]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        from rich.cells import cell_len, set_cell_size  # of wide characters, too

        parts = [self.title]
        for table in self.tables:
            widths = [max(cell_len(row[i]) for row in table) for i in range(len(table[0]))]
            parts.append("")
            for row in table:
                numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
                parts.append("  ".join([set_cell_size(row[0], widths[0]), *numbers]).rstrip())
        if self.notes:
            parts += ["", *self.notes]
        return "\n".join(parts)

    def html(self) -> str:
        tables = "".join(_html_table(table) for table in self.tables)
        notes = "".join(f"<div style='{MUTED}'>{escaped(note)}</div>" for note in self.notes)
        return f"<div>{escaped(self.title)}</div>{tables}{notes}"


def _html_table(table: Sequence[Sequence[str]]) -> str:
    header, *rows = table
    last = len(rows) - 1
    cells = [[_indented(row[0]), *map(escaped, row[1:])] for row in rows]
    cells[last] = [f"<b>{cell}</b>" for cell in cells[last]]
    return html_table([escaped(text) for text in header], cells, right=frozenset(range(1, len(header))))


def _indented(text: str) -> str:
    depth = (len(text) - len(text.lstrip())) * 0.6
    inner = escaped(text.strip())
    return f"<span style='padding-left:{depth:g}em'>{inner}</span>" if depth else inner


def cost_view(
    session: RLMSession, *, prices: Mapping[str, Price] | Sequence[str] | None = None, litellm: bool = False
) -> CostView:
    """Show what the episode's model calls have used, by model and by run.

    Args:
        session: whose episode it is.
        prices: by model, or texts ``MODEL=IN/OUT`` in dollars per million tokens.
        litellm: whether to import LiteLLM for its price list. One that is imported already is used in any case.

    Raises:
        ConfigurationError: a price is not of that form, or LiteLLM is not installed.
    """
    given = dict(prices) if isinstance(prices, Mapping) else dict(parse_price(text) for text in prices or ())
    known = Prices(given, _litellm(litellm))
    histories = session.supervisor.histories()
    root = session.root_usage_by_model
    everything = _sum([root, *(each.usage_by_model for each in histories)])
    total = _total(everything)
    if not total.calls:
        return CostView(f"No model call has ended in episode {session.episode_id} yet", ())
    has_money = known.money(everything).known
    title = (
        f"{total.calls:,} model call{'' if total.calls == 1 else 's'} in episode {session.episode_id}: "
        f"{total.prompt_tokens:,} + {total.completion_tokens:,} = {total.total_tokens:,} tokens"
        + (f", {known.money(everything)} dollars" if has_money else "")
    )
    tables = [_model_table(everything, known if has_money else None)]
    if histories:
        tables.append(_run_table(root, histories, everything, known if has_money else None))
    return CostView(title, tuple(tables), tuple(known.notes(everything)))


def _litellm(wanted: bool) -> Any:
    if not wanted:
        return sys.modules.get("litellm")
    try:
        return importlib.import_module("litellm")
    except ImportError as error:
        raise ConfigurationError(
            "--litellm", wanted, f'LiteLLM cannot be imported ({error}); pip install "rlm-kernel[litellm]" brings it'
        ) from error


def _sum(usages: Iterable[ByModel]) -> dict[str, Usage]:
    total: dict[str, Usage] = {}
    for usage in usages:
        for model, used in usage.items():
            count_by_model(total, model, used)
    return total


def _total(usage: ByModel) -> Usage:
    return sum(usage.values(), Usage())


def _numbers(usage: ByModel) -> tuple[str, str, str]:
    total = _total(usage)
    return f"{total.calls:,}", f"{total.prompt_tokens:,}", f"{total.completion_tokens:,}"


def _money(usage: ByModel, prices: Prices | None) -> tuple[str, ...]:
    return () if prices is None else (str(prices.money(usage)),)


def _model_table(everything: ByModel, prices: Prices | None) -> tuple[tuple[str, ...], ...]:
    by_tokens = sorted(everything.items(), key=lambda item: (-item[1].total_tokens, item[0]))
    rows = [
        (visible(name) or "(no name)", *_numbers({name: used}), *_money({name: used}, prices))
        for name, used in by_tokens
    ]
    header = ("model", "calls", "prompt", "completion", *(() if prices is None else ("dollars",)))
    return (header, *rows, ("all models", *_numbers(everything), *_money(everything, prices)))


def _run_table(
    root: ByModel, histories: Sequence[ChildHistory], everything: ByModel, prices: Prices | None
) -> tuple[tuple[str, ...], ...]:
    """Show each run's own usage, and that of everything below it where there is something."""
    with_below: dict[str | None, list[ByModel]] = {each.status.id: [each.usage_by_model] for each in histories}
    for each in reversed(histories):  # start order: children are summed before they are part of their parents
        if each.status.parent_id in with_below:
            with_below[each.status.parent_id].append(_sum(with_below[each.status.id]))
    parents = {each.status.parent_id for each in histories}
    is_nested = any(parent is not None for parent in parents)

    def row(name: str, own: ByModel, below: ByModel | None) -> tuple[str, ...]:
        extra = () if not is_nested else ("", "", "") if below is None else _numbers(below)
        return (name, *_numbers(own), *_money(own, prices), *extra)

    most = sorted(histories, key=lambda each: -each.status.usage.total_tokens)[:_RUNS_SHOWN]
    shown = {each.status.id for each in most}
    rest = [each for each in histories if each.status.id not in shown]
    rows = [row(_ROOT_NAME, root, None)]
    for level, each in with_levels(histories):
        child_id = each.status.id
        if child_id in shown:
            below = _sum(with_below[child_id]) if child_id in parents else None
            rows.append(row("  " * level + label(each.status), each.usage_by_model, below))
    if rest:
        rows.append(row(f"{len(rest):,} more children", _sum(each.usage_by_model for each in rest), None))
    header = ("run", "calls", "prompt", "completion", *(() if prices is None else ("dollars",)))
    below_header = ("with children: calls", "prompt", "completion") if is_nested else ()
    return ((*header, *below_header), *rows, row("all runs", everything, None))
