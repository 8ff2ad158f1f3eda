"""Structured answers: ``rlm_query(..., schema=…)``.

Two ends, which share nothing but JSON. Whoever asks turns the schema into an `AnswerForm`: the JSON Schema that travels,
and how the answer's text becomes an object. Whoever answers checks its answer against that JSON Schema with an
`AnswerCheck`, and is told what is wrong while it can still try again.

An answer may be given as a Python value or as text. Text is read as JSON, else as a Python literal, else as a plain
string; the first reading that fits the schema counts. What a type checks beyond its JSON Schema (a pydantic validator,
say) is checked only where the object is built.

Who runs it: any thread of either process. What threads share is the raised recursion limit, which is counted.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import importlib.util
import json
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlm_kernel.errors import ChildFailedError, UsageMistake
from rlm_kernel.final_text import match_fence
from rlm_kernel.values import ChildStatus, FinalAnswer

DIRECT_RETRIES = 2
"""How often a direct model call (at the depth limit) is asked again when its answer does not fit."""

MAX_SHOWN_SCHEMA = 8_000
"""A longer schema is previewed in the model's messages; the child has the whole of it in ``answer_schema``."""

SCHEMA_VARIABLE = "answer_schema"

_MAX_PROBLEMS = 8
_MAX_VALUE_CHARS = 300
_MAX_LITERAL_CHARS = 1_000_000
_RECURSION_LIMIT = 15_000
"""Frames that checking a deeply nested answer may take; the interpreter's own limit would be reached at about 150 levels."""


_SURROGATE = re.compile("[\ud800-\udfff]")


class InvalidAnswer(UsageMistake):
    """An answer does not fit the schema that was asked for; the message says where, and what was expected."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer must look like, on the side of whoever asks.

    Attributes:
        schema_json: the JSON Schema, as JSON text.
        build: turns the answer's JSON text into the object; raises `ValueError` if it cannot.
        label: what was asked for, for messages.
    """

    schema_json: bytes
    build: Callable[[str], Any]
    label: str

    def object_of(self, text: str, status: ChildStatus | None = None) -> Any:
        """Build the object.

        Raises:
            ChildFailedError: the text fits the JSON Schema, and yet the type refuses it; or it was cut.
        """
        try:
            with _deep_recursion():
                return self.build(text)
        except (ValueError, RecursionError) as error:
            who = "the answer" if status is None else f"the answer of {status.id}"
            raise ChildFailedError(
                f"{who} does not build {self.label}: {_cut(str(error), 2000)}. Its text is kept in the status's result: "
                f"{_cut(text)}",
                status,
            ) from error


def answer_form(schema: Any, argument: str = "schema") -> AnswerForm | None:
    """Read what was given as ``schema=``.

    Args:
        schema: a JSON Schema as a dict; a pydantic model or any other type that pydantic can check (``list[int]``, a
            dataclass, a ``TypedDict``, a ``Literal``); or None.
        argument: how the caller calls it, for messages.

    Raises:
        UsageMistake: it is none of these, or no valid JSON Schema.
    """
    if schema is None:
        return None
    if isinstance(schema, dict):
        return _form_of_json_schema(schema, argument)
    if isinstance(schema, str | bytes | bool | int | float | list | tuple | set) or _is_model_instance(schema):
        hint = " (json.loads it first, if it is one)" if isinstance(schema, str | bytes) else ""
        raise UsageMistake(
            f"{argument}={_cut(repr(schema))}: must be a JSON schema (a dict) or a type, such as a pydantic model or "
            f"list[int], not a value of type {type(schema).__name__}{hint}"
        )
    return _form_of_type(schema, argument)


def _is_model_instance(schema: object) -> bool:
    return not isinstance(schema, type) and hasattr(schema, "model_dump") and hasattr(schema, "model_fields_set")


def _form_of_type(schema: Any, argument: str) -> AnswerForm:
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    name = getattr(schema, "__name__", None) if isinstance(schema, type) else None
    label = name if name and not getattr(schema, "__args__", None) else _cut(str(schema), 100)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(schema)
        json_schema = adapter.json_schema()
    except (PydanticUserError, TypeError, NameError, ValueError, RecursionError) as error:
        raise UsageMistake(
            f"{argument}={label}: no JSON schema can be made of it ({type(error).__name__}: {_cut(str(error))}); give a "
            "pydantic model, a type made of plain data, or a JSON schema as a dict"
        ) from error
    return AnswerForm(json.dumps(json_schema).encode(), adapter.validate_json, label)


def _form_of_json_schema(schema: dict[str, Any], argument: str) -> AnswerForm:
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageMistake(f"{argument}: is no JSON: {error}") from error
    plain = json.loads(text)  # tuples and the like are lists from here on, here as in the child
    AnswerCheck.of(plain, argument)
    return AnswerForm(text.encode(), json.loads, "an object of that JSON schema")


# ------------------------------------------------------------------------------------------------ where it is checked


def load_validator() -> Any:
    """Import ``jsonschema``.

    One of the packages that it uses where they are installed, for the formats ``iri`` and ``uri``, compiles a grammar on
    import, which takes over a second. It is put off until such a format is checked.
    """
    name = "rfc3987_syntax"
    if "jsonschema" in sys.modules or name in sys.modules or importlib.util.find_spec(name) is None:
        import jsonschema

        return jsonschema
    deferred = types.ModuleType(name)

    def is_valid_syntax(*args: Any) -> Any:
        return importlib.import_module(name).is_valid_syntax(*args)

    deferred.is_valid_syntax = is_valid_syntax  # type: ignore[attr-defined]
    sys.modules[name] = deferred
    try:
        import jsonschema
    finally:
        if sys.modules.get(name) is deferred:
            del sys.modules[name]
    return jsonschema


class AnswerCheck:
    """Check answers against one JSON Schema.

    References inside the schema are followed; none is ever fetched from elsewhere. Formats are checked.

    Attributes:
        schema: the JSON Schema.
        rejected: text and problems of the last answer that did not fit, None if there was none.
    """

    def __init__(self, schema: Any, validator: Any) -> None:
        self.schema = schema
        self._validator = validator
        self.rejected: tuple[str, str] | None = None

    @classmethod
    def of(cls, schema: Any, argument: str = "schema") -> AnswerCheck:
        """Prepare the check.

        Raises:
            UsageMistake: it is no valid JSON Schema.
        """
        jsonschema = load_validator()
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            with _deep_recursion():
                kind.check_schema(schema)
        except jsonschema.SchemaError as error:
            where = "" if not error.absolute_path else f" at {error.json_path}"
            raise UsageMistake(f"{argument}: is no valid JSON schema{where}: {_cut(error.message)}") from error
        except RecursionError as error:
            raise UsageMistake(f"{argument}: is nested too deeply to be checked") from error
        _check_references(schema, argument)
        return cls._prepared(schema)

    @classmethod
    def from_json(cls, schema_json: bytes) -> AnswerCheck:
        """Prepare the check of a schema that `answer_form` has made, and so is valid."""
        return cls._prepared(json.loads(schema_json))

    @classmethod
    def _prepared(cls, schema: Any) -> AnswerCheck:
        jsonschema = load_validator()
        from jsonschema_specifications import REGISTRY

        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        # With this registry nothing is fetched: a reference that leads out of the schema cannot be followed.
        return cls(schema, kind(schema, registry=REGISTRY, format_checker=_formats(kind)))

    def accept(self, answer: FinalAnswer) -> FinalAnswer:
        """Return an answer as JSON text, if it fits.

        Raises:
            InvalidAnswer: it does not; the message says where, and what was expected.
        """
        readings, obstacle = _readings(answer.value)
        first: list[str] | None = None
        for reading in readings:
            problems = self._problems(reading)
            if not problems:
                with _deep_recursion():
                    text = json.dumps(reading, ensure_ascii=False)
                # Shown as its escape, as in any other answer: in JSON it would be refused by most readers.
                return FinalAnswer(_SURROGATE.sub(lambda match: f"\\\\u{ord(match[0]):04x}", text))
            # Of text that is JSON, the problems of that reading are of use; "is not of type 'object'" of the raw string is not.
            first = first or problems
        problems = first or []
        if obstacle is not None:
            problems = [obstacle, *problems]
        described = "\n".join(f"- {problem}" for problem in problems)
        self.rejected = (_text_of(answer), described)
        raise InvalidAnswer(
            f"the answer does not fit the schema that was asked for, so it was not taken:\n{described}\n"
            "Correct it and hand it in again."
        )

    def _problems(self, value: Any) -> list[str]:
        try:
            with _deep_recursion():
                errors = sorted(
                    self._validator.iter_errors(value), key=lambda error: list(map(str, error.absolute_path))
                )
        except RecursionError:
            return ["at $: the value is nested too deeply to be checked"]
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in ("jsonschema", "referencing"):
                raise
            return [f"the schema itself is at fault, so that no answer can be checked: {_cut(str(error))}"]
        shown = [_describe(error) for error in errors[:_MAX_PROBLEMS]]
        return [*shown, f"and {len(errors) - _MAX_PROBLEMS} more"] if len(errors) > _MAX_PROBLEMS else shown


class _RaisedLimit:
    """The interpreter's recursion limit, raised while any thread is inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = 0

    def enter(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = sys.getrecursionlimit()
                sys.setrecursionlimit(max(self._before, _RECURSION_LIMIT))

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                sys.setrecursionlimit(self._before)


_raised_limit = _RaisedLimit()


@contextlib.contextmanager
def _deep_recursion() -> Iterator[None]:
    """Let deeply nested values be walked through for the length of the block."""
    _raised_limit.enter()
    try:
        yield
    finally:
        _raised_limit.leave()


def _describe(error: Any) -> str:
    """Say where a value is wrong, and what was expected; of alternatives, what the closest of them misses."""
    expected = f"{error.validator}: {_cut(json.dumps(error.validator_value, ensure_ascii=False))}"
    text = f"at {error.json_path}: {_cut(error.message)} (expected {expected})"
    if error.context:
        closest = min(error.context, key=lambda inner: (-len(inner.absolute_path), len(str(inner.message))))
        text += f"; closest: at {closest.json_path}: {_cut(closest.message)}"
    return text


def _check_references(schema: Any, argument: str) -> None:
    """Raise `UsageMistake` if one of the schema's references leads nowhere."""
    import referencing.exceptions
    import referencing.jsonschema
    from jsonschema_specifications import REGISTRY

    found = list(_keywords(schema))
    if any(keyword == "$id" for keyword, _ in found):
        return  # references may be relative to any of them: judged when they are followed
    resolver: Any = REGISTRY.resolver_with_root(referencing.jsonschema.DRAFT202012.create_resource(schema))
    for keyword, target in found:
        if keyword == "$ref":
            try:
                resolver.lookup(target)
            except (referencing.exceptions.Unresolvable, referencing.exceptions.NoSuchResource) as error:
                raise UsageMistake(
                    f"{argument}: its $ref {target!r} leads nowhere; definitions must stand in the schema itself, for "
                    "example under $defs, as nothing is fetched"
                ) from error


def _keywords(schema: Any) -> Iterator[tuple[str, str]]:
    """Yield the references and ids of a schema, leaving out what is data and not schema."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            for keyword, value in part.items():
                if keyword in ("$ref", "$id") and isinstance(value, str):
                    yield keyword, value
                elif keyword not in ("enum", "const", "default", "examples"):
                    pending.append(value)
        elif isinstance(part, list):
            pending += part


def _formats(kind: Any) -> Any:
    """Return the checker of a draft's formats, with dates and times whatever else is installed."""
    import jsonschema

    checker = jsonschema.FormatChecker()
    checker.checkers = {**checker.checkers, **kind.FORMAT_CHECKER.checkers}

    def parses(parse: Callable[[str], object]) -> Callable[[object], bool]:
        def check(value: object) -> bool:
            return not isinstance(value, str) or bool(parse(value) or True)

        return check

    checker.checkers["date-time"] = (parses(datetime.datetime.fromisoformat), (ValueError,))
    checker.checkers["time"] = (parses(datetime.time.fromisoformat), (ValueError,))
    return checker


# ------------------------------------------------------------------------------------------------ readings of an answer


def _readings(value: Any) -> tuple[list[Any], str | None]:
    """Return what an answer may mean, as JSON data, likeliest first; and why text is no JSON, if it is none."""
    if not isinstance(value, str):
        try:
            return [_jsonable(value)], None
        except Exception as error:  # an object of the user's may fail in any way when it is taken apart
            return [], f"a value of type {type(value).__name__} cannot be written as JSON: {_cut(str(error))}"
    text = _unfenced(value)
    readings: list[Any] = []
    obstacle: str | None = None
    try:
        with _deep_recursion():
            readings.append(json.loads(text, parse_constant=_no_constant))
    except (ValueError, RecursionError) as error:
        obstacle = f"the text is no JSON: {_cut(str(error))}"
        literal = _literal(text)
        if literal:
            readings += literal
            obstacle = None
    return [*readings, value], obstacle


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _literal(text: str) -> list[Any]:
    if len(text) > _MAX_LITERAL_CHARS:
        return []
    try:
        return [_jsonable(ast.literal_eval(text.strip()))]
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return []


def _jsonable(value: Any) -> Any:
    with _deep_recursion():
        try:
            return json.loads(json.dumps(value, allow_nan=False))  # NaN and infinities are no JSON
        except TypeError:  # not all of it is plain data
            from pydantic_core import to_jsonable_python

            data = to_jsonable_python(value, by_alias=True, fallback=_plain_data)
            return json.loads(json.dumps(data, allow_nan=False))


def _plain_data(value: Any) -> Any:
    """Arrays and numbers of numerical libraries know how to become plain ones."""
    for name in ("to_dict", "tolist", "item"):
        method = getattr(value, name, None)
        if callable(method):
            return method()
    raise TypeError(f"there is no JSON for a value of type {type(value).__name__}")


def _unfenced(text: str) -> str:
    """Return what is inside the fence, if all of the text is one fenced block."""
    lines = text.strip().splitlines()
    if len(lines) < 2:
        return text
    opening, closing = match_fence(lines[0]), match_fence(lines[-1])
    whole = opening is not None and closing is not None and closing.closes(opening)
    return "\n".join(lines[1:-1]) if whole else text


def _text_of(answer: FinalAnswer) -> str:
    try:
        return answer.text
    except Exception as error:  # the user's own __str__ may fail in any way
        return f"<{type(answer.value).__name__} whose text raised {type(error).__name__}>"


# ---------------------------------------------------------------------------------------------- what the model is told


def describe_form(schema_json: bytes, *, variable: bool) -> str:
    """Tell a model what its answer must look like.

    Args:
        schema_json: the JSON Schema.
        variable: whether the whole schema is in a variable of the namespace.
    """
    text = schema_json.decode()
    where = f" The schema is in the variable `{SCHEMA_VARIABLE}`, too." if variable else ""
    if variable and len(text) > MAX_SHOWN_SCHEMA:
        text = f"{text[:MAX_SHOWN_SCHEMA]}"
        where = f" This is only its beginning: the whole schema is in the variable `{SCHEMA_VARIABLE}`."
    hand_in = (
        "Hand in a Python value of that form, or JSON text: FINAL(value)." if variable else "Reply with that JSON only."
    )
    return (
        f"The answer must fit a JSON schema. {hand_in} It is checked; if it does not fit, you are told why and can "
        f"correct it.{where}\nThe schema:\n{text}"
    )


def why_no_answer(check: AnswerCheck) -> str:
    """Say what was wrong with the last answer of a run that ended without one that fits; empty if there was none."""
    if check.rejected is None:
        return ""
    text, problems = check.rejected
    return f"; the last answer did not fit the schema:\n{_cut(problems, 2000)}\nThat answer was: {_cut(text, 2000)}"


def ask_directly(
    ask: Callable[[Sequence[str]], list[str | Exception]], prompts: Sequence[str], forms: Sequence[AnswerForm | None]
) -> list[Any | Exception]:
    """Ask a model without a REPL, and let it correct an answer that does not fit, `DIRECT_RETRIES` times.

    Args:
        ask: makes one call per prompt, side by side; gives texts, or what went wrong.
        prompts, forms: one per question. Without a form the answer is the text.

    Returns:
        an object, or an exception, per question.
    """
    checks = [None if form is None else AnswerCheck.from_json(form.schema_json) for form in forms]
    full = [
        prompt if form is None else f"{prompt}\n\n{describe_form(form.schema_json, variable=False)}"
        for prompt, form in zip(prompts, forms, strict=True)
    ]
    outcomes: list[Any | Exception] = [None] * len(prompts)
    pending = {position: full[position] for position in range(len(prompts))}
    for _round in range(1 + DIRECT_RETRIES):
        replies = ask(list(pending.values())) if pending else []
        again: dict[int, str] = {}
        for position, reply in zip(pending, replies, strict=True):
            form, check = forms[position], checks[position]
            outcomes[position] = reply
            if form is None or check is None or isinstance(reply, Exception):
                continue
            try:
                outcomes[position] = form.object_of(check.accept(FinalAnswer(reply)).text)
            except (InvalidAnswer, ChildFailedError) as error:
                outcomes[position] = ChildFailedError(
                    f"{1 + DIRECT_RETRIES} direct model calls gave no answer that fits the schema. {_cut(str(error), 2000)} "
                    f"The last answer was: {_cut(reply, 2000)}"
                )
                again[position] = (
                    f"{full[position]}\n\nYour last answer was:\n{_cut(reply, 8000)}\n\nIt was refused: {error}"
                )
        pending = again
    return outcomes


def _cut(text: str, limit: int = _MAX_VALUE_CHARS) -> str:
    return text if len(text) <= limit else f"{text[: limit - 40]}… ({len(text):,} characters)"
