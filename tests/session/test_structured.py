"""Promises of ``schema=``: `rlm_kernel.session.structured` by itself, and real children that answer in a given form."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import re
import subprocess
import sys
import threading
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, field_validator
from typing_extensions import TypedDict  # pydantic asks for this one before Python 3.12

from rlm_kernel.errors import ChildFailedError, UsageMistake
from rlm_kernel.loop.trajectory import read_trajectory
from rlm_kernel.session.structured import (
    DIRECT_RETRIES,
    MAX_SHOWN_SCHEMA,
    AnswerCheck,
    InvalidAnswer,
    answer_form,
    describe_form,
)
from rlm_kernel.values import ChildState, FinalAnswer
from tests.session.conftest import Root, block, final


class Person(BaseModel):
    name: str
    age: int = Field(ge=0)
    friends: list[Person] = []


@dataclasses.dataclass
class Point:
    x: int
    y: int


class Movie(TypedDict):
    title: str


class Even(BaseModel):
    value: int

    @field_validator("value")
    @classmethod
    def is_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        return value


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"child": {"$ref": "#/$defs/node"}},
            "additionalProperties": False,
        }
    },
}


class Columns:
    """Stands in for an array of a numerical library."""

    def tolist(self) -> list[int]:
        return [1, 2]


def built(schema: Any, value: Any) -> Any:
    """Take an answer as a child does, and build the object as whoever asked does."""
    form = answer_form(schema)
    assert form is not None
    return form.object_of(AnswerCheck.from_json(form.schema_json).accept(FinalAnswer(value)).text)


def refusal(schema: Any, value: Any) -> str:
    with pytest.raises(InvalidAnswer) as caught:
        built(schema, value)
    return str(caught.value)


# -- what an answer may be


def shown(value: object) -> str:
    """Name a case without addresses, which differ between processes."""
    return re.sub(r" at 0x\w+", "", repr(value))[:60]


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        (Person, {"name": "a", "age": 1}, Person(name="a", age=1)),
        (Person, '{"name": "a", "age": 1}', Person(name="a", age=1)),
        (Person, "{'name': 'a', 'age': 1}", Person(name="a", age=1)),
        (Person, '```json\n{"name": "a", "age": 1}\n```', Person(name="a", age=1)),
        (Person, Person(name="a", age=1), Person(name="a", age=1)),
        (Point, Point(1, 2), Point(1, 2)),
        (Movie, {"title": "é"}, {"title": "é"}),
        (Literal["yes", "no"], "yes", "yes"),
        (list[int], (1, 2), [1, 2]),
        (set[int], {1, 2}, {1, 2}),
        (tuple[int, str], "[1, 'a']", (1, "a")),
        (dict[str, int], {"a": 1}, {"a": 1}),
        (int | None, None, None),
        (int, 0, 0),
        (bool, False, False),
        (str, "", ""),
        (str, "Paris", "Paris"),
        (str, "42", "42"),
        (str, '"Paris"', "Paris"),
        (str, '{"a": 1}', '{"a": 1}'),
        (str, "lone \udc80", "lone \\udc80"),
        (float, "1.5", 1.5),
        (datetime.date, datetime.date(2024, 2, 29), datetime.date(2024, 2, 29)),
        (list[int], Columns(), [1, 2]),
        (list[float], [1.5, 2], [1.5, 2.0]),
        ({"type": "array", "items": {"type": "integer"}}, "[1]", [1]),
        ({}, "anything", "anything"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 3, "exclusiveMaximum": True}, 2, 2),
    ],
    ids=shown,
)
def test_values_and_texts_of_the_form_become_the_object(schema: Any, value: Any, expected: Any) -> None:
    assert built(schema, value) == expected


@pytest.mark.parametrize(
    ("schema", "value", "parts"),
    [
        (Person, {"name": "a", "age": -1}, ["at $.age", "-1", "minimum: 0"]),
        (Person, {"age": 1}, ["'name' is a required property"]),
        (Person, {"name": "a", "age": 1, "friends": [{"name": 5, "age": 1}]}, ["at $.friends[0].name", '"string"']),
        (Person, '{"name": "a", "age": 1', ["the text is no JSON", "line 1 column"]),
        (Literal["yes", "no"], "perhaps", ["'perhaps'", '["yes", "no"]']),
        (int | None, "x", ["anyOf", "closest: "]),
        (float, float("nan"), ["cannot be written as JSON", "JSON compliant"]),
        (list, object(), ["cannot be written as JSON", "object"]),
        (datetime.date, "2024-02-30", ["'2024-02-30' is not a 'date'"]),
        (datetime.datetime, "yesterday", ["is not a 'date-time'"]),
        (list[int], ["x"] * 20, ["at $[0]", "and 12 more"]),
        (str, 5, ["5 is not of type 'string'"]),
        ({"type": "object"}, "x" * 100_000, ["100,0"]),
    ],
    ids=shown,
)
def test_what_does_not_fit_is_refused_by_its_place_and_what_was_expected(
    schema: Any, value: Any, parts: list[str]
) -> None:
    said = refusal(schema, value)
    assert [part for part in parts if part not in said] == [], said
    assert len(said) < 8000


def test_something_circular_is_refused() -> None:
    circular: list[Any] = []
    circular.append(circular)
    assert "cannot be written as JSON" in refusal(list, circular)


@pytest.mark.parametrize("levels", [50, 400])
def test_recursive_schemas_take_deeply_nested_answers(levels: int) -> None:
    """Far deeper than the interpreter's recursion limit lets a validator go by itself; and the limit is put back."""
    before = sys.getrecursionlimit()
    text = '{"child": ' * levels + "{}" + "}" * levels
    assert json.dumps(built(TREE, text)) == text
    assert json.dumps(built(TREE, json.loads(text))) == text
    assert f"at ${'.child' * levels}" in refusal(TREE, text.replace("{}", '{"x": 1}'))
    assert "nested too deeply" in refusal(TREE, '{"child": ' * 100_000) or "no JSON" in refusal(TREE, "{")
    assert sys.getrecursionlimit() == before


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('abé"\\\n', max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
any_form = AnswerCheck.of({})
an_object = AnswerCheck.of({"type": "object", "minProperties": 1})


@given(json_values)
@settings(max_examples=25)
def test_every_json_value_comes_back_as_it_was_given(value: Any) -> None:
    if not isinstance(value, str):
        given_as_value = any_form.accept(FinalAnswer(value)).text
        assert json.loads(given_as_value) == value
        assert json.loads(any_form.accept(FinalAnswer(given_as_value)).text) == value


@given(st.text(max_size=60) | st.text(alphabet="{}[]\"',:1a\n`", max_size=60))
@settings(max_examples=80)
def test_any_text_is_an_answer_that_fits_or_is_refused_with_a_reason(text: str) -> None:
    try:
        taken = an_object.accept(FinalAnswer(text))
    except InvalidAnswer as error:
        reason = str(error)
        assert "\n- " in reason
    else:
        assert isinstance(json.loads(taken.text), dict)


# -- what a schema may be


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"type": "objekt"}, "at $.type: 'objekt'"),
        ({"properties": {"x": {"type": 3}}}, "at $.properties.x.type"),
        ({"$ref": "#/$defs/nowhere"}, "'#/$defs/nowhere' leads nowhere"),
        ({"items": {"$ref": "http://127.0.0.1:9/schema.json"}}, "nothing is fetched"),
        ({"default": object()}, "is no JSON"),
        ({"minimum": float("nan")}, "is no JSON"),
        ('{"type": "object"}', "json.loads it first"),
        (5, "=5: must be"),
        (True, "=True: must be"),
        ([int], "such as a pydantic model or list[int]"),
        (Person(name="a", age=1), "not a value of type Person"),
        (type(threading.Lock()), "=lock: no JSON schema can be made of it"),
    ],
    ids=shown,
)
def test_a_schema_that_is_none_is_refused_at_the_call(root: Root, schema: Any, part: str) -> None:
    """Before a model is looked for, and before any child."""
    for call in (
        lambda: root.rlm_query("p", schema=schema),
        lambda: root.rlm_query("p", schema=schema, blocking=False),
        lambda: root.rlm_query_batched(["p"], schema=[schema]),
    ):
        with pytest.raises(UsageMistake) as caught:
            call()
        assert "schema" in str(caught.value)
        assert part in str(caught.value)
    assert root.rlm_status() == []


def test_a_list_of_schemas_must_be_as_long_as_the_prompts(root: Root) -> None:
    with pytest.raises(UsageMistake, match="schema has 1 entries for 2 prompts"):
        root.rlm_query_batched(["p", "q"], schema=[int])


def test_a_ref_in_data_is_no_reference() -> None:
    assert answer_form({"enum": [{"$ref": "#/nowhere"}], "properties": {"$ref": {"type": "integer"}}}) is not None


def test_a_long_schema_is_previewed_and_said_to_be_whole_in_a_variable() -> None:
    long = json.dumps({"properties": {f"p{i}": {"type": "integer"} for i in range(3000)}}).encode()
    said = describe_form(long, variable=True)
    assert len(said) < MAX_SHOWN_SCHEMA + 1000
    assert "only its beginning: the whole schema is in the variable `answer_schema`" in said
    assert '{"type": "integer"}' in describe_form(b'{"type": "integer"}', variable=True)


def test_the_validator_is_loaded_without_what_only_rare_formats_need() -> None:
    """One optional package of it takes over a second to import."""
    program = (
        "import sys; from rlm_kernel.session.structured import AnswerCheck; AnswerCheck.of({'type': 'object'});"
        "print([n for n in sys.modules if n.startswith('rfc3987_syntax')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- children


def test_a_child_answers_in_the_form_and_the_parent_gets_the_object(root: Root) -> None:
    root.scripted(block("FINAL({'name': 'Ada', 'age': 36})"))
    assert root.rlm_query("p", schema=Person) == Person(name="Ada", age=36)


def test_a_child_is_told_what_is_wrong_and_goes_on(root: Root) -> None:
    """Whatever way it answers in: code, a draft that is marked ready, output, a variable, a reply without code."""

    def last(messages: list[dict[str, str]]) -> str:
        said = [m["content"] for m in messages if m["role"] == "user" and "does not fit the schema" in m["content"]]
        return block(f"FINAL([{len(said)}, {len([s for s in said if 'at $' in s or 'no JSON' in s])}])")

    root.scripted(
        block("FINAL('no')"),
        block("answer['content'] = {'a': 1}; answer['ready'] = True"),
        block("print('FINAL(still no)')"),
        block("x = 1.5\nFINAL_VAR('x')"),
        "FINAL(nor this)",
        last,
    )
    assert root.rlm_query("p", schema=list[int]) == [5, 5]


def test_a_refused_answer_is_not_taken_up_again_by_a_later_block(root: Root) -> None:
    root.scripted(
        block("answer['content'] = 'x'; answer['ready'] = True"), block("y = 1"), block("FINAL(answer['ready'])")
    )
    assert root.rlm_query("p", schema=bool) is False


def test_the_child_knows_the_schema(root: Root) -> None:
    def look(messages: list[dict[str, str]]) -> str:
        told = "Ada" if '"minimum": 7' in messages[1]["content"] else "nothing"
        return block(f"FINAL({{'told': {told!r}, 'variable': answer_schema['properties']['told']['type']}})")

    schema = {"type": "object", "properties": {"told": {"type": "string"}, "n": {"minimum": 7}}}
    root.scripted(look)
    assert root.rlm_query("p", schema=schema) == {"told": "Ada", "variable": "string"}


def test_without_a_fitting_answer_the_child_fails_with_reason_and_text(root: Root) -> None:
    root.session.configure("max_iterations", "2")
    root.scripted(block("FINAL('one')"), block("FINAL('two')"), "FINAL(three and nothing else)")
    with pytest.raises(ChildFailedError) as caught:
        root.rlm_query("p", schema=Person)
    said = str(caught.value)
    assert "no answer after 2 iterations" in said
    assert "is not of type 'object'" in said
    assert "three and nothing else" in said
    status = caught.value.status
    assert status is not None
    assert status.state is ChildState.FAILED
    lines = read_trajectory(str(status.trajectory_path))
    assert [line["final_answer"] for line in lines if line["type"] != "metadata"] == [None] * 4
    assert "FINAL('two')" in lines[2]["code_blocks"][0]["code"]


@pytest.mark.parametrize(
    ("last", "answer"), [("FINAL([3])", [3]), ("[4]", [4]), ("I give up", [5]), ("```repl\nFINAL([6])\n```", [6])]
)
def test_the_last_chance_takes_what_fits(root: Root, last: str, answer: list[int]) -> None:
    """A call, the whole reply, the draft in ``answer``, in this order."""
    root.session.configure("max_iterations", "1")

    def at_last(messages: list[dict[str, str]]) -> str:
        return last if '"type": "array"' in messages[-1]["content"] else "the form was not told again"

    root.scripted(block("answer['content'] = [5]"), at_last)
    assert root.rlm_query("p", schema=list[int]) == answer


def test_every_way_to_a_result_gives_the_object_and_the_status_the_text(root: Root) -> None:
    root.scripted(block("FINAL({'x': 1, 'y': 2})"))
    handle = root.rlm_query("p", blocking=False, schema=Point)
    status = root.rlm_wait(handle)
    assert json.loads(status.result) == {"x": 1, "y": 2}

    async def awaited() -> Any:
        return await handle

    ways = [root.rlm_result(handle), root.rlm_result(handle.id), handle.result(), asyncio.run(awaited())]
    ways += [root.rlm_result(each.id) for each in root.rlm_as_completed([handle])]
    assert ways == [Point(1, 2)] * 5


def test_a_batch_has_one_schema_for_all_or_one_for_each_and_keeps_failures_in_place(root: Root) -> None:
    root.session.configure("max_iterations", "1")
    root.scripted(block("FINAL(int(context) if context.isdigit() else context)"), "nothing", rules={})
    assert root.rlm_query_batched(["1", "2"], schema=int) == [1, 2]
    answers = root.rlm_query_batched(["1", "x", "y"], schema=[None, int, str])
    assert answers[0] == "1"
    assert answers[1].startswith("Error: ")
    assert "is not of type 'integer'" in answers[1]
    assert answers[2] == "y"
    handles = root.rlm_query_batched(["3", "4"], schema=[int, None], blocking=False)
    root.rlm_wait(handles)
    assert [root.rlm_result(handle) for handle in handles] == [3, "4"]


def test_what_only_the_type_checks_is_checked_where_the_object_is_built_and_the_answer_is_kept(root: Root) -> None:
    root.scripted(block("FINAL({'value': 3})"))
    handle = root.rlm_query("p", blocking=False, schema=Even)
    assert root.rlm_wait(handle).state is ChildState.COMPLETED
    with pytest.raises(ChildFailedError, match=r"(?s)does not build Even.*must be even.*\"value\": 3") as caught:
        handle.result()
    assert caught.value.status is not None
    assert caught.value.status.result == '{"value": 3}'


def test_children_ask_their_children_with_a_schema_too(root: Root) -> None:
    """Classes of the child's own code included; and at the limit, where the answer comes from a direct call."""
    root.session.configure("max_depth", "3")
    python = """
from pydantic import BaseModel
class Inner(BaseModel):
    n: int
h = rlm_query('inner', schema=Inner, blocking=False)
rlm_wait(h)
direct = None
FINAL({'got': [rlm_result(h).n, rlm_result(h.id).n, (await h).n, type(h.result()).__name__]})
"""
    root.scripted(
        rules={
            "inner": block("FINAL({'n': rlm_query('direct', schema=int) + 1})"),
            "direct": "41",
            "outer": block(python),
        }
    )
    assert root.rlm_query("outer", schema=dict[str, list]) == {"got": [42, 42, 42, "Inner"]}


def test_a_schema_beyond_64_kib_travels(root: Root) -> None:
    schema = {"type": "object", "properties": {"p7": {"type": "integer"}}, "description": "x" * 200_000}
    root.scripted(block("FINAL({'p7': 'no'})"), block("FINAL({'p7': len(answer_schema['description'])})"))
    assert root.rlm_query("p", schema=schema) == {"p7": 200_000}


def test_an_answer_that_was_cut_is_said_to_be(root: Root) -> None:
    root.session.configure("result_truncation_limit", "10")
    root.scripted(block("FINAL(list(range(100)))"))
    with pytest.raises(ChildFailedError, match="result_truncation_limit=10"):
        root.rlm_query("p", schema=list[int])


# -- direct calls, at the depth limit


def test_a_direct_call_is_checked_and_may_be_corrected(root: Root) -> None:
    root.session.configure("max_depth", "1")

    def second(messages: list[dict[str, str]]) -> str:
        said = messages[-1]["content"]
        return '{"name": "a", "age": 2}' if "at $.age" in said and '"age": -2' in said else "not told"

    root.scripted('{"name": "a", "age": -2}', second)
    assert root.rlm_query("who?", schema=Person, context="here") == Person(name="a", age=2)


def test_direct_calls_are_repeated_a_bounded_number_of_times(root: Root) -> None:
    root.session.configure("max_depth", "1")
    root.scripted(*[f"no {n}" for n in range(9)])
    with pytest.raises(ChildFailedError, match=f"no {DIRECT_RETRIES}$"):
        root.rlm_query("who?", schema=Person)
    assert root.session.usage.calls == 1 + DIRECT_RETRIES


def test_a_batch_of_direct_calls_repeats_only_what_did_not_fit(root: Root) -> None:
    root.session.configure("max_depth", "1")

    def answer(messages: list[dict[str, str]]) -> str:
        said = messages[-1]["content"]
        if "bad" in said:
            return "never"
        return "7" if "late" not in said or "refused" in said else "not yet"

    root.scripted(answer, answer, answer, answer, answer, answer, answer)
    answers = root.rlm_query_batched(["good", "bad", "late", "text"], schema=[int, int, int, None])
    assert [answers[0], answers[2], answers[3]] == [7, 7, "7"]
    assert answers[1].startswith("Error: 3 direct model calls")
    assert root.session.usage.calls == 4 + 2 + 1


def test_a_failed_direct_call_is_not_repeated_for_its_form(root: Root) -> None:
    from rlm_kernel.errors import ModelCallError

    root.session.configure("max_depth", "1")
    root.scripted(ModelCallError("401"))
    with pytest.raises(ModelCallError, match="401"):
        root.rlm_query("p", schema=int)
    root.scripted(ModelCallError("401"))
    assert root.rlm_query_batched(["p"], schema=int) == ["Error: 401"]


def test_without_a_schema_nothing_has_changed(root: Root) -> None:
    root.scripted(final('{"a": 1}'))
    assert root.rlm_query("p") == '{"a": 1}'
