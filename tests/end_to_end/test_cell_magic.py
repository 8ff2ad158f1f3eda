"""``%%rlm`` in real kernels: what is seen while it runs, how it is stopped, and what programs that run notebooks see of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.support.families import PLAIN, tag
from tests.support.kernels import STOCK, Cell, Processes, environment
from tests.support.model_server import code, reply, script
from tests.support.terminals import Terminal


def cell_of(*turns: str, line: str = "", words: str = "") -> str:
    return f"%%rlm {line}\n{words}{script(*turns)}"


def displays(cell: Cell) -> dict[str, list[dict[str, Any]]]:
    """Return the states of each display of a cell, by its id, in the order in which they came."""
    found: dict[str, list[dict[str, Any]]] = {}
    for number, message in enumerate(cell.messages):
        if message["msg_type"] in ("display_data", "update_display_data"):
            key = message["content"].get("transient", {}).get("display_id") or str(number)
            assert (message["msg_type"] == "update_display_data") == (key in found)
            found.setdefault(key, []).append(message["content"]["data"])
    return found


def final_texts(cell: Cell) -> list[str]:
    """Return what a person is left with, in the order of the page."""
    return [states[-1]["text/plain"] for states in displays(cell).values()]


def shows(cell: Cell, text: str) -> bool:
    return any(text in data["text/plain"] for states in displays(cell).values() for data in states)


def test_a_run_shows_its_steps_and_its_children_and_gives_its_answer(kernel) -> None:
    sub = script(reply("FINAL(six)"))
    cell = kernel.run(
        cell_of(
            code(
                f"hs = [rlm_query({sub!r}, blocking=False, name=f'part{{i}}') for i in range(2)]\nrlm_wait(hs)\nhs[0].result()"
            ),
            code("FINAL(f'**{hs[1].result()}**')"),
            line="--context {'a':1} --into found",
        )
    )
    assert cell.status == "ok", cell.reply
    assert cell.result["text/markdown"] == cell.text == "**six**"
    assert cell.stdout == cell.stderr == ""
    texts = final_texts(cell)
    assert "context: dict" in texts[0]
    assert texts[1].startswith("Iteration 1 of 30")
    assert "> hs = [" in texts[2]
    assert "│ 'six'" in "".join(texts[3:5])
    # The children's one table, where the first came to be or a moment later; a wait in the code has none of its own.
    [table] = [text for text in texts if "part0" in text and "part1" in text]
    assert table.startswith("This run: ")
    assert table.count("✓ completed") == 2
    assert "2 children (2 completed)" in texts[-1]
    assert kernel.value("found, context, _[:3]") == ("**six**", "", "**s")
    count = len(cell.messages)
    kernel.ok("1")
    assert len(cell.messages) == count  # nothing came when the cell had ended


def test_a_call_and_a_block_that_take_time_show_that_they_do_in_the_place_of_what_comes_of_them(
    kernel, server, fifo
) -> None:
    word = tag("slow")
    wait = f"print('half way', flush=True)\nopen({fifo.path!r}).readline()\nprint('done')"
    cell = kernel.begin(cell_of(f"[[block {word}]]{code(wait)}", reply("FINAL(x)"), words=word))
    kernel.until(lambda: shows(cell, "is thinking"))
    server.release(word)
    kernel.until(lambda: shows(cell, "│ half way"))
    assert not shows(cell, "│ done")
    Path(fifo.path).write_text("go\n")
    kernel.finish(cell)
    thinking, running = (states for states in displays(cell).values() if len(states) > 1)
    assert "is thinking" in thinking[0]["text/plain"]
    assert thinking[-1]["text/plain"].startswith("Iteration 1")
    assert "the code runs" in running[0]["text/plain"]
    assert running[-1]["text/plain"].startswith("    │ half way\n    │ done")


def test_a_refused_call_is_one_line_and_an_error_for_whoever_runs_the_notebook(kernel) -> None:
    cell = kernel.run(cell_of(code("kept = 1"), "[[status 401]]"))
    assert cell.reply["ename"] == "ModelCallError"
    assert len(cell.reply["traceback"]) == 1
    assert "401" in cell.reply["traceback"][0]
    [error] = [m["content"] for m in cell.messages if m["msg_type"] == "error"]
    assert len("\n".join(error["traceback"]).splitlines()) <= 2
    assert "broken off after 1 iteration" in final_texts(cell)[-1]
    assert kernel.value("kept, context") == (1, "")
    assert kernel.run("%%rlm --max-iterations none\ntask").reply["ename"] == "UsageError"


@pytest.mark.parametrize("place", ["call", "code", "wait"])
def test_an_interrupt_stops_the_children_and_keeps_what_was_done(kernel, server, fifo, place) -> None:
    word = tag("interrupted")
    child = script(code(PLAIN.format(ready=fifo.write_code("__import__('os').getpid()"))))
    last = {
        "call": f"[[block {word}]]",
        "code": code(f"late_{place} = 1\n{fifo.write_code('0')}\nwhile True: pass"),
        "wait": code(f"late_{place} = 1\n{fifo.write_code('0')}\nrlm_wait(h_wait)"),
    }
    kernel.ok("context = 'mine'")
    cell = kernel.begin(
        cell_of(code(f"found_{place} = 7\nh_{place} = rlm_query({child!r}, blocking=False)"), last[place], words=word)
    )
    lines = fifo.lines(1 if place == "call" else 2)
    pid = max(map(int, lines))
    if place == "call":
        kernel.until(lambda: shows(cell, "Iteration 2 of 30: "))
    with Processes([pid]) as processes:
        request = kernel.ask("interrupt_request")
        assert kernel.reply_at_once(cell, processes) == []
        assert kernel.answer(request) == {"status": "ok"}
    kernel.finish(cell)
    assert cell.reply["ename"] == "KeyboardInterrupt"
    assert len(cell.reply["traceback"]) == 1
    texts = final_texts(cell)
    assert "interrupted after 1 iteration" in texts[-1]
    assert f"bound so far: found_{place}, h_{place}" in texts[-1]
    assert "1 cancelled" in texts[-1]
    [table] = [text for text in texts if text.startswith("This run: ")]
    assert "cancelled" in table.splitlines()[-1]
    assert any("broken off" in text for text in texts)
    assert kernel.value(f"found_{place}, str(h_{place}.status().state), context, 'late_{place}' in globals()") == (
        7,
        "cancelled",
        "mine",
        place != "call",
    )
    trajectory = texts[-1].rpartition("trajectory: ")[2]
    assert Path(trajectory).read_text().count('"type":"iteration"') == 2
    assert kernel.ok(cell_of(reply("FINAL(again)"))).text == "again"


def test_a_run_stops_its_own_children_and_no_others(kernel, fifo) -> None:
    """Others are those that were there before, and those that other cells start meanwhile."""
    forever = script(code(PLAIN.format(ready=fifo.write_code("1"))))
    kernel.ok(f"theirs = rlm_query({forever!r}, blocking=False); of_the_notebook = rlm_query")
    start = f"own = rlm_query({forever!r}, blocking=False); meanwhile = of_the_notebook({forever!r}, blocking=False)"
    fifo.lines(1)
    cell = kernel.begin(cell_of(code(start), code(f"open({fifo.path!r}).readline()\nFINAL('done')")))
    kernel.until(lambda: shows(cell, "own = "))
    assert kernel.finish(cell).text == "done"
    states = "[str(h.status().state) for h in (own, theirs, meanwhile)]"
    assert kernel.value(states) in (["cancelled", "running", state] for state in ("queued", "running"))
    assert kernel.value("own.status().exited") is True
    assert "1 child (1 cancelled)" in final_texts(cell)[-1]
    assert kernel.ok("rlm_query('x', blocking=False)").status == "ok"  # the notebook's episode is open


def test_in_the_background_it_is_a_child_that_sees_its_context_alone(kernel) -> None:
    kernel.ok("context = 'mine'; secret = 1")
    ask = code("FINAL((context, 'secret' in globals()))")
    cell = kernel.ok(cell_of(ask, line="--background --into h"))
    assert "does not see the notebook's variables" in final_texts(cell)[0]
    assert "ChildHandle" in cell.text
    assert kernel.value("rlm_wait(h).result, h is _") == ("('mine', False)", True)
    kernel.ok("context = None")
    assert "its task" in final_texts(kernel.ok(cell_of(ask, line="--background")))[0]
    assert kernel.value("str(_.wait().state)") == "completed"


def test_in_a_cell_that_a_model_wrote_it_shows_its_answer_alone(kernel) -> None:
    cell = kernel.run(cell_of(code("print('FINAL(inner)')")), metadata={"rlm": {"model_driven": True}})
    assert cell.status == "ok"
    assert displays(cell) == {}
    assert cell.text == "inner"
    assert kernel.ok("rlm_query('x', blocking=False)").status == "ok"  # that was not the notebook's answer


def test_it_runs_in_a_subshell_under_its_own_cell(kernel, server) -> None:
    word = tag("subshell")
    subshell = str(kernel.answer(kernel.ask("create_subshell_request"))["subshell_id"])
    text = cell_of(f"[[block {word}]]{code('FINAL(len(context))')}", line="--context 'abc'+'d'", words=word)
    content = {"code": text, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
    message = kernel.client.session.msg("execute_request", content)
    message["header"]["subshell_id"] = subshell
    cell = kernel._cells[message["header"]["msg_id"]] = Cell(message["header"]["msg_id"])
    kernel.client.shell_channel.send(message)
    server.wait_for_request(word)
    other = kernel.run(cell_of(reply("FINAL(x)")))
    assert "under way" in other.stderr
    assert other.reply["ename"] == "UsageError"
    assert kernel.ok("%rlm").status == "ok"
    server.release(word)
    kernel.finish(cell)
    assert cell.status == "ok", cell.reply
    assert cell.text == "4"
    assert final_texts(cell)[1].startswith("Iteration 1")
    assert kernel.answer(kernel.ask("delete_subshell_request", {"subshell_id": subshell}))["status"] == "ok"


# -- in other places


@pytest.mark.slow
def test_nbclient_with_a_stock_kernel_keeps_the_last_states_and_stops_at_a_failed_run(server, tmp_path) -> None:
    variables = environment(tmp_path, RLM_MODEL="openai/test", **server.environment)
    cells = [
        "%load_ext rlm_kernel",
        cell_of(code("import time; time.sleep(0.7); print('slept')"), reply("FINAL(good)")),
        cell_of("[[status 401]]"),
        "never = 1",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    manager = AsyncKernelManager()
    manager._kernel_spec = KernelSpec(**STOCK)
    client = NotebookClient(notebook, km=manager, timeout=60)
    with pytest.raises(CellExecutionError, match=r"ModelCallError: .*401"):
        asyncio.run(client.async_execute(env=variables, cleanup_kc=True))
    manager.context.destroy(linger=0)
    _, good, failed, never = notebook.cells
    texts = [output["data"]["text/plain"] for output in good.outputs if "data" in output]
    assert texts[-1] == "good"
    assert any(text.startswith("    │ slept") for text in texts)
    assert not any("thinking" in text or "runs…" in text for text in texts)
    assert failed.outputs[-1]["ename"] == "ModelCallError"
    assert len(failed.outputs[-1]["traceback"]) == 1
    assert never.outputs == []


@pytest.mark.slow
def test_in_a_terminal_it_is_plain_text(server, tmp_path) -> None:
    task = script(code("print('so far')"), reply("FINAL(first line\nsecond line)"))
    with Terminal(tmp_path / "t", RLM_MODEL="openai/test", TASK=task, **server.environment) as terminal:
        terminal.run("%load_ext rlm_kernel")
        shown = terminal.run("import os; get_ipython().run_cell_magic('rlm', '', os.environ['TASK'])")
        for words in (
            "Iteration 1 of 30",
            "> print('so far')",
            "│ so far",
            "answered · 2 iterations",
            "first line\r\nsecond line",
        ):
            assert words in shown, shown
        assert "<" not in shown.replace("<module>", "")
