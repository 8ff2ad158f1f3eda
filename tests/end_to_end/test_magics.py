"""``%rlm`` and ``%%rlm`` in a kernel as front ends see them: what the Tab key offers, what ``?`` shows, and how a mistake looks."""

from __future__ import annotations

from typing import Any

from rlm_kernel.jupyter.magics import COMMANDS
from tests.support.families import PLAIN, SURVIVOR, start_child
from tests.support.kernels import Kernel, Processes


def complete(kernel: Kernel, before: str, after: str = "") -> dict[str, Any]:
    content = {"code": before + after, "cursor_pos": len(before)}
    reply = kernel.answer(kernel.ask("complete_request", content, channel="shell"))
    assert reply["status"] == "ok"
    return reply


def replaced(kernel: Kernel, before: str, after: str = "") -> list[str]:
    """Return the code that there is after each of the offers was taken."""
    reply = complete(kernel, before, after)
    code = before + after
    return [code[: reply["cursor_start"]] + text + code[reply["cursor_end"] :] for text in reply["matches"]]


def test_the_tab_key_completes_the_word_and_replaces_nothing_before_it(kernel, fifo) -> None:
    start_child(kernel, fifo, PLAIN)
    child = kernel.value("h.id")
    assert replaced(kernel, "%rlm mod") == ["%rlm model"]
    assert replaced(kernel, "é = 1\n%rlm clean", "\n2") == ["é = 1\n%rlm cleanup\n2"]
    assert replaced(kernel, "%rlm cancel c") == [f"%rlm cancel {child}"]
    assert replaced(kernel, "%rlm cancel ") == [f"%rlm cancel {child}", "%rlm cancel --grace"]
    assert replaced(kernel, "%rlm config limits_locked=") == [
        "%rlm config limits_locked=true",
        "%rlm config limits_locked=false",
    ]
    assert replaced(kernel, "%rlm model openai/te") == ["%rlm model openai/test"]
    assert replaced(kernel, "%%rlm --backg", "\nA task") == ["%%rlm --background\nA task"]
    kernel.ok("my_text = 'x'")
    assert replaced(kernel, "%%rlm --context my_t", "\nA task") == ["%%rlm --context my_text\nA task"]
    types = complete(kernel, "%rlm status ")["metadata"]["_jupyter_types_experimental"]
    assert {"start": 12, "end": 12, "text": child, "type": "running", "signature": ""} in types


def test_a_question_mark_shows_every_command_and_what_the_cell_magic_takes(kernel) -> None:
    shown = kernel.ok("%rlm?").reply["payload"][0]["data"]["text/plain"]
    for name in COMMANDS:
        assert f"%rlm {name}" in shown
    for option in ("--context", "--into", "--background", "--max-iterations", "--follow", "--abandon"):
        assert option in shown


def test_a_mistake_is_an_error_without_a_traceback(kernel) -> None:
    cell = kernel.run("%rlm cancel c99999")
    assert (cell.status, cell.reply["ename"]) == ("error", "UsageError")
    assert "c99999" in cell.reply["evalue"]
    assert "\n" not in cell.stderr.strip()
    assert kernel.run("%rlm status --help").status == "ok"


def test_a_child_is_told_something_and_then_cancelled(kernel, fifo) -> None:
    start_child(kernel, fifo, PLAIN)
    pid, child = kernel.value("(h.status().pid, h.id)")
    assert f"{child}: message 1 sent" in kernel.ok("%rlm send {h.id} it's about time").stdout
    with Processes([pid]) as processes:
        cell = kernel.send(f"%rlm cancel {child}")
        assert kernel.reply_at_once(cell, processes) == []
    assert f"cancel: {child} stopped" in kernel.finish(cell).stdout


def test_while_a_cleanup_has_failed_lines_of_rlm_run_and_a_task_for_the_model_does_not(kernel) -> None:
    assert kernel.run(f"{SURVIVOR}\nFINAL(1)").reply["ename"] == "ChildCleanupError"
    assert kernel.run("%%rlm\nA task").reply["ename"] == "ChildCleanupError"
    kernel.ok("%rlm status")
    kernel.ok("%rlm cleanup")
    kernel.ok("'runs'")
