"""An episode's final answer in a notebook: what gives it, what follows from it, and what happens when the cleanup fails."""

from __future__ import annotations

import time

import pytest

from tests.support.families import start_child, start_family
from tests.support.kernels import GONE_S, Processes


def test_children_are_gone_before_the_reply_of_the_cell_that_finalizes(kernel, server, fifo) -> None:
    family = start_family(kernel, server, fifo)
    with family.watched() as processes:
        began = time.monotonic()
        cell = kernel.send("FINAL('done')")
        left = kernel.reply_at_once(cell, processes)
        took = time.monotonic() - began
    assert left == []
    assert took < GONE_S
    assert kernel.finish(cell).status == "ok"
    assert "done" in kernel.ok("%rlm").text
    assert set(kernel.value("[str(h.status().state) for h in hs]")) == {"cancelled"}


def test_after_the_answer_cells_run_and_children_are_refused_until_a_reset(kernel) -> None:
    kernel.ok("FINAL(0)")
    assert kernel.ok("x = 20; x + 1").text == "21"
    assert kernel.run("rlm_query('x', blocking=False)").error.startswith("EpisodeFinalized")
    kernel.ok("%rlm reset")
    assert kernel.value("x") == 20
    assert kernel.ok("h = rlm_query('[[reply: FINAL(5)]]', blocking=False); rlm_wait(h).result").text == "'5'"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("FINAL(0)", "0"),
        ("FINAL('')", ""),
        ("value = [1, 2]; FINAL_VAR('value')", "[1, 2]"),
        ("answer['content'] = 'by dict'; answer['ready'] = True", "by dict"),
        ("print(FINAL(6 * 7))", "42"),
    ],
)
def test_what_finalizes(kernel, text, shown) -> None:
    kernel.ok(text)
    assert kernel.value("get_ipython().kernel.rlm.final_answer.text") == shown


@pytest.mark.parametrize(
    "text",
    [
        "print('FINAL(42)')",
        "'FINAL(42)'",
        "# FINAL(42)",
        "def f():\n    FINAL(42)",
        "answer = {'content': 'rebound', 'ready': True}",
    ],
)
def test_what_does_not_finalize_in_a_cell_of_a_person(kernel, text) -> None:
    kernel.ok(text)
    assert kernel.value("get_ipython().kernel.rlm.final_answer is None") is True


def test_an_answer_in_a_cell_that_raises_does_not_count_and_stops_nothing(kernel, fifo) -> None:
    pid = start_child(kernel, fifo)
    with Processes([pid]) as processes:
        assert kernel.run("FINAL('no'); 1 / 0").error == "ZeroDivisionError: division by zero"
        assert kernel.value("get_ipython().kernel.rlm.final_answer is None") is True
        assert processes.left == [pid]


def test_a_missing_variable_is_an_error_that_names_those_that_exist(kernel) -> None:
    kernel.ok("my_result = 1")
    error = kernel.run("FINAL_VAR('my_reslt')").error
    assert "my_reslt" in error
    assert "my_result" in error


SURVIVOR = """
from rlm_kernel.values import CleanupReport
supervisor = get_ipython().kernel.rlm.supervisor
def stop(verb, graces, refs=None, **more):
    del supervisor.stop  # for one call
    return CleanupReport(verb, survivors=(4194000,))
supervisor.stop = stop
"""


def test_a_failed_cleanup_of_the_finalizing_cell_is_its_error_and_blocks_until_it_is_confirmed(kernel) -> None:
    cell = kernel.run(f"{SURVIVOR}\nx = 1\nFINAL('kept')")
    assert cell.reply["ename"] == "ChildCleanupError"
    assert "4194000" in cell.reply["evalue"]
    refused = kernel.run("x = 2")
    assert refused.reply["ename"] == "ChildCleanupError"
    assert any(m["msg_type"] == "error" for m in refused.messages)
    summary = kernel.ok("%rlm").text
    assert "kept" in summary
    assert "4194000" in summary
    expressions = kernel.run("", user_expressions={"x": "x"}).reply["user_expressions"]
    assert expressions["x"]["data"]["text/plain"] == "1"
    assert kernel.ok("%rlm cleanup").status == "ok"
    assert kernel.ok("x").text == "1"


def test_abandoning_survivors_unlocks_and_keeps_variables(kernel) -> None:
    assert kernel.run(f"{SURVIVOR}\nx = 1\nFINAL('kept')").status == "error"
    assert "4194000" in kernel.ok("%rlm cleanup --abandon").stdout
    assert kernel.ok("x").text == "1"


def test_a_failed_cleanup_at_the_stop_button_is_told_in_both_replies(kernel) -> None:
    kernel.ok(SURVIVOR)
    cell = kernel.blocked("import time\ntime.sleep(30)")
    content = kernel.interrupt()
    assert (content["status"], content["ename"], content["survivors"]) == ("error", "ChildCleanupError", [4194000])
    assert kernel.finish(cell).reply["ename"] == "ChildCleanupError"
    assert kernel.run("1").reply["ename"] == "ChildCleanupError"
    assert kernel.interrupt() == {"status": "ok"}  # any verb confirms
    assert kernel.ok("1").text == "1"


def test_a_failed_reset_keeps_the_episode_and_refuses_until_cleaned_up(kernel) -> None:
    kernel.ok(SURVIVOR)
    episode = kernel.value("get_ipython().kernel.rlm.episode_id")
    assert kernel.run("%rlm reset").status == "error"
    assert episode in kernel.ok("%rlm").text
    assert kernel.run("1").reply["ename"] == "ChildCleanupError"
    kernel.ok("%rlm cleanup")
    assert kernel.value("get_ipython().kernel.rlm.episode_id") == episode


def test_numbers_of_cells_go_on_over_refused_ones(kernel) -> None:
    number = kernel.run(f"{SURVIVOR}\nFINAL(1)").reply["execution_count"]
    refused = kernel.run("1")
    assert refused.reply["execution_count"] == refused.messages[1]["content"]["execution_count"] == number + 1
    assert kernel.ok("%rlm cleanup").reply["execution_count"] == number + 2


def test_replies_that_the_kernel_makes_itself_have_every_field(kernel) -> None:
    fields = {"status", "ename", "evalue", "traceback", "execution_count", "user_expressions", "payload"}
    reply = kernel.run(f"{SURVIVOR}\nFINAL(1)").reply
    refused = kernel.run("1").reply
    kernel.ok("%rlm cleanup")
    for content in (reply, refused):
        assert fields <= set(content)
        assert content["user_expressions"] == {}
        assert content["payload"] == []
        assert all(isinstance(line, str) for line in content["traceback"])


def test_a_stop_that_raises_is_an_error_in_the_replies_and_loses_none(kernel) -> None:
    broken = "def broken(*args):\n    del get_ipython().kernel.rlm.supervisor.stop\n    raise OSError('broken')\n"
    broken += "get_ipython().kernel.rlm.supervisor.stop = broken"
    kernel.ok(broken)
    assert kernel.run("FINAL(1)").error == "OSError: broken"
    kernel.ok(broken)
    content = kernel.interrupt()
    assert (content["status"], content["evalue"]) == ("error", "broken")
    assert kernel.ok("1 + 1").text == "2"
