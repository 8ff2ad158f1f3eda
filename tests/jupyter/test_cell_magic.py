"""``%%rlm``: each iteration is shown as it happens, the answer is the cell's value, and whatever ends a run, nothing is lost."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.async_helpers import get_asyncio_loop
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from rlm_kernel.clients.scripted import ScriptedClient
from rlm_kernel.environment.interpreter import make_shell
from rlm_kernel.errors import ChildCleanupError, ModelCallError
from rlm_kernel.jupyter.cell_magic import parser
from rlm_kernel.jupyter.magics import RLMMagics
from rlm_kernel.jupyter.run_command import RunFailed
from rlm_kernel.jupyter.views.iteration import Answer
from rlm_kernel.loop.trajectory import read_trajectory
from rlm_kernel.session.config import Settings
from rlm_kernel.session.session import RLMSession
from rlm_kernel.values import CleanupReport, Completion, Usage


def block(code: str, words: str = "", tag: str = "repl") -> str:
    return f"{words}\n```{tag}\n{code}\n```\n"


class Publisher(DisplayPublisher):
    """Stands where the shell's own publisher does: there before the run, and again after it."""

    def __init__(self) -> None:
        super().__init__()
        self.bundles: list[dict[str, Any]] = []

    def publish(self, data: dict[str, Any], *_: Any, **__: Any) -> None:
        self.bundles.append(data)


class Notebook:
    """A shell with the magics, a session whose model plays a script, and what was shown."""

    def __init__(self, run_dir: Path) -> None:
        self.shell: Any = make_shell()
        self.publisher = self.shell.display_pub = Publisher()
        self.session = RLMSession(Settings(environ={"RLM_RUN_DIR": str(run_dir)}), self.shell.user_ns)
        self.run_dir = run_dir
        self.shell.register_magics(RLMMagics(self.shell, self.session))

    def model(self, *replies: Any) -> ScriptedClient:
        """Have the model give these replies, one for each call."""
        client = ScriptedClient(list(replies))
        self.session.configure_value("client_factory", ScriptedClient)
        self.session._root_client, self.session._models = client, None
        return client

    @property
    def names(self) -> dict[str, Any]:
        names: dict[str, Any] = self.shell.user_ns
        return names

    def run(self, line: str = "", task: str = "Do it.") -> Any:
        """Run a cell with the magic, as a user does. Returns its value; raises its error."""
        result = self.shell.run_cell(f"%%rlm {line}\n{task}\n")
        result.raise_error()
        return result.result

    @property
    def texts(self) -> list[str]:
        return [bundle["text/plain"] for bundle in self.publisher.bundles]

    @property
    def shown(self) -> str:
        return "\n".join(self.texts)

    @property
    def trajectories(self) -> list[Path]:
        return sorted(self.run_dir.rglob("root-*.jsonl"))


@pytest.fixture(scope="module", autouse=True)
def loop() -> None:
    """IPython keeps the loop in which it awaits for good: it is not to look like a leak of the first test."""
    get_asyncio_loop()


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    made = Notebook(tmp_path)
    try:
        yield made
    finally:
        made.session.shutdown()
        InteractiveShell.clear_instance()


# -- what is shown


def test_an_iteration_is_shown_in_the_order_in_which_it_happens(notebook) -> None:
    notebook.model(
        block("print('six'); 6", "First *this*.") + "Then that." + block("1/0", tag="python") + "After.",
        Completion("Done.\n\nFINAL(42)", Usage(1, 1000, 234)),
    )
    assert notebook.run("--max-iterations 7") == "42"
    wanted = (
        "at most 7 iterations",
        "Iteration 1 of 7",
        "First *this*.",
        "> print('six'); 6",
        "│ six\n    │ 6",
        "Then that.",
        "> 1/0",
        "ZeroDivisionError: division by zero",
        "After.",
        "Iteration 2 of 7 · ",
        "1,234 tokens",
        "Done.",
        "answered · 2 iterations",
        "trajectory: ",
    )
    position = 0
    for words in wanted:
        assert words in notebook.shown[position:], (words, notebook.shown)
        position = notebook.shown.index(words, position) + len(words)


def test_each_part_is_shown_when_it_happens_and_is_in_the_trajectory_by_then(notebook) -> None:
    """The model looks at what a person has seen, and at what would be left if all were killed now."""
    seen: list[tuple[str, int]] = []

    def look(messages: Any) -> str:
        seen.append((notebook.shown, len(read_trajectory(notebook.trajectories[0]))))
        return block(f"print('output {len(seen)}')", f"words {len(seen)}") if len(seen) < 3 else "FINAL(x)"

    notebook.model(look, look, look)
    notebook.run()
    assert [lines for _, lines in seen] == [1, 2, 3]  # the first line is about the run
    assert ["│ output 1" in shown for shown, _ in seen] == [False, True, True]
    assert ["words 2" in shown for shown, _ in seen] == [False, False, True]


def test_code_that_runs_is_shown_once_and_other_code_stays_in_the_words(notebook) -> None:
    notebook.model("See:\n```json\n{}\n```\n" + block("marker = 1") + "\n```sh\nls\n```", "FINAL(x)")
    notebook.run()
    markdown = "\n".join(bundle.get("text/markdown", "") for bundle in notebook.publisher.bundles)
    assert markdown.count("marker = 1") == 1
    assert "```python\nmarker = 1\n```" in markdown
    assert "```json\n{}\n```" in markdown
    assert "```sh\nls\n```" in markdown


def test_code_that_did_not_run_is_said_not_to_have_run(notebook) -> None:
    notebook.model("nothing yet", block("never = 1", "At last:"))
    with pytest.raises(RunFailed):
        notebook.run("--max-iterations 1")
    assert "this code did not run" in notebook.shown
    assert "never" not in notebook.names


def test_the_answer_is_the_cells_value_and_goes_to_the_name(notebook, capsys) -> None:
    notebook.model(block("FINAL('**bold**\\nsecond line')"))
    value = notebook.run("--into found")
    assert value == "**bold**\nsecond line"
    assert isinstance(value, Answer)
    assert value._repr_mimebundle_()["text/markdown"] == "**bold**\nsecond line"
    assert "**bold**\nsecond line" in capsys.readouterr().out  # as text, not as a literal
    assert type(notebook.names["found"]) is str
    assert notebook.names["found"] == value
    assert notebook.names["_"] == value
    assert "the answer is in: found" in notebook.shown


@pytest.mark.parametrize("answer", ["0", "''", "False", "None"])
def test_a_falsy_answer_is_an_answer(notebook, answer) -> None:
    notebook.model(block(f"FINAL({answer})"))
    assert notebook.run("--into found") == notebook.names["found"] == str(eval(answer))


def test_output_is_cut_visibly_and_kept_in_the_trajectory(notebook) -> None:
    notebook.model(block("print('a' + 'x' * 60_000 + 'z')"), "FINAL(x)")
    notebook.run()
    [text] = [text for text in notebook.texts if "xxxx" in text]
    assert len(text) < 10_000
    assert "60,003 characters in all" in text
    assert "trajectory" in text
    [_, first, *_] = read_trajectory(notebook.trajectories[0])
    assert len(first["code_blocks"][0]["result"]["stdout"]) == 60_003


def test_an_empty_reply_and_reasoning_are_said_to_be_that(notebook) -> None:
    notebook.model("<think>secret plans</think>", "<think>more</think>FINAL(x)")
    notebook.run()
    assert "the reply is empty" in notebook.shown
    assert "characters of reasoning are not shown" in notebook.shown
    assert "secret plans" not in notebook.shown
    assert "no code ran" in notebook.shown


# -- the code


def test_code_of_the_model_runs_as_in_any_cell_and_what_it_shows_is_text(notebook) -> None:
    code = [
        "import asyncio\nawait asyncio.sleep(0)\nprint('awaited')",
        "%who_ls",
        "!echo from the shell",
        "from IPython.display import HTML, display\ndisplay(HTML('<b>rich</b>'))",
        "'the value'",
    ]
    client = notebook.model("".join(map(block, code)), "FINAL(x)")
    notebook.run()
    told = client.calls[1][0][-1]["content"]
    for words in ("awaited", "asyncio", "from the shell", "IPython.core.display.HTML object", "'the value'"):
        assert words in notebook.shown
        assert words in told
    assert not any("<b>rich" in str(bundle) for bundle in notebook.publisher.bundles if "text/markdown" not in bundle)


def test_names_that_were_bound_rebound_and_removed_are_listed_and_ours_are_put_back(notebook) -> None:
    notebook.names.update(kept=1, table=[1], gone=2, context="mine")
    before = {name: notebook.names[name] for name in ("answer", "context", "rlm_query", "FINAL")}
    notebook.model(
        block("seen = context\nnew = 1; table = [2]; kept = 1; del gone; _private = 3\ncontext = 4; answer = 5"),
        block("rlm_query = None\nFINAL(seen)"),
    )
    assert notebook.run("--context 'text' --context \"[1, 2]\"") == "[1, 2]"
    assert {name: notebook.names[name] for name in before} == before
    assert "bound: seen, new\nrebound: table\nremoved: gone\n" in notebook.shown
    assert notebook.session.final_answer is None


def test_code_that_counts_in_an_underscore_does_not_keep_the_answer_from_it(notebook) -> None:
    notebook.model(block("for _ in range(3): pass\nFINAL('yes')"))
    notebook.run()
    assert notebook.names["_"] == "yes"


def test_a_run_within_a_run_is_refused_and_the_outer_one_goes_on(notebook) -> None:
    client = notebook.model(block("get_ipython().run_cell_magic('rlm', '', 'inner')"), "FINAL(outer)", "FINAL(again)")
    assert notebook.run() == "outer"
    assert "under way" in client.calls[1][0][-1]["content"]
    assert "rlm_query(...)" in notebook.shown
    assert notebook.run() == "again"


def test_waits_of_the_run_show_no_table_of_their_own_and_later_ones_do(notebook) -> None:
    asked: list[object] = []

    @contextlib.contextmanager
    def table(refs: object) -> Iterator[None]:
        asked.append(refs)
        yield

    notebook.session.watch = table
    notebook.names["waits"] = lambda: notebook.session.watch([]).__enter__()
    notebook.model(block("waits()"), KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        notebook.run()
    assert asked == []
    notebook.names["waits"]()
    assert asked == [[]]


# -- mistakes


@pytest.mark.parametrize(
    ("line", "task", "words"),
    [
        ("", "  \n ", ["no task"]),
        ("--max-iterations x", "t", ["--max-iterations", "'x'"]),
        ("--max-iterations 0", "t", ["max_iterations", "0"]),
        ("--into 1x", "t", ["--into", "1x"]),
        ("--into class", "t", ["--into", "class"]),
        ("--into context", "t", ["--into", "context"]),
        ("--into rlm_query", "t", ["--into", "rlm_query"]),
        ("--into _", "t", ["--into", "_"]),
        ("--into In", "t", ["--into", "In"]),
        ("--context missing", "t", ["missing", "NameError"]),
        ("--context 1/0", "t", ["1/0", "ZeroDivisionError"]),
        ("--context 'a b'", "t", ["a b", "SyntaxError"]),
        ("--context ''", "t", ["--context"]),
        ("--context texts[", "t", ["]", "texts["]),
        ('--context "x', "t", ['"', "x"]),
        ("--nonsense", "t", ["--nonsense"]),
        ("--max 3", "t", ["--max"]),
        ("what I want", "t", ["what I want", "lines below"]),
        ("--model ''", "t", ["--model"]),
        ("--background --max-iterations 3", "t", ["--max-iterations", "--background"]),
    ],
)
def test_a_mistake_is_one_line_and_nothing_runs(notebook, capsys, line, task, words) -> None:
    client = notebook.model("FINAL(x)")
    before = set(notebook.names)
    with pytest.raises(UsageError) as caught:
        notebook.run(line, task)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert client.calls == []
    assert notebook.texts == []
    assert notebook.trajectories == []
    assert {name for name in set(notebook.names) - before if not name.startswith("_")} == set()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("", "mine"),
        ("--context texts", ["a b", "c"]),
        ("--context texts[0]", "a b"),
        ("--context=texts[ : 1 ]", ["a b"]),
        ("--context max( texts, key = len )", "a b"),
        ("--context table['a b']", 1),
        ('--context "texts + texts"', ["a b", "c"] * 2),
        ("--context '{\"k\": len(texts)}'", {"k": 2}),
        ("--context \"'a text'\"", "a text"),
        ("--context 'a'+'b'", "ab"),
        ("--context {'k':1}['k']", 1),
        ('--context f"{k}{{$k}}"', "3{$k}"),
        ("--context None", None),
    ],
)
def test_the_context_is_an_expression_of_the_notebook(notebook, line, found) -> None:
    notebook.names.update(context="mine", texts=["a b", "c"], table={"a b": 1}, k=3)
    notebook.model(block("seen = context\nFINAL(1)"))
    notebook.run(line)
    assert notebook.names["seen"] == found


def test_without_a_model_it_says_what_to_type(notebook) -> None:
    with pytest.raises(UsageError, match="%rlm model "):
        notebook.run()
    assert notebook.texts == []


def test_locked_limits_hold_for_the_number_of_iterations(notebook) -> None:
    notebook.model("FINAL(x)")
    notebook.session.configure("max_iterations", "3")
    notebook.session.configure("limits_locked", "true")
    with pytest.raises(UsageError, match="locked"):
        notebook.run("--max-iterations 4")
    assert notebook.run("--max-iterations 3") == "x"
    assert notebook.session.settings["max_iterations"] == 3


def test_help_is_printed_and_nothing_runs(notebook, capsys) -> None:
    client = notebook.model("FINAL(x)")
    assert notebook.run("--help") is None
    printed = capsys.readouterr().out
    for action in parser._actions:
        assert action.option_strings[-1] in printed
    assert client.calls == []


# -- how it can end


def one_line_of(notebook: Notebook, error: BaseException, capsys: Any) -> str:
    """Return what IPython showed of an error, which must be one line."""
    printed: str = capsys.readouterr().out.strip()
    assert printed.splitlines()[-1].startswith(f"{type(error).__name__}: ")
    assert "Traceback" not in printed
    return printed.splitlines()[-1]


def test_a_failed_model_call_is_one_line_and_what_was_done_stays(notebook, capsys) -> None:
    def refuse(_messages: Any) -> str:
        raise ModelCallError("401: the key is wrong")

    notebook.names["context"] = "mine"
    notebook.model(block("found = 7"), refuse)
    with pytest.raises(ModelCallError) as caught:
        notebook.run("--into result")
    assert one_line_of(notebook, caught.value, capsys) == "ModelCallError: 401: the key is wrong"
    assert "broken off after 1 iteration" in notebook.shown
    assert "bound so far: found" in notebook.shown
    assert notebook.names["found"] == 7
    assert notebook.names["context"] == "mine"
    assert "result" not in notebook.names
    lines = read_trajectory(notebook.trajectories[0])
    assert [line["type"] for line in lines] == ["metadata", "iteration", "iteration", "end"]


def test_an_unexpected_error_says_where_it_was_raised(notebook, capsys) -> None:
    def broken(_messages: Any) -> str:
        raise RuntimeError("a fault in the client")

    notebook.model(broken)
    with pytest.raises(RuntimeError) as caught:
        notebook.run()
    line = one_line_of(notebook, caught.value, capsys)
    assert "a fault in the client" in line
    assert "test_cell_magic.py" in line


@pytest.mark.parametrize("place", ["model", "code"])
def test_an_interrupt_keeps_what_was_done(notebook, capsys, place) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    code = "print('so far'); late = 1\nraise KeyboardInterrupt"
    notebook.names["context"] = "mine"
    notebook.model(block("found = 7"), interrupted if place == "model" else block(code), "FINAL(never)")
    before = {name: notebook.names[name] for name in ("answer", "context", "rlm_query")}
    with pytest.raises(KeyboardInterrupt) as caught:
        notebook.run()
    assert "Traceback" not in capsys.readouterr().out
    assert caught.value._render_traceback_() == ["KeyboardInterrupt"]  # type: ignore[attr-defined]
    assert "interrupted after 1 iteration" in notebook.texts[-1]
    assert "bound so far: found" in notebook.texts[-1]
    assert str(notebook.trajectories[0]) in notebook.texts[-1]
    assert ("│ so far" in notebook.shown) == (place == "code")
    assert notebook.names["found"] == 7
    assert ("late" in notebook.names) == (place != "model")
    assert {name: notebook.names[name] for name in before} == before
    assert [line["type"] for line in read_trajectory(notebook.trajectories[0])][-3:] == [
        "iteration",
        "iteration",
        "end",
    ]
    notebook.model("FINAL(again)")
    assert notebook.run() == "again"


def test_a_run_without_an_answer_fails_and_says_what_to_do(notebook) -> None:
    notebook.model(block("x = 1"), "FINAL_VAR(nothing)", "")
    with pytest.raises(RunFailed, match="--max-iterations 4"):
        notebook.run("--max-iterations 2 --into result")
    assert "no answer" in notebook.texts[-1]
    assert "result" not in notebook.names
    assert "bound: x" in notebook.texts[-1]


def test_an_answer_that_nobody_marked_as_one_is_said_to_be_that(notebook) -> None:
    notebook.model("perhaps seven", "seven")
    assert notebook.run("--max-iterations 1") == "seven"
    assert "the last reply" in notebook.texts[-1]


def test_with_a_failed_cleanup_the_answer_is_kept_and_the_error_is_one_line(notebook, monkeypatch, capsys) -> None:
    report = CleanupReport("run", survivors=(4194000,))

    def fail(verb: Callable[[], CleanupReport]) -> CleanupReport:
        monkeypatch.undo()
        monkeypatch.setattr(notebook.session.supervisor, "stop", lambda *_: report)
        return notebook.session.lifecycle.run_for("run", ["c1"])

    notebook.model(block("FINAL('the answer')"), "FINAL(x)")
    monkeypatch.setattr("rlm_kernel.jupyter.cell_magic.run_off_thread", lambda verb: verb)
    monkeypatch.setattr("rlm_kernel.jupyter.cell_magic.wait_here", lambda verb, _hasten: fail(verb))
    with pytest.raises(ChildCleanupError) as caught:
        notebook.run("--into found")
    assert "4194000" in one_line_of(notebook, caught.value, capsys)
    assert notebook.names["found"] == "the answer"
    assert "could not be stopped" in notebook.texts[-1]
    shown = len(notebook.texts)
    with pytest.raises(ChildCleanupError):
        notebook.run()
    assert len(notebook.texts) == shown  # nothing was run
    monkeypatch.undo()
    notebook.session.lifecycle.abandon()


def test_the_model_that_is_named_makes_the_calls_and_is_shown(notebook) -> None:
    client = notebook.model("FINAL(x)")
    notebook.run("--model other/one")
    assert client.calls[0][1] == "other/one"
    assert "other/one" in notebook.shown
    assert read_trajectory(notebook.trajectories[0])[0]["root_model"] == "other/one"


# -- hostile texts


def test_hostile_words_are_shown_and_do_nothing(notebook) -> None:
    hostile = "<script>alert(1)</script> \ud800 \x1b[31mred\x1b[0m \x00 <img src=x onerror=alert(2)>"
    notebook.model(
        hostile + block(f"print({hostile!r})\nraise ValueError({hostile!r})", hostile),
        "w" * 1_000_000 + block("FINAL('<script>alert(3)</script>\\ud800')"),
    )
    value = notebook.run()
    bundles = [*notebook.publisher.bundles, value._repr_mimebundle_()]
    json.dumps(bundles).encode()
    for bundle in bundles:
        assert len(str(bundle)) < 100_000
        assert "<script" not in bundle.get("text/html", "")
        assert "<img" not in bundle.get("text/html", "")
        assert "\x1b" not in str(bundle.values())
        for text in bundle.values():
            text.encode()
    assert "characters left out" in notebook.shown
    assert "<script>alert(1)</script>" in notebook.shown
