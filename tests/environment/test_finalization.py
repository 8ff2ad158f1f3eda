"""Promises of `rlm_kernel.environment.finalization`."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rlm_kernel.environment.finalization import Finalization, UnknownVariable
from rlm_kernel.errors import UsageMistake
from rlm_kernel.final_text import FinalCall
from rlm_kernel.values import FinalAnswer


class Run:
    """A finalization with its namespace; `cell` runs a function as a cell."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {"helper": len, "_private": 1}
        self.finalization = Finalization(lambda: self.namespace, lambda: frozenset({"helper", "answer"}))
        self.namespace["answer"] = self.finalization.answer_dict

    def cell(self, body: Any = None, *, success: bool = True, output: str | None = None) -> FinalAnswer | None:
        self.finalization.begin_cell()
        if body is not None:
            body()
        return self.finalization.end_cell(success=success, output=output)


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.mark.parametrize("value", [0, "", False, None, [], 42, "text"])
def test_any_value_is_an_answer_falsy_ones_too(run: Run, value: object) -> None:
    assert run.cell(lambda: run.finalization.FINAL(value)) == FinalAnswer(value)
    assert run.finalization.final == FinalAnswer(value)


def test_final_returns_its_text_so_that_printing_it_works(run: Run) -> None:
    assert run.finalization.FINAL(12) == "FINAL(12)"
    run.namespace["x"] = [1, 2]
    assert run.finalization.FINAL_VAR("x") == "FINAL([1, 2])"


def test_nothing_is_final_before_the_cell_has_ended(run: Run) -> None:
    run.finalization.begin_cell()
    run.finalization.FINAL(1)
    assert run.finalization.final is None
    assert run.finalization.end_cell(success=True) == FinalAnswer(1)


def test_a_cell_that_raises_finalizes_nothing(run: Run) -> None:
    assert run.cell(lambda: run.finalization.FINAL(1), success=False) is None
    assert run.cell() is None
    assert run.finalization.final is None


def test_an_answer_dict_that_a_raising_cell_made_ready_is_ready_no_more(run: Run) -> None:
    run.cell(lambda: run.finalization.answer_dict.update(content="draft", ready=True), success=False)
    assert run.finalization.answer_dict == {"content": "draft", "ready": False}
    assert run.cell() is None


def test_an_interrupted_cell_leaves_nothing_pending(run: Run) -> None:
    run.finalization.begin_cell()
    run.finalization.FINAL("interrupted")  # end_cell is never reached
    assert run.cell() is None


@pytest.mark.parametrize("content", ["text", 0, "", None])
def test_the_answer_dict_finalizes_when_it_is_ready(run: Run, content: object) -> None:
    def body() -> None:
        run.namespace["answer"]["content"] = content
        run.namespace["answer"]["ready"] = True

    assert run.cell(body) == FinalAnswer(content)


def test_the_answer_dict_alone_finalizes_nothing(run: Run) -> None:
    assert run.cell(lambda: run.namespace["answer"].update(content="draft")) is None
    assert run.finalization.partial_answer() == "draft"


def test_a_rebound_answer_is_ignored_and_no_error(run: Run) -> None:
    run.namespace["answer"] = {"content": "mine", "ready": True}
    assert run.cell() is None
    run.namespace["answer"] = 5
    assert run.cell() is None


def test_a_call_wins_over_the_answer_dict_and_over_output(run: Run) -> None:
    def body() -> None:
        run.finalization.answer_dict.update(content="dict", ready=True)
        run.finalization.FINAL("call")

    assert run.cell(body, output="FINAL(output)") == FinalAnswer("call")


def test_the_last_call_of_a_cell_counts_and_the_first_cell_stays(run: Run) -> None:
    def twice() -> None:
        run.finalization.FINAL(1)
        run.finalization.FINAL(2)

    assert run.cell(twice) == FinalAnswer(2)
    assert run.cell(lambda: run.finalization.FINAL(3)) is None
    assert run.finalization.final == FinalAnswer(2)


def test_lines_of_output_count_in_model_driven_cells_only(run: Run) -> None:
    run.namespace["x"] = 9
    assert run.cell(output=None) is None
    assert run.cell(output="no FINAL(inside) a line\n") is None
    assert run.cell(output="work\nFINAL(a (b)\nc) and more\n") == FinalAnswer("a (b)\nc")
    run.finalization.reset()
    assert run.cell(output="FINAL_VAR(x)\n") == FinalAnswer(9)


def test_an_unknown_variable_is_an_error_that_names_those_that_exist(run: Run) -> None:
    run.namespace.update(total=1, parts=[])
    with pytest.raises(UnknownVariable, match=r"no variable 'totl'. Variables that exist: parts, total$") as raised:
        run.finalization.FINAL_VAR("totl")
    assert isinstance(raised.value, UsageMistake)
    assert isinstance(raised.value, NameError)
    with pytest.raises(UnknownVariable):
        run.cell(output="FINAL_VAR(nope)\n")
    assert run.finalization.final is None


def test_an_unknown_variable_lists_no_more_than_fits_on_a_screen(run: Run) -> None:
    run.namespace.update({f"v{i:03}": i for i in range(200)})
    with pytest.raises(UnknownVariable, match=r"v029 and 170 more$"):
        run.finalization.FINAL_VAR("nope")


def test_an_empty_namespace_is_said_to_be_empty(run: Run) -> None:
    with pytest.raises(UnknownVariable, match="exist: none"):
        run.finalization.FINAL_VAR("x")
    assert run.finalization.SHOW_VARS() == "(none)"


@pytest.mark.parametrize("value", [5, None, ["x"], {"a": 1}])
def test_final_var_with_the_value_itself_takes_it(run: Run, value: object) -> None:
    assert run.cell(lambda: run.finalization.FINAL_VAR(value)) == FinalAnswer(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("written", ["x", " x ", "'x'", '"x"'])
def test_the_name_of_a_variable_may_be_quoted(run: Run, written: str) -> None:
    run.namespace["x"] = 7
    assert run.cell(lambda: run.finalization.FINAL_VAR(written)) == FinalAnswer(7)


def test_a_call_in_a_reply_resolves_like_one_in_code(run: Run) -> None:
    run.namespace["x"] = 7
    assert run.finalization.resolve(FinalCall("FINAL_VAR", "x")) == FinalAnswer(7)
    assert run.finalization.resolve(FinalCall("FINAL", "x")) == FinalAnswer("x")


def test_variables_are_the_users_own(run: Run) -> None:
    run.namespace["x"] = 7
    assert run.finalization.variables() == {"x": 7}
    assert run.finalization.SHOW_VARS() == "x: int"


class Table:
    """Compares element by element, like arrays and data frames do."""

    def __eq__(self, other: object) -> Any:
        return Table()

    def __bool__(self) -> bool:
        raise ValueError("the truth value of a table is ambiguous")

    def __str__(self) -> str:
        return "a table"

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(("content", "partial"), [("", None), (None, None), (0, "0"), ("x", "x"), (Table(), "a table")])
def test_a_draft_of_any_type_is_a_partial_answer(run: Run, content: object, partial: str | None) -> None:
    run.finalization.answer_dict["content"] = content
    assert run.finalization.partial_answer() == partial


def test_a_reset_forgets_the_answer_and_gives_a_new_dict(run: Run) -> None:
    old = run.finalization.answer_dict
    run.cell(lambda: run.finalization.FINAL(1))
    run.finalization.reset()
    assert run.finalization.final is None
    old["ready"] = True
    assert run.cell() is None


def test_cells_of_two_threads_do_not_share_what_is_pending(run: Run) -> None:
    """As the main shell's and a subshell's: one gives an answer, the other one ends first."""
    finalization = run.finalization
    finalization.begin_cell()
    finalization.FINAL("of this thread")
    outcomes: list[FinalAnswer | None] = []

    def other() -> None:
        finalization.begin_cell()
        outcomes.append(finalization.end_cell(success=True))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert outcomes == [None]
    assert finalization.end_cell(success=True) == FinalAnswer("of this thread")


def test_what_a_thread_of_the_cell_gives_is_the_cells_answer(run: Run) -> None:
    run.finalization.begin_cell()
    thread = threading.Thread(target=run.finalization.FINAL, args=("from a thread",))
    thread.start()
    thread.join()
    assert run.finalization.end_cell(success=True) == FinalAnswer("from a thread")
