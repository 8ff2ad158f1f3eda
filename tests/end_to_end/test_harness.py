"""`KernelREPLEnv`: episodes in real kernels, what a step gives, and how it ends whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlm_kernel.clients.scripted import ScriptedClient
from rlm_kernel.environment.local import LocalREPLEnv
from rlm_kernel.errors import ChildCleanupError, ConfigurationError, KernelDied, PayloadError
from rlm_kernel.jupyter import kernel_link
from rlm_kernel.jupyter.episodes import EpisodeLeftovers, Job
from rlm_kernel.jupyter.harness import KernelREPLEnv
from rlm_kernel.jupyter.kernel_process import KernelProcess
from tests.support.kernels import MARK, Fifo, environment, marked

SECRET = "the expected answer 4711"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("harness")


@pytest.fixture(scope="module")
def shared_env(home: Path) -> Iterator[KernelREPLEnv]:
    """Without a model: a kernel in the place of one that had to go costs a second, and no nursery."""
    with KernelREPLEnv(env=environment(home, **{MARK: "harness"}), max_output_length=1000) as running:
        running.reset()
        yield running
    assert marked("harness") == set()


@pytest.fixture
def env(shared_env: KernelREPLEnv) -> KernelREPLEnv:
    """The module's environment in a fresh episode."""
    shared_env.reset("one two three", "count the words", expected_answer=SECRET)
    return shared_env


@pytest.fixture
def make_env(tmp_path: Path) -> Iterator[Callable[..., KernelREPLEnv]]:
    made: list[KernelREPLEnv] = []

    def make(**options: Any) -> KernelREPLEnv:
        variables = {**environment(tmp_path / "home", **{MARK: "own"}), **options.pop("env", {})}
        made.append(KernelREPLEnv(env=variables, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert marked("own") == set()


def result(env: Any, code: str, **options: Any) -> Any:
    return env.execute(code, **options).observation.result


def text(env: Any, expression: str) -> str:
    block = result(env, f"print({expression})")
    assert block.success, block.stderr
    return str(block.stdout).strip()


# -- what a step gives


def test_a_reset_shows_the_beginning_of_the_context(shared_env: KernelREPLEnv) -> None:
    step = shared_env.reset("x" * 700, "a task")
    observation = step.observation
    assert (observation.context_preview, observation.context_length) == ("x" * 500, 700)
    assert (observation.iteration, observation.done, step.done, step.reward) == (0, False, False, None)
    assert observation.metadata["task_prompt"] == "a task"
    assert {"context", "answer", "FINAL", "rlm_query"} <= set(observation.available_variables)


@pytest.mark.parametrize(
    "code",
    [
        "x = 1\ny = [x]\nx + 1",
        "_hidden = context\nprint(len(context))",
        "import sys\nprint('a')\ndisplay('b')\nprint('c', file=sys.stderr)\n'd'",
        "1 / 0",
        "print('before')\nmissing",
        "import asyncio\nawait asyncio.sleep(0)\nprint('awaited')",
        "%who_ls nothing",
        "print('FINAL(7)')",
        "print('text, then FINAL(7)')",
        "print(FINAL(7))",
        "value = 7\nprint('FINAL_VAR(value)')",
        "FINAL(7); 1 / 0",
        "answer['content'] = 7; answer['ready'] = True",
        "print('FINAL_VAR(missing)')",
        "class Odd:\n    __repr__ = lambda self: 'odd' * 1000\nodd = Odd()\nOdd = 0",
    ],
)
def test_a_step_gives_the_same_in_a_kernel_as_in_this_process(env: KernelREPLEnv, code: str) -> None:
    with LocalREPLEnv() as local:
        local.reset("one two three", "count the words", expected_answer="7")
        env.reset("one two three", "count the words", expected_answer="7")
        here, there = local.execute(code), env.execute(code)
    assert (there.reward, there.done) == (here.reward, here.done)
    a, b = there.observation, here.observation
    for name in ("stdout", "success", "exception", "locals_snapshot"):
        assert getattr(a.result, name) == getattr(b.result, name), name
    assert a.result.stderr.splitlines()[-1:] == b.result.stderr.splitlines()[-1:]
    for name in ("iteration", "max_iterations", "done", "context_preview", "context_length"):
        assert getattr(a, name) == getattr(b, name), name
    for name in ("task_prompt", "final_answer"):
        assert a.metadata[name] == b.metadata[name], name


def test_long_output_keeps_its_beginning_and_its_end(env: KernelREPLEnv) -> None:
    block = result(env, "print('begin'); print('x' * 3_000_000); print('end')")
    assert block.stdout.startswith("begin\nxxx")
    assert block.stdout.endswith("xxx\nend\n")
    assert "of 3000011 characters" in block.stdout
    assert len(block.stdout) < 1200


def test_input_is_refused_at_once(env: KernelREPLEnv) -> None:
    block = result(env, "input('your name? ')", timeout_s=20)
    assert not block.success
    assert "StdinNotImplementedError" in block.exception


def test_the_answer_and_the_names_are_seen_also_after_an_error(env: KernelREPLEnv) -> None:
    step = env.execute("made = 1\n1 / 0")
    assert "made" in step.observation.available_variables
    assert step.observation.result.locals_snapshot == {"made": "1"}
    step = env.execute("FINAL('yes')")
    assert (step.done, step.observation.metadata["final_answer"]) == (True, "yes")
    assert env.state().final_answer == "yes"
    after = env.execute("print(1)")
    assert (after.done, after.reward, after.observation.result.stdout) == (True, 0.0, "1\n")


def test_the_observation_is_there_for_user_expressions_as_json(env: KernelREPLEnv) -> None:
    found = env._link.snapshot(["nothing"])
    assert found == {}
    env.execute("FINAL(3)")
    assert text(env, "__rlm__.observation()['done'], __rlm__.observation()['final_value']") == "True 3"


def test_the_iterations_run_out(shared_env: KernelREPLEnv) -> None:
    shared_env.reset("c", expected_answer="half an answer", max_iterations=2)
    assert not shared_env.execute("answer['content'] = 'half an answer'").done
    step = shared_env.execute("print('last')")
    assert step.observation.result.stdout == "last\nMaximum iterations (2) reached.\n"
    assert (step.done, step.reward, step.observation.metadata["final_answer"]) == (True, 1.0, "half an answer")
    beyond = shared_env.execute("print('not run')")
    assert beyond.observation.result.stdout == "Maximum iterations (2) reached."
    shared_env.reset("c", max_iterations=1)
    step = shared_env.execute("1")
    assert (step.done, step.reward, step.observation.metadata["final_answer"]) == (True, -0.1, None)


def test_a_submitted_answer_ends_the_episode(env: KernelREPLEnv) -> None:
    env.reset("one two three", expected_answer="three")
    step = env.submit_final_answer("three")
    assert (step.done, step.reward, env.state().final_answer) == (True, 1.0, "three")
    assert text(env, "get_ipython().kernel.rlm.final_answer.text") == "three", (
        "the kernel knows, and stops the children"
    )
    assert env.submit_final_answer("another").observation.metadata["final_answer"] == "three"


# -- time


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time; time.sleep(60)", "import asyncio; await asyncio.sleep(60)"]
)
def test_code_that_takes_too_long_is_interrupted_and_the_kernel_goes_on(env: KernelREPLEnv, code: str) -> None:
    pid = env.kernel_pid
    began = time.monotonic()
    step = env.execute(f"kept = 5\n{code}", timeout_s=0.3)
    assert time.monotonic() - began < 5
    assert step.observation.result.exception == (
        "ExecutionTimeout: the code was interrupted because it ran longer than timeout_s=0.3"
    )
    assert (step.done, step.observation.result.success) == (False, False)
    assert (text(env, "kept"), env.kernel_pid) == ("5", pid)


def test_ctrl_c_interrupts_the_code_and_the_environment_goes_on(env: KernelREPLEnv, fifo: Fifo) -> None:
    def press() -> None:
        fifo.lines(1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        env.execute(f"x = 3\n{fifo.write_code('1')}\nimport time; time.sleep(60)")
    presser.join()
    assert text(env, "x") == "3"


def test_ctrl_c_before_we_have_begun_to_wait_for_the_code_interrupts_it_too(env: KernelREPLEnv, monkeypatch) -> None:
    pid, usual = env.kernel_pid, KernelProcess.send_message

    def send(self: KernelProcess, channel: str, message: dict[str, Any]) -> None:
        monkeypatch.undo()
        usual(self, channel, message)
        raise KeyboardInterrupt

    monkeypatch.setattr(KernelProcess, "send_message", send)
    with pytest.raises(KeyboardInterrupt):
        env.execute("import time; time.sleep(60)")
    assert (text(env, "6 * 7"), env.kernel_pid) == ("42", pid)


# -- episodes


def test_nothing_of_an_episode_is_left_in_the_next(env: KernelREPLEnv, tmp_path: Path) -> None:
    pid = env.kernel_pid
    first = env.state().episode_id
    env.execute(
        f"import os, sys\nx = print\nprint = 1\nFINAL = 2\nos.environ['LEFT'] = '1'\nos.chdir({str(tmp_path)!r})\n"
        "sys.path.insert(0, 'left')\nanswer = context = 'mine'\n'value of Out'"
    )
    env.execute("FINAL_VAR('x')")
    assert env.reset("new").observation.done is False
    assert env.kernel_pid == pid, "the kernel goes on"
    seen = text(
        env,
        "sorted(n for n in globals() if n in ('x', 'os', 'sys', 'print') or n.startswith('_1')), context, answer, "
        "__import__('os').environ.get('LEFT'), __import__('os').getcwd(), 'left' in __import__('sys').path, Out, In[:-1], callable(FINAL)",
    )
    assert seen == f"[] new {{'content': '', 'ready': False}} None {os.getcwd()} False {{}} [''] True"
    assert env.state().episode_id != first
    assert (env.state().iteration, env.state().final_answer) == (1, None)


@pytest.mark.parametrize(
    ("context", "expression", "shown"),
    [
        ({"a": [1, b"x", {2.5}]}, "context", "{'a': [1, b'x', {2.5}]}"),
        ("lone \ud800 surrogate", "context == 'lone \\ud800 surrogate'", "True"),
        (lambda x: x + 1, "context(1)", "2"),
        (None, "repr(context)", "''"),
        (0, "context", "0"),
    ],
    ids=["container", "surrogate", "function", "none", "zero"],
)
def test_the_context_is_any_object(env: KernelREPLEnv, context: Any, expression: str, shown: str) -> None:
    env.reset(context)
    assert text(env, expression) == shown


def test_a_large_context_travels_by_a_file_that_is_gone_afterwards(env: KernelREPLEnv) -> None:
    began = time.monotonic()
    assert env.reset("x" * 100_000_000).observation.context_length == 100_000_000
    assert time.monotonic() - began < 15
    assert text(env, "len(context)") == "100000000"
    kernel = env._link._kernel
    assert kernel is not None
    assert [path.name for path in kernel.folder.iterdir() if path.suffix == ".pickle"] == []


def test_a_context_that_cannot_be_pickled_is_refused_and_the_environment_stays_usable(env: KernelREPLEnv) -> None:
    with pytest.raises(PayloadError, match="context cannot be pickled"):
        env.reset(threading.Lock())
    env.reset("fine")
    assert text(env, "context") == "fine"


def test_the_expected_answer_is_nowhere_in_the_kernel(env: KernelREPLEnv) -> None:
    """Not even in its memory, all of which is looked through. The pattern does not match itself."""
    code = (
        "import os, re\npatterns, found = (re.compile(rb'the expected answe[r] 4711'), re.compile(rb'one two thre[e]')), set()\n"
        "with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb', 0) as memory:\n"
        "    for line in list(maps):\n"
        "        span, rights, *rest = line.split()\n"
        "        if rights.startswith('rw') and len(rest) == 3 or '[heap]' in rest:\n"
        "            start, end = (int(part, 16) for part in span.split('-'))\n"
        "            memory.seek(start)\n"
        "            data = memory.read(end - start)\n"
        "            found.update(*(pattern.findall(data) for pattern in patterns))\n"
        "print(found, 'expected' in str(dict(os.environ)))"
    )
    block = result(env, code)
    assert block.stdout == "{b'one two three'} False\n", "the context is found, so the search works" + block.stderr


def test_the_seed_makes_random_numbers_repeat(shared_env: KernelREPLEnv) -> None:
    drawn = []
    for _ in range(2):
        shared_env.reset(seed=7)
        drawn.append(text(shared_env, "__import__('random').random()"))
    assert drawn[0] == drawn[1]


# -- failures


@pytest.mark.slow
def test_children_end_with_the_answer_and_a_kernel_that_dies_takes_everything_with_it(
    make_env: Any, fifo: Fifo
) -> None:
    """The environment notices at once, and its next reset starts another kernel."""
    child = f"import os, time; {fifo.write_code('os.getpid()')}; time.sleep(60)"
    env = make_env(client_factory=ScriptedClient.factory([f"```repl\n{child}\n```"]))
    env.reset()
    env.execute("h = rlm_query('sleep', blocking=False, name='sleeper')")
    (child_pid,) = fifo.lines(1)
    step = env.submit_final_answer("enough")
    assert not Path(f"/proc/{child_pid}").exists()
    assert step.observation.metadata["children"]["counts"] == {"cancelled": 1}
    env.reset()
    assert result(env, "h").exception == "NameError: name 'h' is not defined"
    env.execute("h = rlm_query('sleep', blocking=False)")
    fifo.lines(1)
    killed_at: list[float] = []

    def kill() -> None:
        fifo.lines(1)
        killed_at.append(time.monotonic())
        os.kill(env.kernel_pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(KernelDied, match=r"was killed by SIGKILL(.|\n)*Call reset"):
        env.execute(f"{fifo.write_code('1')}\nimport time; time.sleep(60)")
    assert time.monotonic() - killed_at[0] < 3
    killer.join()
    assert marked("own") == set(), "its nursery and its child are gone, too"
    with pytest.raises(RuntimeError, match=r"call reset\(\)"):
        env.state()
    env.reset("again")
    assert text(env, "context") == "again"


@pytest.mark.slow
def test_what_makes_a_kernel_unfit_costs_it_and_the_next_reset_starts_another(
    make_env: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that does not end when it is interrupted; code that goes on after its episode; children that cannot be confirmed gone."""
    env = make_env()
    env.reset()
    _check_that_stubborn_code_costs_the_kernel(env, monkeypatch)
    env.reset("second")
    _check_that_code_which_goes_on_costs_the_kernel(env)
    _check_that_an_unconfirmed_exit_is_reported_and_refuses_everything(env)
    pid = env.kernel_pid
    env.reset("fourth", fresh_kernel=True)
    assert env.kernel_pid != pid
    assert text(env, "context") == "fourth"


def _check_that_stubborn_code_costs_the_kernel(env: KernelREPLEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(env._link, "_patience_s", 0.6)
        pid = env.kernel_pid
        stubborn = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: time.sleep(1)"
        with pytest.raises(KernelDied, match=r"interrupted after timeout_s=0.2.*was killed(.|\n)*reset"):
            env.execute(stubborn, timeout_s=0.2)
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(RuntimeError, match=r"call reset\(\)"):
        env.execute("1")


def _check_that_code_which_goes_on_costs_the_kernel(env: KernelREPLEnv) -> None:
    """A thread, or a task: either could still reach into the names of the next episode."""
    code = (
        "import asyncio, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), name='mine', daemon=True).start()\n"
        "async def go_on():\n    await asyncio.sleep(60)\n"
        "task = asyncio.create_task(go_on(), name='too')"
    )
    pid = env.kernel_pid
    assert result(env, code).success
    kernel = env._link._kernel
    assert kernel is not None
    with pytest.raises(EpisodeLeftovers, match="task too, thread mine"):
        env._link._serve_reset(kernel, Job())
    env.reset("third")
    assert env.kernel_pid != pid
    assert text(env, "context") == "third"


def _check_that_an_unconfirmed_exit_is_reported_and_refuses_everything(env: KernelREPLEnv) -> None:
    broken = (
        "session = get_ipython().kernel.rlm\nstop = session.supervisor.stop\n"
        "from dataclasses import replace\n"
        "session.supervisor.stop = lambda *a, **k: replace(stop(*a, **k), survivors=(4711,))\n"
    )
    step = env.execute(f"{broken}FINAL('kept')")
    assert (step.done, step.observation.metadata["final_answer"]) == (True, "kept")
    assert step.observation.metadata["survivors"] == [4711]
    assert (step.observation.result.exception or "").startswith("ChildCleanupError")
    refused: list[Callable[[], object]] = [lambda: env.execute("1"), env.cleanup, lambda: env.reset("x")]
    for call in refused:
        with pytest.raises(ChildCleanupError, match="4711") as caught:
            call()
        assert caught.value.survivors == (4711,)


def test_a_kernel_that_does_not_start_says_why(make_env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [sys.executable, "-c", "import sys; sys.exit('no luck today')"]
    monkeypatch.setattr(kernel_link, "kernel_spec", lambda: {"argv": argv})
    with pytest.raises(KernelDied, match=r"exit code 1(.|\n)*no luck today"):
        make_env().reset()
    with pytest.raises(KernelDied, match="cannot be started"):
        make_env(cwd="/nowhere/at/all").reset()
    monkeypatch.setattr(
        kernel_link, "kernel_spec", lambda: {"argv": [sys.executable, "-c", "input(), [*iter(int, 1)]"]}
    )


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"model": "no spec"}, "model"),
        ({"settings": {"max_depht": 2}}, "max_depht"),
        ({"settings": {"max_depth": 0}}, "max_depth"),
        ({"settings": {"on_subcall_start": print}}, "on_subcall_start"),
        ({"max_iterations": 0}, "max_iterations"),
        ({"max_output_length": "long"}, "max_output_length"),
        ({"startup_timeout_s": 0}, "startup_timeout_s"),
        ({"client_factory": "nonsense"}, "client_factory"),
    ],
)
def test_a_bad_argument_is_named_before_anything_is_started(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        KernelREPLEnv(**options)
    assert caught.value.field == field


def test_an_unknown_kernelspec_is_named(make_env: Any) -> None:
    with pytest.raises(ConfigurationError, match="kernel_name='nobody'"):
        make_env(kernel_name="nobody").reset()


def test_before_a_reset_and_after_a_close_the_error_says_what_to_do(make_env: Any) -> None:
    env = make_env()
    for call in (env.state, lambda: env.execute("1"), lambda: env.submit_final_answer("x")):
        with pytest.raises(RuntimeError, match=r"call reset\(\)"):
            call()
    with pytest.raises(ConfigurationError, match="timeout_s"):
        env.execute("1", timeout_s=-1)
    env.close()
    env.close()
    with pytest.raises(RuntimeError, match="closed"):
        env.reset()


# -- ends


@pytest.mark.slow
def test_four_in_parallel_do_not_disturb_each_other_and_settings_reach_the_kernel(make_env: Any) -> None:
    """Also: a setting without a variable, and `close` while code runs."""

    def episode(number: int) -> tuple[str, ...]:
        env = make_env(settings={"max_depth": 3, "result_truncation_limit": 50 + number})
        env.reset(f"context {number}", "task", f"final {number}")
        shown = text(env, "context")
        config = text(env, "*(get_ipython().kernel.rlm.settings[n] for n in ('max_depth', 'result_truncation_limit'))")
        step = env.execute(f"FINAL('final {number}')")
        pid = env.kernel_pid
        with ThreadPoolExecutor(1) as beside:
            running = beside.submit(env.execute, "import subprocess; subprocess.run(['sleep', '60'])")
            env.close()
            with pytest.raises(RuntimeError, match="closed"):
                running.result()
        return shown, config, str(step.reward), str(Path(f"/proc/{pid}").exists())

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(episode, range(4)))
    assert found == [(f"context {n}", f"3 {50 + n}", "1.0", "False") for n in range(4)]


@pytest.mark.slow
def test_an_abandoned_environment_leaves_nothing_behind(tmp_path: Path) -> None:
    """Dropped in a running process, and at the end of one; with what its cells have started."""
    program = (
        "import gc, os\n"
        "from rlm_kernel import KernelREPLEnv\n"
        "def start():\n"
        "    env = KernelREPLEnv()\n"
        "    env.reset()\n"
        '    env.execute(\'import subprocess; p = subprocess.Popen(["sleep", "60"], start_new_session=True)\')\n'
        "    return env\n"
        "env = start(); pid = env.kernel_pid\n"
        "del env; gc.collect()\n"
        "print(os.path.exists(f'/proc/{pid}'))\n"
        "env = start()\n"
        "if os.fork() == 0:\n"
        "    del env; gc.collect(); os._exit(0)\n"
        "os.wait()\n"
        "print(env.execute('print(5)').observation.result.stdout)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        env=environment(tmp_path, **{MARK: "abandoned"}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["False", "5"], done.stderr
    assert done.stderr == ""
    assert marked("abandoned") == set()
