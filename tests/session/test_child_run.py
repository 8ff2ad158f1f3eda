"""Promises of what a child finds in its process: `rlm_kernel.session.child_run`, by real children."""

from __future__ import annotations

import ast
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlm_kernel.errors import ChildFailedError
from rlm_kernel.loop.trajectory import read_trajectory
from rlm_kernel.session.helpers import HELPER_NAMES
from rlm_kernel.values import ChildState, Usage
from tests.session.conftest import Root, block, final, held, task
from tests.support.model_server import ModelServer, code, script

KEY = "sk-test-0123456789abcdef"


OPENAI = True  # what is promised of errors, keys and connections is promised of the client that people use


@pytest.fixture
def served(root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> ModelServer:
    root.served(server, monkeypatch)
    return server


def value_of(root: Root, expression: str, **options: Any) -> Any:
    """Evaluate an expression in a fresh child."""
    root.scripted(block(f"FINAL(repr({expression}))"))
    return ast.literal_eval(root.rlm_query("p", **options))


# -- what is there


def test_a_child_has_the_same_names_as_the_root(root: Root) -> None:
    names = [*HELPER_NAMES, "answer", "context"]
    assert value_of(root, f"[n for n in {names} if n not in globals()]") == []
    assert [n for n in names if n not in root.namespace] == []


def test_a_childs_own_variables_are_what_it_made(root: Root) -> None:
    root.scripted(block("x = 1"), block("FINAL(SHOW_VARS())"))
    assert root.rlm_query("p") == "x: int"


def test_helpers_that_code_rebinds_are_back_for_the_next_block(root: Root) -> None:
    root.scripted(block("FINAL = None\ndel llm_query"), block("FINAL(callable(llm_query))"))
    assert root.rlm_query("p") == "True"


def test_a_child_may_answer_in_every_way(root: Root) -> None:
    for reply, answer in [
        (block("x = {'a': 1}\nFINAL_VAR('x')"), "{'a': 1}"),
        (block("answer['content'] = 0\nanswer['ready'] = True"), "0"),
        (block("print('FINAL(printed)')"), "printed"),
        ("FINAL(in the reply)", "in the reply"),
    ]:
        root.scripted(reply)
        assert root.rlm_query("p") == answer


def test_an_error_of_the_code_is_shown_to_the_model_and_finalizes_nothing(root: Root) -> None:
    def second(messages: list[dict[str, str]]) -> str:
        return final("saw it" if "ZeroDivisionError" in messages[-1]["content"] else "saw nothing")

    root.scripted(block("FINAL('too early')\n1 / 0"), second)
    assert root.rlm_query("p") == "saw it"


def test_input_raises_at_once_in_a_child(root: Root) -> None:
    root.scripted(block("try:\n    input('name? ')\nexcept EOFError:\n    FINAL('nobody there')"))
    assert root.rlm_query("p") == "nobody there"


def test_a_task_that_the_code_cancels_does_not_end_the_child(root: Root) -> None:
    root.scripted(
        block("import asyncio\nt = asyncio.ensure_future(asyncio.sleep(9))\nt.cancel()\nawait t"), final("on")
    )
    assert root.rlm_query("p") == "on"


def test_code_that_ends_its_process_is_no_answer(root: Root) -> None:
    root.scripted(block("import os\nos._exit(0)"))
    with pytest.raises(ChildFailedError, match="exited with code 0 before it had an answer"):
        root.rlm_query("p")


@pytest.mark.parametrize("python", ["exit()", "import sys; sys.exit(1)"])
def test_exit_in_code_does_not_end_a_run(root: Root, python: str) -> None:
    root.scripted(block(python), final("still here"))
    assert root.rlm_query("p") == "still here"


def test_the_helpers_refuse_to_work_in_a_process_that_the_childs_code_forked(root: Root) -> None:
    python = """
import os
r, w = os.pipe()
pid = os.fork()
if pid == 0:
    said = []
    for call in (lambda: llm_query('x'), lambda: rlm_status(), lambda: rlm_query('x')):
        try:
            said.append(call())
        except BaseException as error:
            said.append(type(error).__name__)
    os.write(w, repr(said).encode())
    os._exit(0)
os.waitpid(pid, 0)
FINAL(os.read(r, 1000).decode())
"""
    root.session.configure("max_depth", "3")
    root.scripted(block(python))
    assert root.rlm_query("p") == "['ForkedProcessError', 'ForkedProcessError', 'ForkedProcessError']"


# -- its surroundings


def test_a_child_has_the_directory_path_and_environment_of_the_call(root: Root, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, "/of/the/call"])
    monkeypatch.setenv("OF_THE_CALL", "yes")
    expression = "[__import__('os').getcwd(), __import__('sys').path[-1], __import__('os').environ.get('OF_THE_CALL')]"
    assert value_of(root, expression) == [str(tmp_path.resolve()), "/of/the/call", "yes"]
    monkeypatch.undo()
    assert value_of(root, expression)[2] is None


def test_what_a_child_does_to_its_surroundings_stays_with_it(root: Root) -> None:
    cwd = os.getcwd()
    root.scripted(
        block("import os, sys\nos.chdir('/')\nos.environ['LEAK'] = '1'\nsys.path.insert(0, '/leak')\nFINAL(1)")
    )
    root.rlm_query("p")
    assert (os.getcwd(), "LEAK" in os.environ, "/leak" in sys.path) == (cwd, False, False)


def test_a_variable_that_is_no_utf8_harms_nobody(root: Root) -> None:
    """One such value in the environment must not end every child of the kernel."""
    os.environb[b"RLM_TEST_WEIRD"] = b"\xff\xfe"
    try:
        assert value_of(root, "1") == 1
    finally:
        del os.environ["RLM_TEST_WEIRD"]


def test_a_directory_that_is_gone_is_a_readable_error_and_leaks_nothing(root: Root, tmp_path, monkeypatch) -> None:
    from rlm_kernel.errors import PayloadError

    gone = tmp_path / "gone"
    gone.mkdir()
    root.scripted(final("x"))
    monkeypatch.chdir(gone)
    gone.rmdir()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PayloadError, match="working directory is gone"):
        root.rlm_query("p", context="x" * 100_000)
    assert len(os.listdir("/proc/self/fd")) == before


def test_two_children_have_their_own_random_numbers(root: Root) -> None:
    root.scripted(block("import random, uuid, tempfile\nFINAL((random.random(), uuid.uuid4().hex))"))
    one, other = root.rlm_query_batched(["p", "q"])
    assert one != other


# -- secrets


SECRETS = {
    "OPENAI_API_KEY": KEY,
    "MY_TOKEN": "token-abcdef",
    "AWS_REGION": "aws-region-1",
    "db_password": "hunter2hunter2",
}

LOOK = """
import os, subprocess
names = {names}
found = [n for n in names if n in os.environ]
found += [n for n in names if any(e.startswith(n.encode() + b'=') for e in open('/proc/self/environ', 'rb').read().split(b'\\0'))]
found += [n for n in names if n + '=' in subprocess.run(['env'], capture_output=True, text=True).stdout]
"""


def test_secrets_are_gone_before_code_of_the_models_runs(
    root: Root, served: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has its key all the same."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    look = LOOK.format(names=list(SECRETS))
    assert root.rlm_query(task(look + "FINAL(found)")) == "[]"
    assert served.requests[0].headers["authorization"] == f"Bearer {KEY}"


def test_secrets_reach_the_clients_of_grandchildren_but_not_their_code(
    root: Root, served: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    root.session.configure("max_depth", "3")
    inner = task(LOOK.format(names=["OPENAI_API_KEY"]) + "FINAL(found)")
    assert root.rlm_query(task(f"FINAL(rlm_query({inner!r}))")) == "[]"
    assert {r.headers["authorization"] for r in served.requests} == {f"Bearer {KEY}"}
    assert len(served.requests) == 2


def test_variables_that_are_exempt_are_kept(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "token-abcdef")
    monkeypatch.setenv("OTHER_TOKEN", "token-ghijkl")
    root.session.configure("child_env_keep", "MY_TOKEN")
    expression = "[__import__('os').environ.get(n) for n in ('MY_TOKEN', 'OTHER_TOKEN')]"
    assert value_of(root, expression) == ["token-abcdef", None]


def all_files(folder: Path) -> str:
    return "\n".join(path.read_text("utf-8", "replace") for path in sorted(folder.rglob("*")) if path.is_file())


def test_no_secret_is_written_to_any_file_though_the_model_tells_it(
    root: Root, served: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    first = f"said = llm_query('[[reply: the key is {KEY}]]')\nprint(said)\nsaid"
    root.rlm_query(task(first, "raise ValueError(said)", "FINAL(said)"), context=f"has {KEY} inside")
    with pytest.raises(ChildFailedError):
        root.rlm_query(f"[[status 401]] {KEY}", name=f"named {KEY}")
    root.say_final(f"final {KEY}")
    folder = root.session.run_folder
    assert folder is not None
    text = all_files(folder)
    assert "the key is [redacted]" in text
    assert KEY not in text
    names = {path.suffix for path in folder.iterdir()}
    assert names >= {".json", ".jsonl", ".log"}


def test_a_key_that_a_server_quotes_is_in_no_error(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    with ModelServer(require_key=True) as server:
        root.served(server, monkeypatch)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        with pytest.raises(ChildFailedError, match="401") as raised:
            root.rlm_query("p")
    assert KEY not in str(raised.value)


# -- children of children


def test_a_child_starts_children_of_its_own(root: Root, served: ModelServer) -> None:
    root.session.configure("max_depth", "3")
    inner = task("FINAL(context + '!')")
    python = f"h = rlm_query({inner!r}, context='inner', blocking=False, name='deep')\nrlm_wait(h)\nFINAL((h.result(), h.depth, h.name))"
    assert root.rlm_query(task(python)) == "('inner!', 2, 'deep')"
    outer, deep = root.rlm_status()
    assert (outer.depth, deep.depth, deep.parent_id) == (1, 2, outer.id)
    assert root.session.usage == outer.usage + deep.usage
    assert deep.usage.calls == 1


def test_a_child_awaits_its_children(root: Root, served: ModelServer) -> None:
    root.session.configure("max_depth", "3")
    python = f"h = rlm_query({task('FINAL(7)')!r}, blocking=False)\nx = await h\nFINAL(x)"
    assert root.rlm_query(task(python)) == "7"


def test_a_childs_batch_keeps_order_failures_and_limits(root: Root, served: ModelServer) -> None:
    root.session.configure("max_depth", "3")
    root.session.configure("max_children_per_batch", "3")
    prompts = [task("FINAL('a')"), "[[status 401]]", task("FINAL('c')"), task("FINAL('d')")]
    answers = ast.literal_eval(root.rlm_query(task(f"FINAL(rlm_query_batched({prompts!r}))")))
    assert (answers[0], answers[2], answers[3]) == ("a", "c", "Error: max_children_per_batch exceeded")
    assert answers[1].startswith("Error: c")


def test_a_child_sees_its_own_descendants_only(root: Root, served: ModelServer) -> None:
    root.session.configure("max_depth", "3")
    sibling = root.rlm_query(task("FINAL(1)"), blocking=False)
    sibling.wait(20)
    python = f"""
h = rlm_query({task("FINAL(7)")!r}, blocking=False)
seen = [s.id for s in rlm_status()] == [h.id]
h.wait()
errors = []
for unreachable in ({sibling.id!r}, 'c' + str(int(h.id[1:]) - 1), 'nonsense'):
    for look in (rlm_status, rlm_wait, rlm_result):
        try:
            look(unreachable)
        except LookupError as error:
            errors.append(type(error).__name__ + ' ' + str(h.id in str(error)))
FINAL((seen, set(errors), len(errors), rlm_result(h.id)))
"""
    assert root.rlm_query(task(python)) == "(True, {'UnknownHandleError True'}, 9, '7')"


def test_at_the_depth_limit_a_child_makes_direct_calls(root: Root, served: ModelServer) -> None:
    python = """
said = [rlm_query('[[reply: direct]]'), rlm_query('[[reply: with]] context', context=rlm_share('shared'))]
said += rlm_query_batched(['[[reply: one]]', '[[reply: two]]'])
try:
    rlm_query('x', blocking=False)
except Exception as error:
    said += [type(error).__name__, error.limit, error.value]
FINAL(said)
"""
    answer = root.rlm_query(task(python))
    assert ast.literal_eval(answer) == ["direct", "with", "one", "two", "ChildLimitError", "max_depth", 2]
    direct = [r.text for r in served.requests if len(r.body["messages"]) == 1]
    assert "[[reply: with]] context\n\nContext:\nshared" in direct
    assert len(root.rlm_status()) == 1


def test_a_child_passes_its_directory_and_variables_on(root: Root, served: ModelServer, tmp_path) -> None:
    root.session.configure("max_depth", "3")
    inner = task("import os\nFINAL([os.getcwd(), os.environ.get('FROM_PARENT')])")
    python = f"import os\nos.chdir({str(tmp_path)!r})\nos.environ['FROM_PARENT'] = 'yes'\nFINAL(rlm_query({inner!r}))"
    assert ast.literal_eval(root.rlm_query(task(python))) == [str(tmp_path.resolve()), "yes"]


def test_a_child_shares_a_context_with_its_children(root: Root, served: ModelServer) -> None:
    root.session.configure("max_depth", "3")
    inner = task("FINAL(len(context))")
    python = f"s = rlm_share('x' * 100_000)\nFINAL(rlm_query_batched([{inner!r}] * 3, context=s))"
    assert root.rlm_query(task(python)) == "['100000', '100000', '100000']"


def test_a_parent_that_answers_takes_its_children_with_it(root: Root, served: ModelServer) -> None:
    root.session.configure("max_depth", "3")
    inner = held("FINAL('never')")
    outer = script(
        code(f"h = rlm_query({inner!r}, blocking=False)\nprint(h)"), "[[block parent]]" + code("FINAL('done')")
    )
    handle = root.rlm_query(outer, blocking=False)
    served.wait_for_request(lambda request: "held" in request.text and "parent" not in request.text)
    served.release("parent")
    assert handle.wait(20).result == "done"
    deep = root.rlm_status()[1]
    assert (deep.state, deep.exited) == (ChildState.CANCELLED, True)


# -- model servers that fail


def test_every_failure_of_a_model_server_is_a_quick_readable_failure_of_the_child(
    root: Root, served: ModelServer
) -> None:
    """Never a hang, never an answer. All of them side by side."""
    prompts = [
        f"[[{fault}]]"
        for fault in ("status 401", "status 500", "garbage", "bad-json", "close", "truncate", "no-choices")
    ]
    began = time.monotonic()
    handles = root.rlm_query_batched(prompts, blocking=False)
    statuses = root.rlm_wait(handles, timeout_s=20)
    assert time.monotonic() - began < 10
    for prompt, status in zip(prompts, statuses, strict=True):
        assert (status.state, status.exited, status.result) == (ChildState.FAILED, True, None), prompt
        assert status.error is not None
        assert status.error.startswith("ModelCallError: "), status.error
        assert "\n" not in status.error
        assert "Traceback" not in status.error
        assert status.elapsed_s < 5, (prompt, status.elapsed_s)
    assert "401" in str(statuses[0].error)
    assert "500" in str(statuses[1].error)


def test_a_refused_connection_is_a_quick_failure(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, and nobody listens
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{unused.getsockname()[1]}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        root.session.configure("model", "openai/test-model")
        handle = root.rlm_query("p", blocking=False)
        status = handle.wait(20)
    assert status.state is ChildState.FAILED
    assert "\n" not in str(status.error)
    assert status.elapsed_s < 5


def test_four_children_wait_for_their_model_at_the_same_time(root: Root, served: ModelServer) -> None:
    prompts = [script("[[delay 1.5]]" + code(f"FINAL({i})")) for i in range(4)]
    root.scripted(final("warm"))
    root.rlm_query("the nursery is up")
    root.session.configure("model", "openai/test-model")
    began = time.monotonic()
    assert root.rlm_query_batched(prompts) == ["0", "1", "2", "3"]
    assert time.monotonic() - began < 2.5
    assert served.max_in_flight == 4


# -- what is written down


def test_a_child_that_is_killed_leaves_every_finished_iteration(root: Root, served: ModelServer) -> None:
    prompt = script(code("print('first')"), code("print('second')"), "[[block held]]" + code("FINAL('never')"))
    handle = root.rlm_query(prompt, blocking=False)
    served.wait_for_request(lambda r: sum(m["role"] == "assistant" for m in r.body["messages"]) == 2)
    os.kill(handle.status().pid, signal.SIGKILL)
    status = handle.wait(20)
    assert (status.state, status.exited, status.exit_code) == (ChildState.FAILED, True, -signal.SIGKILL)
    assert "signal 9 (SIGKILL)" in str(status.error)
    assert status.iterations == 2
    assert status.usage.calls == 2
    assert root.session.supervisor.observers.flush(10)  # the root adds the end that the child could not write
    lines = read_trajectory(status.trajectory_path)
    assert [line["type"] for line in lines] == ["metadata", "iteration", "iteration", "end"]
    assert [line["code_blocks"][0]["result"]["stdout"] for line in lines[1:3]] == ["first\n", "second\n"]
    assert "SIGKILL" in lines[3]["error"]


def test_a_child_that_is_stopped_leaves_the_iteration_that_was_broken_off_too(root: Root, served: ModelServer) -> None:
    prompt = script(code("print('first')"), "[[block held]]" + code("FINAL('never')"))
    handle = root.rlm_query(prompt, blocking=False)
    served.wait_for_request(lambda r: sum(m["role"] == "assistant" for m in r.body["messages"]) == 1)
    assert root.session.close().stopped == (handle.id,)
    assert root.session.supervisor.observers.flush(10)  # the root adds why it ended: the child cannot know
    lines = read_trajectory(handle.status().trajectory_path)
    assert [line["type"] for line in lines] == ["metadata", "iteration", "iteration", "end"]
    assert "StopRequested" in lines[2]["error"]
    assert lines[3]["stop_reason"] == "cancelled"


def test_the_end_of_a_child_whose_time_ran_out_says_so(root: Root, served: ModelServer) -> None:
    root.rlm_wait(root.rlm_query(script("[[block held]]" + code("FINAL('never')")), blocking=False, timeout_s=0.2), 20)
    (status,) = root.rlm_status()
    assert root.session.supervisor.observers.flush(10)
    end = read_trajectory(status.trajectory_path)[-1]
    assert (end["stop_reason"], end["error"]) == ("timed_out", "timed out after 0.2 s")


def test_a_trajectory_says_what_the_run_was(root: Root, served: ModelServer) -> None:
    root.session.configure("max_depth", "3")
    inner = task("FINAL(1)")
    root.rlm_query(task(f"llm_query('[[reply: sub]][[usage 10 5]]')\nFINAL(rlm_query({inner!r}))"))
    outer, deep = root.rlm_status()
    assert (outer.model, deep.model) == ("openai/test-model", "openai/test-model")
    first, iteration, end = read_trajectory(outer.trajectory_path)
    assert (first["run_id"], first["parent_id"], first["depth"]) == (outer.id, None, 1)
    assert first["root_model"] == "openai/test-model"
    assert first["task"].startswith("[[script]]")
    (call,) = iteration["code_blocks"][0]["result"]["rlm_calls"]
    assert (call["response"], call["prompt_tokens"], call["completion_tokens"]) == ("sub", 10, 5)
    assert end["final_answer"] == "1"
    meta = read_trajectory(deep.trajectory_path)[0]
    assert (meta["run_id"], meta["parent_id"], meta["depth"]) == (deep.id, outer.id, 2)


def test_what_a_child_prints_is_in_its_log_and_its_status(root: Root) -> None:
    root.scripted(block("import subprocess\nprint('printed')\nsubprocess.run(['echo', 'from a subprocess'])\nFINAL(1)"))
    root.rlm_query("p")
    (status,) = root.rlm_status()
    assert "printed" in status.log_tail
    assert "from a subprocess" in status.log_tail
    folder = root.session.run_folder
    assert folder is not None
    assert "from a subprocess" in (folder / f"{status.id}.log").read_text()


def test_usage_is_summed_over_the_tree_also_for_children_that_fail(root: Root, served: ModelServer) -> None:
    prompt = script(code("llm_query('[[reply: x]][[usage 100 20]]')"), "[[status 401]]")
    with pytest.raises(ChildFailedError):
        root.rlm_query(prompt)
    (status,) = root.rlm_status()
    assert status.usage.calls == 2
    assert status.usage.prompt_tokens > 100
    assert root.session.usage == status.usage
    root.session.reset()
    assert root.session.usage == Usage()


def test_trajectories_are_json_line_by_line(root: Root) -> None:
    root.scripted(block("print('\\ud800 \\x00 \\u2028')\nFINAL('\\udfff')"))
    root.rlm_query("p")
    (status,) = root.rlm_status()
    for line in Path(str(status.trajectory_path)).read_bytes().splitlines():
        json.loads(line)


# -- whatever a model writes


ROUGH = [
    ("x = 'lone \udc80 surrogate'", "surrogate"),
    ("x = 1\x00", "null"),
    ("%no_such_magic", "magic"),
    ("%%no_such_cell_magic\nx", "magic"),
    ("for", "SyntaxError"),
    ("(" * 500, "ERROR"),
    ("raise SystemExit", "SystemExit"),
    ("raise GeneratorExit", "GeneratorExit"),
    ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "ERROR"),
    ("import sys; sys.stdout = None; sys.stderr = None\nprint('into nothing')", "Output: (none)"),
    ("import sys; sys.stdout.close()\nprint('closed')", "Output"),
    ("globals().clear()", "Output"),
    ("import os; os.close(1); os.close(2)\nprint('still')", "still"),
]
"""Code that must not end a run, and what the model then sees of it."""


def test_no_code_of_a_models_ends_the_run(root: Root) -> None:
    """The model sees what came of it, and goes on."""

    def second(seen: str) -> Any:
        return lambda messages: final("saw it" if seen in messages[-1]["content"] else messages[-1]["content"])

    root.scripted(rules={f"case {i} ": [block(code), second(seen)] for i, (code, seen) in enumerate(ROUGH)})
    answers = root.rlm_query_batched([f"case {i} " for i in range(len(ROUGH))])
    assert dict(enumerate(answers)) == dict.fromkeys(range(len(ROUGH)), "saw it")


def test_magics_shell_commands_and_await_work_in_a_child(root: Root) -> None:
    python = "import asyncio\nfiles = !echo one\nawait asyncio.sleep(0)\n%env RLM_TEST_MAGIC=two\nimport os\n"
    root.scripted(block(python + "FINAL([files[0], os.environ['RLM_TEST_MAGIC']])"))
    assert root.rlm_query("p") == "['one', 'two']"
