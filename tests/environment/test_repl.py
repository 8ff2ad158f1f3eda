"""Promises of `rlm_kernel.environment.repl` and `queries`."""

from __future__ import annotations

import contextvars
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from rlm_kernel.environment.models import REPLAction, REPLObservation
from rlm_kernel.environment.queries import with_model
from rlm_kernel.environment.repl import REPLEnvironment
from rlm_kernel.environment.rubrics import CustomMetricRubric, ExactMatchRubric, REPLRubric
from rlm_kernel.errors import ChildCleanupError, ConfigurationError
from rlm_kernel.values import CleanupReport, FinalAnswer

Make = Callable[..., REPLEnvironment]


@pytest.fixture
def make() -> Iterator[Make]:
    """Make environments that are closed in the end."""
    made: list[REPLEnvironment] = []

    def build(*args: Any, **kwargs: Any) -> REPLEnvironment:
        made.append(REPLEnvironment(*args, **kwargs))
        return made[-1]

    yield build
    for environment in made:
        environment.close()


@pytest.fixture
def env(make: Make) -> REPLEnvironment:
    environment = make(context="Hello World", task_prompt="Count")
    environment.reset()
    return environment


def run(environment: REPLEnvironment, code: str, timeout_s: float | None = None) -> REPLObservation:
    return environment.step(REPLAction(code=code), timeout_s)


def ok(observation: REPLObservation) -> str:
    assert observation.result.success, observation.result
    return observation.result.stdout


# -- reset


def test_a_reset_shows_the_beginning_of_the_context_and_what_is_there(make: Make) -> None:
    observation = make(context="x" * 600, task_prompt="Count the chars").reset()
    assert (observation.iteration, observation.done, observation.reward) == (0, False, 0.0)
    assert observation.context_preview == "x" * 500
    assert observation.context_length == 600
    assert observation.max_iterations == 30
    assert {"answer", "context"} <= set(observation.available_variables)
    assert observation.metadata["task_prompt"] == "Count the chars"
    assert observation.metadata["final_answer"] is None
    assert "Count the chars" in observation.result.stdout


def test_a_reset_without_a_context_has_none(make: Make) -> None:
    environment = make()
    observation = environment.reset()
    assert (observation.context_preview, observation.context_length) == (None, 0)
    assert "context" not in observation.available_variables
    assert ok(run(environment, "answer")) == "{'content': '', 'ready': False}\n"


def test_a_reset_may_bring_its_own_context_and_task_and_begins_anew(env: REPLEnvironment) -> None:
    run(env, "x = 1\nanswer['content'] = 'left'\nFINAL('old')")
    observation = env.reset(context="other", task_prompt="Else", episode_id="e7", max_iterations=2)
    assert (observation.context_preview, observation.max_iterations, observation.done) == ("other", 2, False)
    assert "x" not in observation.available_variables
    state = env.state
    assert (state.episode_id, state.step_count, state.iteration, state.final_answer) == ("e7", 0, 0, None)
    assert (state.context, state.task_prompt) == ("other", "Else")
    assert ok(run(env, "context, answer")) == "('other', {'content': '', 'ready': False})\n"
    assert env.reset(context="").context_preview == "Hello World"
    assert env.state.episode_id != "e7"


def test_a_context_need_not_be_text(make: Make) -> None:
    environment = make(context=["one", "two"], context_preview_length=4)
    observation = environment.reset()
    assert (observation.context_preview, observation.context_length) == ("['on", len("['one', 'two']"))
    assert ok(run(environment, "context[1]")) == "'two'\n"


def test_a_seed_makes_random_numbers_repeat(env: REPLEnvironment) -> None:
    kept = random.getstate()
    try:
        code = "import random\nrandom.random()"
        env.reset(seed=7)
        first = ok(run(env, code))
        env.reset(seed=7)
        assert ok(run(env, code)) == first
        env.reset()
        assert ok(run(env, code)) != first
        with pytest.raises(ConfigurationError, match="seed='x'"):
            env.reset(seed="x")  # type: ignore[arg-type]
    finally:
        random.setstate(kept)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_iterations": 0},
        {"max_output_length": "8"},
        {"context_preview_length": -1},
        {"rlm_max_depth": 0},
        {"rlm_max_iterations": 1.5},
        {"llm_query_fn": "ask"},
        {"subcall_batch_fn": 3},
    ],
)
def test_a_bad_argument_is_named(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigurationError, match=f"{name}={value!r}"):
        REPLEnvironment(**wrong)


def test_a_token_where_nothing_answers_queries_is_refused_and_not_shown(make: Make) -> None:
    with pytest.raises(ConfigurationError, match="llm_query_fn") as caught:
        make().reset(hf_token="hf_secret")
    assert "hf_secret" not in str(caught.value)
    make(llm_query_fn=lambda prompt: prompt).reset(hf_token="hf_secret")


def test_an_unknown_option_of_a_reset_is_refused(make: Make) -> None:
    with pytest.raises(TypeError, match="contxt"):
        make().reset(contxt="x")  # type: ignore[call-arg]


# -- steps


def test_before_a_reset_there_is_no_step_and_no_state(make: Make) -> None:
    environment = make()
    with pytest.raises(RuntimeError, match=r"call reset\(\) first"):
        run(environment, "1")
    with pytest.raises(RuntimeError, match=r"call reset\(\) first"):
        _ = environment.state


def test_a_step_runs_code_and_counts_one_iteration(env: REPLEnvironment) -> None:
    observation = run(env, "result = len(context)\nprint(result)")
    assert observation.result.stdout == "11\n"
    assert observation.result.locals_snapshot == {"result": "11"}
    assert (observation.iteration, observation.done) == (1, False)
    assert "result" in observation.available_variables
    assert observation.metadata["execution_time"] == observation.result.execution_time > 0
    state = env.state
    assert (state.step_count, state.iteration) == (1, 1)
    assert "result" in state.namespace_keys
    assert state.total_execution_time == observation.result.execution_time


def test_an_error_in_the_code_is_shown_and_the_episode_goes_on(env: REPLEnvironment) -> None:
    observation = run(env, "kept = 1\nraise ValueError('test')")
    assert not observation.result.success
    assert observation.result.exception == "ValueError: test"
    assert not observation.done
    assert observation.reward == -0.05
    assert ok(run(env, "kept")) == "1\n"


def test_output_is_cut_with_a_line_that_says_how_long_it_was(make: Make) -> None:
    environment = make(max_output_length=100)
    environment.reset()
    observation = run(environment, "print('x' * 500)")
    assert len(observation.result.stdout) < 200
    assert "of 501 characters left out" in observation.result.stdout


def test_a_step_can_be_given_a_time(env: REPLEnvironment) -> None:
    observation = run(env, "while True: pass", timeout_s=0.05)
    assert "timeout_s=0.05" in (observation.result.exception or "")
    assert (observation.done, observation.iteration) == (False, 1)
    assert ok(run(env, "'usable'")) == "'usable'\n"


def test_an_interrupt_from_outside_passes_through_and_the_step_has_counted(env: REPLEnvironment) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(env, "import signal\nsignal.raise_signal(signal.SIGINT)")
    assert env.state.iteration == 1
    assert ok(run(env, "'usable'")) == "'usable'\n"


def test_what_is_no_action_is_refused(env: REPLEnvironment) -> None:
    with pytest.raises(TypeError, match="action='1'"):
        env.step("1")  # type: ignore[arg-type]


def test_code_cannot_enter_its_own_environment_and_two_threads_not_at_once(env: REPLEnvironment) -> None:
    env._executor.set_variable("env", env)  # type: ignore[union-attr]
    assert "running a step already" in (run(env, "env.reset()").result.exception or "")
    assert ok(run(env, "'usable'")) == "'usable'\n"


def test_the_state_is_a_snapshot(env: REPLEnvironment) -> None:
    before = env.state
    run(env, "x = 1")
    assert (before.iteration, env.state.iteration) == (0, 1)


def test_surrogates_in_output_answer_and_context_become_json(make: Make) -> None:
    environment = make(context="\ud800")
    environment.reset()
    observation = run(environment, "print('\\ud801')\nFINAL('\\ud802')")
    assert observation.result.stdout.startswith("\\ud801\n")
    assert observation.metadata["final_answer"] == "\\ud802"
    assert "\\\\ud802" in observation.model_dump_json()


# -- finalization


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("FINAL(42)", "42"),
        ("print('FINAL(42)')", "42"),
        ("print(f'FINAL({6 * 7})')\nprint('more')", "42"),
        ("print(FINAL('x'))", "x"),
        ("print('FINAL(two\\nlines (and parentheses))')", "two\nlines (and parentheses)"),
        ("mine = 'the answer'\nFINAL_VAR('mine')", "the answer"),
        ("mine = 'the answer'\nprint('FINAL_VAR(mine)')", "the answer"),
        ("answer['content'] = 'it'\nanswer['ready'] = True", "it"),
        ("answer = 42\nFINAL(answer)", "42"),
        ("FINAL('x' * 20_000)", "x" * 20_000),
        ("print('FINAL(' + 'x' * 20_000 + ')')", "x" * 20_000),
        *[("FINAL(0)", "0"), ("FINAL('')", ""), ("FINAL(False)", "False"), ("FINAL(None)", "None")],
        ("import asyncio\nawait asyncio.sleep(0)\nFINAL('awaited')", "awaited"),
    ],
)
def test_an_answer_ends_the_episode(env: REPLEnvironment, code: str, answer: str) -> None:
    observation = run(env, code)
    ok(observation)
    assert observation.done
    assert observation.metadata["final_answer"] == answer
    assert env.state.final_answer == answer


@pytest.mark.parametrize(
    "code",
    [
        "print('the text FINAL(42) inside a line')",
        "answer['content'] = 'not ready'",
        "answer = {'content': 'rebound', 'ready': True}",
        "FINAL(1)\nraise ValueError('after')",
        "print('FINAL(1)')\n1/0",
        "answer['content'] = 1; answer['ready'] = True\n1/0",
        "import sys\nprint('FINAL(42)', file=sys.stderr)",
    ],
)
def test_what_is_no_answer_ends_nothing(env: REPLEnvironment, code: str) -> None:
    observation = run(env, code)
    assert not observation.done
    assert observation.metadata["final_answer"] is None
    assert not run(env, "1").done


def test_a_missing_variable_is_an_error_that_names_those_that_exist(env: REPLEnvironment) -> None:
    run(env, "mine = 1")
    for code in ("FINAL_VAR('yours')", "print('FINAL_VAR(yours)')"):
        observation = run(env, code)
        assert not observation.done
        assert not observation.result.success
        assert "no variable 'yours'. Variables that exist: mine" in (observation.result.exception or "")


def test_an_answer_can_be_submitted(env: REPLEnvironment) -> None:
    observation = env.step(REPLAction(is_final=True, final_answer="explicit"))
    assert observation.done
    assert observation.metadata["final_answer"] == env.state.final_answer == "explicit"
    assert env.state.iteration == 1
    env.reset()
    assert env.step(REPLAction(is_final=True)).metadata["final_answer"] == ""


def test_after_the_answer_further_code_runs_and_the_answer_stays(env: REPLEnvironment) -> None:
    env.reset(expected_answer="first")
    assert run(env, "FINAL('first')").reward == 1.0
    later = run(env, "print('still runs')\nFINAL('second')")
    assert "still runs" in ok(later)
    assert (later.done, later.metadata["final_answer"], later.reward) == (True, "first", 0.0)
    assert env.step(REPLAction(is_final=True, final_answer="third")).metadata["final_answer"] == "first"


def test_helpers_that_code_rebinds_or_deletes_are_put_back(env: REPLEnvironment) -> None:
    run(env, "FINAL = None\ndel SHOW_VARS")
    assert ok(run(env, "deep = 1\nSHOW_VARS()")) == "'deep: int'\n"
    assert run(env, "FINAL(1)").done


# -- running out of iterations


def test_the_last_iteration_runs_and_ends_the_episode(make: Make) -> None:
    environment = make(max_iterations=2)
    environment.reset()
    assert not run(environment, "x = 1").done
    observation = run(environment, "x = 2\nprint(x)")
    assert observation.done
    assert observation.result.stdout == "2\nMaximum iterations (2) reached.\n"
    assert observation.metadata["final_answer"] is None
    assert observation.reward == -0.1
    beyond = run(environment, "x = 3\nprint('ran')")
    assert (beyond.done, beyond.result.success) == (True, False)
    assert "Maximum iterations (2) reached" in beyond.result.stdout
    assert "ran" not in beyond.result.stdout


def test_a_partial_answer_is_taken_when_the_iterations_run_out(make: Make) -> None:
    environment = make(max_iterations=2)
    environment.reset(expected_answer="draft")
    run(environment, "answer['content'] = 'draft'")
    observation = run(environment, "1/0")
    assert (observation.done, observation.metadata["final_answer"], observation.reward) == (True, "draft", 1.0)
    assert not observation.result.success


def test_an_answer_in_the_last_iteration_counts(make: Make) -> None:
    environment = make(max_iterations=1)
    environment.reset()
    observation = run(environment, "answer['content'] = 'draft'\nFINAL('whole')")
    assert observation.metadata["final_answer"] == "whole"
    assert "Maximum" not in observation.result.stdout


def test_an_answer_can_still_be_submitted_when_the_iterations_have_run_out(make: Make) -> None:
    environment = make(max_iterations=1)
    environment.reset()
    run(environment, "1")
    assert environment.step(REPLAction(is_final=True, final_answer="late")).metadata["final_answer"] == "late"


# -- rewards


def test_the_rubric_is_applied_to_each_step(make: Make) -> None:
    environment = make(rubric=REPLRubric(outcome=ExactMatchRubric()))
    environment.reset(expected_answer="done")
    assert run(environment, "1").reward == 0.0
    assert run(environment, "print('FINAL(done)')").reward == 1.0
    environment.reset(expected_answer="done")
    assert run(environment, "print('FINAL(wrong)')").reward == 0.0
    environment.reset()
    assert run(environment, "print('FINAL(done)')").reward == 0.0


def test_a_metric_of_ones_own_gives_the_reward(make: Make) -> None:
    environment = make(rubric=CustomMetricRubric(lambda expected, predicted: len(expected) / len(predicted)))
    environment.reset(expected_answer="ab")
    assert run(environment, "FINAL('abcd')").reward == 0.5


# -- helpers


def variables(environment: REPLEnvironment, **kwargs: Any) -> set[str]:
    names = set(environment.reset(**kwargs).available_variables)
    return {name for name in names if name.startswith(("llm_", "rlm_"))}


def ask(prompt: str) -> str:
    return f"one:{prompt}"


def ask_many(prompts: list[str]) -> list[str]:
    return [f"many:{prompt}" for prompt in prompts]


def test_there_are_helpers_only_for_what_is_configured(make: Make) -> None:
    assert variables(make()) == set()
    assert variables(make(llm_query_fn=ask)) == {"llm_query", "rlm_query"}
    assert variables(make(llm_batch_fn=ask_many)) == {"llm_query_batched", "llm_batch", "rlm_query_batched"}
    assert variables(make(subcall_fn=ask)) == {"rlm_query", "rlm_query_batched"}
    everything = {"llm_query", "llm_query_batched", "llm_batch", "rlm_query", "rlm_query_batched"}
    assert variables(make(llm_query_fn=ask, llm_batch_fn=ask_many)) == everything


def test_recursive_queries_fall_back_to_direct_ones(make: Make) -> None:
    environment = make(llm_query_fn=ask, llm_batch_fn=ask_many)
    environment.reset()
    assert ok(run(environment, "llm_query('a'), rlm_query('b')")) == "('one:a', 'one:b')\n"
    assert ok(run(environment, "llm_query_batched(['a']), llm_batch(('b',))")) == "(['many:a'], ['many:b'])\n"
    assert (
        ok(run(environment, "rlm_query_batched(['a', 'b']), rlm_query_batched([])")) == "(['many:a', 'many:b'], [])\n"
    )


def test_a_recursive_batch_is_made_of_single_calls_in_order_with_errors_in_their_place(make: Make) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    def subcall(prompt: str, model: str | None = None) -> str:
        if prompt == "3":
            raise ValueError("no")
        return f"{prompt} {variable.get()} {model}"

    environment = make(subcall_fn=subcall)
    environment.reset()
    token = variable.set("set")
    try:
        code = "rlm_query_batched([str(n) for n in range(20)], model='m')"
        run(environment, f"answers = {code}")
    finally:
        variable.reset(token)
    expected = ["Error: no" if n == 3 else f"{n} set m" for n in range(20)]
    assert environment._executor.get_variable("answers") == expected  # type: ignore[union-attr]
    for thread in threading.enumerate():
        if thread.name == "rlm-batch":
            thread.join(5)


def test_one_text_is_no_list_of_prompts(make: Make) -> None:
    environment = make(llm_batch_fn=ask_many)
    environment.reset()
    assert "must be a list of prompts" in (run(environment, "llm_query_batched('abc')").result.exception or "")


def test_background_queries_need_managed_children_and_say_so(make: Make) -> None:
    environment = make(llm_query_fn=ask)
    environment.reset()
    for call in ("rlm_query('a', blocking=False)", "rlm_query('a', context=[1])"):
        exception = run(environment, call).result.exception or ""
        assert exception.startswith("ManagedModeRequired: rlm_query: ")
        assert "recursive_controller" in exception


@pytest.mark.parametrize(
    ("function", "called"),
    [
        (lambda prompt: (prompt,), ("p",)),
        (lambda prompt, model: (prompt, model), ("p", "m")),
        (lambda prompt, model=None: (prompt, model), ("p", "m")),
        (lambda prompt, *, model=None: (prompt, model), ("p", "m")),
        (lambda *args: args, ("p", "m")),
        (lambda prompt, which=None: (prompt, which), ("p", "m")),
        (lambda prompt, temperature=0.7, model=None: (prompt, temperature, model), ("p", 0.7, "m")),
        (lambda prompt, temperature=0.7, **rest: (prompt, temperature, rest), ("p", "m", {})),
        (str, "p"),
    ],
)
def test_functions_are_called_as_they_can_be(function: Any, called: Any) -> None:
    assert with_model(function)("p", "m") == called


def test_an_optional_second_parameter_is_not_filled_without_a_model() -> None:
    assert with_model(lambda prompt, temperature=0.7: temperature)("p", None) == 0.7


def test_a_type_error_inside_a_function_is_not_taken_for_a_wrong_signature(make: Make) -> None:
    calls: list[Any] = []

    def broken(prompt: str, model: str | None = None) -> str:
        calls.append((prompt, model))
        raise TypeError("inside")

    environment = make(llm_query_fn=broken)
    environment.reset()
    assert run(environment, "llm_query('a')").result.exception == "TypeError: inside"
    assert calls == [("a", None)]


def test_the_model_of_the_reset_is_used_where_code_names_none(make: Make) -> None:
    environment = make(llm_query_fn=lambda prompt, model: f"{model}")
    environment.reset(llm_model="usual")
    assert ok(run(environment, "llm_query('a'), llm_query('a', 'other'), llm_query('a', model='third')")) == (
        "('usual', 'other', 'third')\n"
    )


def controller(**attributes: Any) -> Any:
    closed: list[int] = []
    functions = dict.fromkeys(("llm_query_fn", "llm_batch_fn", "rlm_query_fn", "rlm_batch_fn"))
    attributes = {**functions, "backend": None, "managed": None, **attributes}
    return SimpleNamespace(close=lambda: closed.append(1), closed=closed, **attributes)


def test_a_controller_gives_the_functions_and_is_closed_with_the_environment(make: Make) -> None:
    control = controller(llm_query_fn=ask, llm_batch_fn=ask_many, rlm_query_fn=lambda prompt: f"deep:{prompt}")
    environment = make(recursive_controller=control, llm_query_fn=lambda prompt: f"mine:{prompt}")
    environment.reset()
    assert (
        ok(run(environment, "llm_query('a'), rlm_query('a'), llm_batch(['a'])")) == "('mine:a', 'deep:a', ['many:a'])\n"
    )
    environment.close()
    assert control.closed == [1]


# -- the end


def test_closing_releases_everything_and_may_be_repeated(env: REPLEnvironment) -> None:
    env.close()
    assert env._state is None
    assert env._executor is None
    env.close()
    with pytest.raises(RuntimeError, match=r"call reset\(\) first"):
        run(env, "1")
    assert env.reset().iteration == 0


def test_the_metadata_are_those_of_the_published_environment(make: Make) -> None:
    metadata = make().get_metadata()
    assert metadata.name == "repl_env"
    assert metadata.description
    assert metadata.version == "0.1.0"


def test_closing_while_another_thread_is_in_a_step_lets_it_end(env: REPLEnvironment) -> None:
    inside, go_on = threading.Event(), threading.Event()
    executor = env._executor
    assert executor is not None
    executor.set_variable("inside", inside)
    executor.set_variable("go_on", go_on)
    results: list[REPLObservation] = []
    code = "inside.set()\ngo_on.wait(10)\nprint('to its end')"
    thread = threading.Thread(target=lambda: results.append(run(env, code)))
    thread.start()
    inside.wait(10)
    with pytest.raises(RuntimeError, match="running a step already"):
        env.reset()
    env.close()
    with pytest.raises(RuntimeError, match=r"call reset\(\) first"):
        _ = env.state
    go_on.set()
    thread.join(10)
    assert ok(results[0]) == "to its end\n"
    assert executor.get_variable("inside") is None  # released when the step had ended
    assert env.reset().iteration == 0


# -- managed mode


class FakeManaged:
    """Stands in for managed children: says what it was asked, and cannot confirm as long as it is told so."""

    def __init__(self) -> None:
        self.verbs: list[Any] = []
        self.stuck = False
        self.failure: ChildCleanupError | None = None
        self.closed = threading.Event()
        self.waiting = threading.Event()

    def helpers(self) -> Mapping[str, Callable[..., Any]]:
        def wait(handle: object = None) -> str:
            self.waiting.set()
            return "stopped" if self.closed.wait(20) else "never stopped"

        names = ("llm_query", "llm_query_batched", "rlm_query", "rlm_query_batched", "rlm_status", "rlm_cancel")
        return {**{name: lambda *a, name=name, **k: f"managed {name}" for name in names}, "rlm_wait": wait}

    def _verb(self, *said: Any) -> CleanupReport:
        self.verbs.append(said)
        if self.stuck:
            self.failure = ChildCleanupError("pid 7 is not confirmed gone", (7,))
            raise self.failure
        self.failure = None
        return CleanupReport(said[0])

    def begin_episode(self, episode_id: str | None) -> CleanupReport:
        return self._verb("begin", episode_id)

    def finalize(self, answer: FinalAnswer | None = None) -> CleanupReport:
        return self._verb("finalize", None if answer is None else answer.text)

    def close(self) -> CleanupReport:
        self.closed.set()
        return self._verb("close")

    def cleanup(self) -> CleanupReport:
        return self._verb("cleanup")

    @property
    def cleanup_failure(self) -> ChildCleanupError | None:
        return self.failure


@pytest.fixture
def managed() -> FakeManaged:
    return FakeManaged()


@pytest.fixture
def nursed(make: Make, managed: FakeManaged) -> Iterator[REPLEnvironment]:
    environment = make(max_iterations=3, recursive_controller=controller(managed=managed))
    environment.reset(episode_id="e1", expected_answer="7")
    managed.verbs.clear()
    yield environment
    managed.stuck = False


def test_managed_helpers_are_in_the_namespace_and_survive_rebinding(nursed: REPLEnvironment) -> None:
    assert {"rlm_status", "rlm_wait", "rlm_cancel", "llm_batch"} <= set(nursed.state.namespace_keys)
    run(nursed, "rlm_query = None")
    assert ok(run(nursed, "rlm_query('a', blocking=False), llm_batch(['a'])")) == (
        "('managed rlm_query', 'managed llm_query_batched')\n"
    )


def test_a_function_of_the_callers_goes_before_the_managed_one_and_only_that(make: Make, managed: FakeManaged) -> None:
    environment = make(llm_query_fn=ask, recursive_controller=controller(managed=managed))
    environment.reset()
    assert ok(run(environment, "llm_query('a'), rlm_query('a')")) == "('one:a', 'managed rlm_query')\n"


@pytest.mark.parametrize(
    "code",
    [
        "FINAL(7)",
        "print('FINAL(7)')",
        "seven = 7\nFINAL_VAR('seven')",
        "answer['content'] = 7; answer['ready'] = True",
        None,
    ],
)
def test_each_kind_of_answer_stops_the_children_before_the_step_returns(
    nursed: REPLEnvironment, managed: FakeManaged, code: str | None
) -> None:
    assert not run(nursed, "1").done
    assert managed.verbs == []
    observation = nursed.step(REPLAction(is_final=True, final_answer="7")) if code is None else run(nursed, code)
    assert observation.done
    assert managed.verbs == [("finalize", "7")]
    run(nursed, "FINAL(8)")
    assert managed.verbs == [("finalize", "7")]


def test_running_out_of_iterations_stops_the_children(nursed: REPLEnvironment, managed: FakeManaged) -> None:
    for _ in range(3):
        run(nursed, "1")
    assert managed.verbs == [("finalize", None)]


def test_a_reset_stops_the_children_and_names_the_episode(nursed: REPLEnvironment, managed: FakeManaged) -> None:
    nursed.reset(episode_id="e2")
    nursed.reset()
    assert managed.verbs == [("begin", "e2"), ("begin", nursed.state.episode_id)]


def test_a_failed_cleanup_keeps_the_answer_and_refuses_what_follows(
    nursed: REPLEnvironment, managed: FakeManaged
) -> None:
    managed.stuck = True
    observation = run(nursed, "FINAL(7)")
    assert (observation.done, observation.metadata["final_answer"], observation.reward) == (True, "7", 1.0)
    assert observation.metadata["survivors"] == [7]
    assert not observation.result.success
    assert observation.result.exception == "ChildCleanupError: pid 7 is not confirmed gone"
    assert nursed.state.final_answer == "7"
    step = nursed.state.step_count
    with pytest.raises(ChildCleanupError):
        run(nursed, "1")
    with pytest.raises(ChildCleanupError):
        nursed.reset(context="new")
    with pytest.raises(ChildCleanupError):
        nursed.cleanup()
    with pytest.raises(ChildCleanupError):
        nursed.close()
    state = nursed.state
    assert (state.final_answer, state.step_count, state.episode_id) == ("7", step, "e1")
    managed.stuck = False
    nursed.cleanup()
    assert ok(run(nursed, "'usable'")) == "'usable'\n"
    nursed.reset(context="new")
    assert nursed.state.final_answer is None


def test_a_reset_that_confirms_unlocks(nursed: REPLEnvironment, managed: FakeManaged) -> None:
    managed.stuck = True
    assert run(nursed, "print('FINAL(7)')").metadata["final_answer"] == "7"
    managed.stuck = False
    nursed.reset()
    assert ok(run(nursed, "1")) == "1\n"


def test_closing_reaches_the_children_while_a_step_waits_for_them(
    nursed: REPLEnvironment, managed: FakeManaged
) -> None:
    results: list[REPLObservation] = []
    thread = threading.Thread(target=lambda: results.append(run(nursed, "print(rlm_wait())\nFINAL('late')")))
    thread.start()
    assert managed.waiting.wait(10)
    nursed.close()
    thread.join(10)
    assert "stopped" in ok(results[0])
    assert results[0].metadata["final_answer"] == "late"
    assert managed.verbs == [("close",)]  # what had been closed is not finalized
