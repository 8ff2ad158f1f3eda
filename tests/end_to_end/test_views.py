"""Live tables in a real kernel: which messages go out, for which cell, how many, and what is left of them when the cell has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionComplete

from tests.support.families import tag
from tests.support.kernels import Cell, Kernel
from tests.support.model_server import code, reply, script

HASTE_S = 0.3
"""Seconds of waiting after which the tables of most tests here come, so that these take less time."""

CHATTY = """\
import time
until = time.monotonic() + 1.5
while time.monotonic() < until:
    print('line', flush=True)
    time.sleep(0.0005)
"""


@pytest.fixture
def hasty(kernel: Kernel) -> Iterator[Kernel]:
    """The module's kernel, which shows tables of waits that take `HASTE_S`."""
    waiting, ports = (
        "__import__('rlm_kernel.jupyter.views.waiting', fromlist=['x'])",
        "sys.modules['rlm_kernel.session.ports']",
    )
    change = f"import sys; {waiting}.DELAY_S = {{}}; {ports}.WATCHED_FROM_S = {{}}"
    kernel.ok(change.format(HASTE_S, HASTE_S))
    yield kernel
    kernel.ok(change.format(1.0, 1.0))


def displays(cell: Cell, kind: str = "") -> list[dict]:
    """Return the contents of a cell's displays and their updates, of one kind if that is given."""
    kinds = (kind,) if kind else ("display_data", "update_display_data")
    return [message["content"] for message in cell.messages if message["msg_type"] in kinds]


def texts(cell: Cell) -> list[str]:
    return [content["data"]["text/plain"] for content in displays(cell)]


def held(gate: str, answer: str) -> str:
    """Return a prompt whose answer waits for the release of a gate."""
    return repr(f"[[block {gate}]] [[reply: FINAL({answer})]]")


def await_display(kernel: Kernel, cell: Cell, word: str = "", number: int = 1) -> None:
    """Wait until so many messages of displays with a word in them have come."""
    kernel.until(lambda: sum(word in text for text in texts(cell)) >= number)


def shown_in_a_notebook(cell: Cell) -> list[nbformat.NotebookNode]:
    """Return the outputs that nbclient stores for a cell: it listens until the cell is idle."""
    stored = nbformat.v4.new_code_cell()
    client = NotebookClient(nbformat.v4.new_notebook(cells=[stored]), record_timing=False)
    client.clear_before_next_output = False  # what it does itself when it begins a cell
    messages = iter(cell.messages)
    with contextlib.suppress(CellExecutionComplete):
        for message in messages:
            client.process_message(message, stored, 0)
    assert list(messages) == []  # nothing comes after it
    return list(stored.outputs)


def left_threads(kernel: Kernel) -> list[str]:
    found = kernel.value("[t.name for t in __import__('threading').enumerate() if t.name == 'rlm-view']")
    return list(found)


def test_a_long_wait_shows_one_table_that_ends_in_the_final_state_before_the_cell_does(kernel, server) -> None:
    """And with it in a notebook that nbclient stores; a wait for less than a second shows nothing."""
    first, second = tag("first"), tag("second")
    kernel.ok(f"hs = rlm_query_batched([{held(first, 'one')}, {held(second, '<b>two</b>')}], blocking=False)")
    assert texts(kernel.ok("rlm_wait(hs, timeout_s=0.9); rlm_wait(hs, timeout_s=0)")) == []
    cell = kernel.begin("print('before')\nr = rlm_wait(hs)\nprint('after')")
    await_display(kernel, cell)
    server.release(first)
    await_display(kernel, cell, "1 of 2 children done")
    server.release(second)
    kernel.finish(cell)
    [shown] = displays(cell, "display_data")
    updates = displays(cell, "update_display_data")
    assert {content["transient"]["display_id"] for content in updates} == {shown["transient"]["display_id"]}
    assert len({str(content["data"]) for content in [shown, *updates]}) == 1 + len(updates)  # each says something new
    assert "2 of 2 children done" in texts(cell)[-1]
    before, table, after = shown_in_a_notebook(cell)
    assert (before.text, after.text) == ("before\n", "after\n")
    assert table.data["text/plain"] == texts(cell)[-1]
    assert "&lt;b&gt;two" in table.data["text/html"]
    assert left_threads(kernel) == []


def test_the_tables_of_two_cells_that_run_at_once_stay_with_their_cells(hasty, server) -> None:
    kernel, here, there = hasty, tag("here"), tag("there")
    subshell = kernel.answer(kernel.ask("create_subshell_request"))["subshell_id"]
    kernel.ok(f"a, b = rlm_query_batched([{held(here, 'A')}, {held(there, 'B')}], blocking=False)")
    mine = kernel.begin("rlm_wait(a); print('mine')")
    await_display(kernel, mine)
    message = kernel.client.session.msg("execute_request", {"code": "rlm_wait(b); print('other')", "silent": False})
    message["header"]["subshell_id"] = subshell
    other = kernel._cells[message["header"]["msg_id"]] = Cell(message["header"]["msg_id"])
    kernel.client.shell_channel.send(message)
    await_display(kernel, other)
    seen = len(texts(mine))
    kernel.until(lambda: len(texts(mine)) > seen)  # it goes on under its own cell though another one has begun
    server.release(there)
    kernel.finish(other)
    server.release(here)
    kernel.finish(mine)
    assert len(displays(mine, "display_data")) == len(displays(other, "display_data")) == 1
    for cell, answer, word in ((mine, "A", "mine"), (other, "B", "other")):
        assert all("1 child" in text for text in texts(cell))
        assert texts(cell)[-1].endswith(answer)
        assert cell.stdout == f"{word}\n"
    kernel.answer(kernel.ask("delete_subshell_request", {"subshell_id": subshell}))


def test_a_child_that_does_a_thousand_things_in_a_second_costs_few_messages(hasty) -> None:
    prompt = script(code(CHATTY), reply("FINAL(quiet)"))
    cell = hasty.ok(
        f"import time; began = time.monotonic()\nanswer = rlm_query({prompt!r})\ntook = time.monotonic() - began"
    )
    took = hasty.value("took")
    assert took > 1.5
    assert 3 <= len(texts(cell)) <= 2 + 4 * took
    assert texts(cell)[-1].endswith("quiet")


def test_an_interrupt_ends_the_table_with_the_children_stopped(hasty) -> None:
    gate = tag("never")
    cell = hasty.begin(f"hs = rlm_query_batched([{held(gate, '1')}, {held(gate, '2')}], blocking=False)\nrlm_wait(hs)")
    await_display(hasty, cell, "2 running")
    hasty.interrupt()
    assert hasty.finish(cell).reply["ename"] == "KeyboardInterrupt"
    assert "2 of 2 children done · 2 cancelled" in texts(cell)[-1]
    [table] = [output for output in shown_in_a_notebook(cell) if output.output_type == "display_data"]
    assert "2 cancelled" in table.data["text/plain"]
    assert left_threads(hasty) == []


def test_a_cell_has_one_table_however_it_waits(hasty, server) -> None:
    """By polling, by ``await``, one after the other, as they end: what it has waited for is in one table."""
    gates = [tag(letter) for letter in "abcd"]
    hasty.ok(f"a, b, c, d = rlm_query_batched([{', '.join(held(gate, gate) for gate in gates)}], blocking=False)")
    cell = hasty.begin(
        f"while not rlm_wait(a, timeout_s={HASTE_S + 0.05}): print('poll')\n"
        "print(await b)\nfor status in rlm_as_completed([c, d]): print(status.id)"
    )
    hasty.until(lambda: cell.stdout.count("poll") >= 3)
    for number, gate in enumerate(gates):
        await_display(hasty, cell, f"{number} of ")
        server.release(gate)
    hasty.finish(cell)
    assert len(displays(cell, "display_data")) == 1
    assert "4 of 4 children done" in texts(cell)[-1]
    assert all(gate in texts(cell)[-1] for gate in gates)


@pytest.mark.parametrize(
    ("setting", "options"),
    [
        ("on", {"metadata": {"rlm": {"model_driven": True}}}),
        ("on", {"silent": True, "store_history": False}),
        ("off", {}),
    ],
    ids=["model-driven", "silent", "switched off"],
)
def test_where_nobody_wants_to_see_it_there_is_no_table(hasty, server, setting, options) -> None:
    gate = tag("unseen")
    hasty.ok(f"%rlm config live_views={setting}")
    hasty.ok(f"h = rlm_query({held(gate, '1')}, blocking=False)")
    cell = hasty.send(f"assert not rlm_wait(h, timeout_s={HASTE_S + 0.2})", **options)
    assert hasty.finish(cell).status == "ok"
    hasty.ok("%rlm config live_views=on")
    assert texts(cell) == []


def test_what_a_cell_captures_has_the_last_state_alone(hasty, server, fifo) -> None:
    gate = tag("captured")
    hasty.ok(f"h = rlm_query({held(gate, 'caught')}, blocking=False)")
    cell = hasty.send(
        f"%%capture seen\nassert not rlm_wait(h, timeout_s={HASTE_S + 0.1})\n{fifo.write_code('1')}\n_ = rlm_wait(h)"
    )
    fifo.lines(1)
    server.release(gate)
    hasty.finish(cell)
    assert (cell.status, texts(cell)) == ("ok", [])
    [shown] = hasty.value("[output.data['text/plain'] for output in seen.outputs]")
    assert "1 of 1 child done" in shown


def test_a_front_end_that_cannot_update_gets_a_line_and_the_last_state(hasty, server) -> None:
    """``jupyter console`` is one: it sends requests through jupyter_client, and allows input."""
    gate = tag("console")
    hasty.ok(f"h = rlm_query({held(gate, 'typed')}, blocking=False)")
    cell = hasty.begin(f"while not rlm_wait(h, timeout_s={HASTE_S + 0.1}): print('poll')", allow_stdin=True)
    hasty.until(lambda: cell.stdout.count("poll") >= 2)
    server.release(gate)
    hasty.finish(cell)
    assert displays(cell, "update_display_data") == []
    line, table = texts(cell)
    assert line == "0 of 1 child done · 1 running"
    assert table.startswith("1 of 1 child done\n")
    assert table.endswith("typed")


def test_bare_handles_and_statuses_are_cards(kernel) -> None:
    prompt = repr(script(reply("FINAL(<b>42</b>)")))
    kernel.ok(f"h = rlm_query({prompt}, blocking=False, name='asked'); s = rlm_wait(h)")
    card = kernel.ok("h").result
    assert card["text/plain"] == f"<ChildHandle {kernel.value('h.id')} 'asked' completed>"
    for part in ("completed", "asked", "&lt;b&gt;42&lt;/b&gt;"):
        assert part in card["text/html"]
    assert kernel.ok("s").text.startswith("<ChildStatus")
    assert "<table" in kernel.ok("[s, s]").result["text/html"]
    assert list(kernel.ok("[1, 2]").result) == ["text/plain"]
