"""What a stock kernel does still works, and every reply is as the messaging protocol wants it."""

from __future__ import annotations

import json
import os

import pytest

from rlm_kernel.jupyter.install import kernel_spec


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("%pwd", None),
        ("%%capture captured\nprint('inside')", ""),
        ("captured.stdout", "'inside\\n'"),
        ("import asyncio\nawait asyncio.sleep(0, 'awaited')", "'awaited'"),
        ("async def f(): return 7\nawait f()", "7"),
        ("!!echo from the shell", "['from the shell']"),
        ("x = !echo assigned\nx[0]", "'assigned'"),
        ("_ + '!'", "'assigned!'"),
    ],
)
def test_cells(kernel, text, shown) -> None:
    if text.startswith(("captured", "_")):
        kernel.ok("%%capture captured\nprint('inside')" if text.startswith("captured") else "'assigned'")
    cell = kernel.ok(text)
    assert shown is None or cell.text == shown


def test_a_shell_command_prints_to_the_cell(kernel) -> None:
    assert kernel.ok("!echo visible").stdout.split() == ["visible"]


def test_outputs_come_as_their_own_messages(kernel) -> None:
    cell = kernel.ok(
        "import sys\nfrom IPython.display import display, HTML\n"
        "print('out'); print('err', file=sys.stderr); display(HTML('<b>bold</b>'))"
    )
    assert (cell.stdout, cell.stderr) == ("out\n", "err\n")
    (shown,) = [m for m in cell.messages if m["msg_type"] == "display_data"]
    assert shown["content"]["data"]["text/html"] == "<b>bold</b>"


def test_input_asks_the_front_end(kernel) -> None:
    cell = kernel.send("'got ' + input('name? ')", allow_stdin=True)
    asked = kernel.client.get_stdin_msg(timeout=10)
    assert asked["content"]["prompt"] == "name? "
    kernel.client.input("Ada")
    assert kernel.finish(cell).text == "'got Ada'"


def test_input_where_it_is_not_allowed_is_an_error(kernel) -> None:
    assert kernel.run("input()").error.startswith("StdinNotImplementedError")


def test_completion_inspection_and_completeness(kernel) -> None:
    kernel.ok("kept_variable = 1")
    done = kernel.answer(kernel.ask("complete_request", {"code": "kept_v", "cursor_pos": 6}, channel="shell"))
    assert "kept_variable" in done["matches"]
    helper = kernel.answer(kernel.ask("complete_request", {"code": "rlm_q", "cursor_pos": 5}, channel="shell"))
    assert {"rlm_query", "rlm_query_batched"} <= set(helper["matches"])
    found = kernel.answer(
        kernel.ask("inspect_request", {"code": "rlm_query", "cursor_pos": 9, "detail_level": 0}, channel="shell")
    )
    assert found["found"] is True
    assert "blocking" in found["data"]["text/plain"]
    assert (
        kernel.answer(kernel.ask("is_complete_request", {"code": "for x in y:"}, channel="shell"))["status"]
        == "incomplete"
    )


def test_a_comm_message_reaches_its_target(kernel) -> None:
    kernel.ok(
        "received = []\n"
        "def target(comm, message): comm.on_msg(lambda m: received.append(m['content']['data']))\n"
        "get_ipython().kernel.comm_manager.register_target('test', target)"
    )
    kernel.ask("comm_open", {"comm_id": "c-1", "target_name": "test", "data": {}}, channel="shell")
    kernel.ask("comm_msg", {"comm_id": "c-1", "data": {"n": 5}}, channel="shell")
    assert kernel.value("received") == [{"n": 5}]


def test_kernel_info_names_the_kernel_and_what_it_can_do(kernel) -> None:
    info = kernel.answer(kernel.ask("kernel_info_request", channel="shell"))
    assert info["implementation"] == "rlm-kernel"
    assert info["language_info"]["name"] == "python"
    assert "kernel subshells" in info["supported_features"]


def test_the_kernelspec_asks_for_interrupts_by_message() -> None:
    assert kernel_spec()["interrupt_mode"] == "message"


@pytest.mark.parametrize(("text", "status"), [("1", "ok"), ("1 / 0", "error"), ("def broken(:", "error"), ("", "ok")])
def test_replies_have_the_fields_of_the_protocol(kernel, text, status) -> None:
    reply = kernel.run(text, user_expressions={"n": "1 + 1"}).reply
    assert reply["status"] == status
    assert isinstance(reply["execution_count"], int)
    assert isinstance(reply["payload"], list)
    expressions = reply["user_expressions"]
    assert set(expressions) == ({"n"} if status == "ok" else set())
    if status == "error":
        assert {"ename", "evalue", "traceback"} <= set(reply)
    json.dumps(reply)


def test_numbers_of_cells_go_on(kernel) -> None:
    numbers = [kernel.run(text).reply["execution_count"] for text in ("1", "1 / 0", "2")]
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    silent = kernel.ok("3").reply["execution_count"]
    assert silent == numbers[-1] + 1


def test_helpers_come_back_after_they_were_deleted_and_what_the_user_rebound_stays(kernel) -> None:
    kernel.ok("%reset -f")
    assert kernel.value("callable(rlm_query)") is True
    kernel.ok("rlm_wait = 'mine'")
    assert kernel.value("rlm_wait") == "mine"
    kernel.ok("del rlm_wait")
    assert kernel.value("callable(rlm_wait)") is True


def test_helpers_are_not_listed_among_the_users_variables(kernel) -> None:
    kernel.ok("%reset -f")
    kernel.ok("mine = 1; rlm_wait = 'rebound'")
    assert kernel.ok("%who").stdout.split() == ["mine", "rlm_wait"]
    kernel.ok("del rlm_wait")


def test_the_answer_dict_still_finalizes_after_a_reset_of_the_namespace(kernel) -> None:
    kernel.ok("%reset -f")
    kernel.ok("answer['content'] = 3; answer['ready'] = True")
    assert kernel.value("get_ipython().kernel.rlm.final_answer.text") == "3"


# -- %rlm


def test_the_summary_is_a_table_for_terminals_and_notebooks(kernel) -> None:
    bundle = kernel.ok("%rlm").result
    assert {"text/plain", "text/html"} <= set(bundle)
    for word in ("openai/test", "episode", "children"):
        assert word in bundle["text/plain"]


def test_status_shows_each_child_and_escapes_what_it_shows(kernel) -> None:
    kernel.ok("h = rlm_query('[[reply: FINAL(<b>x</b>)]]', blocking=False, name='first'); rlm_wait(h)")
    bundle = kernel.ok("%rlm status").result
    assert "completed" in bundle["text/plain"]
    assert "first" in bundle["text/plain"]
    assert "&lt;b&gt;" in bundle["text/html"]
    assert "<b>" not in bundle["text/html"]
    one = kernel.value("h.id")
    assert "completed" in kernel.ok(f"%rlm status {one}").text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%rlm config max_depth=0", ["max_depth", "0"]),
        ("%rlm config max_depth=x", ["max_depth", "'x'"]),
        ("%rlm config shutdown_grace_s=-1", ["shutdown_grace_s", "-1"]),
        ("%rlm config no_such_setting=1", ["no_such_setting"]),
        ("%rlm config max_dept=1", ["max_dept", "max_depth"]),
        ("%rlm model nonsense", ["model", "nonsense"]),
        ("%rlm status c999", ["c999"]),
        ("%rlm nonsense", ["nonsense"]),
        ("%rlm reset now", ["now"]),
    ],
)
def test_a_mistake_in_a_magic_is_one_line_that_names_it(kernel, line, words) -> None:
    cell = kernel.run(line)
    assert cell.reply["ename"] == "UsageError"
    assert cell.stderr.count("\n") == 1
    assert "Traceback" not in cell.stderr
    for word in words:
        assert word in cell.stderr


def test_config_shows_and_sets(kernel) -> None:
    assert "0.5" in kernel.ok("%rlm config shutdown_grace_s").text
    assert "shutdown_grace_s = 0.25" in kernel.ok("%rlm config shutdown_grace_s=0.25").stdout
    assert "0.25" in kernel.ok("%rlm config").text
    assert "note:" in kernel.ok("%rlm config shutdown_grace_s=4").stdout


def test_reset_keeps_variables_and_makes_handles_stale(kernel) -> None:
    kernel.ok("x = 5; h = rlm_query('[[reply: FINAL(1)]]', blocking=False); rlm_wait(h); context = 'old'")
    before = kernel.value("(get_ipython().kernel.rlm.episode_id, h.id)")
    assert "new episode" in kernel.ok("%rlm reset").stdout
    assert kernel.value("(x, context, answer['ready'])") == (5, "", False)
    assert kernel.run("rlm_wait(h)").error.startswith("StaleHandleError")
    assert kernel.value("rlm_status()") == []
    kernel.ok("h2 = rlm_query('[[reply: FINAL(1)]]', blocking=False); rlm_wait(h2)")
    after = kernel.value("(get_ipython().kernel.rlm.episode_id, h2.id)")
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_close_stops_the_children_says_which_and_leaves_everything_usable(kernel, server) -> None:
    kernel.ok("h = rlm_query('[[block]] closing', blocking=False)")
    server.wait_for_request("[[block]] closing")
    pid = kernel.value("h.status().pid")
    cell = kernel.ok("%rlm close")
    assert not os.path.exists(f"/proc/{pid}")
    assert kernel.value("h.id") in cell.stdout
    assert kernel.value("str(h.status().state)") == "cancelled"
    assert kernel.value("rlm_query('[[reply: FINAL(new)]]')") == "new"


def test_the_demo_model_is_said_to_be_a_stand_in(start_kernel) -> None:
    kernel = start_kernel(RLM_MODEL="")
    assert "rule-based stand-in" in kernel.ok("%rlm model demo").stdout


def test_loading_the_extension_into_our_own_kernel_changes_nothing_and_says_so(kernel) -> None:
    before = kernel.value("sorted(globals())")
    for line in ("%load_ext rlm_kernel", "%unload_ext rlm_kernel", "%reload_ext rlm_kernel"):
        shown = kernel.ok(line).stdout.splitlines()
        assert [each for each in shown if "built in" not in each] == []
        assert len(shown) in (1, 2)
    assert set(before) <= set(kernel.value("sorted(globals())"))
    assert "episode" in kernel.ok("%rlm").text
