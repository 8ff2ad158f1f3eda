"""Promises of `rlm_kernel.export` and `rlm_kernel.stored_runs`: which run is meant, and what the file holds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import nbformat
import pytest

from rlm_kernel import cli
from rlm_kernel.errors import ConfigurationError
from rlm_kernel.export import export_run
from rlm_kernel.loop.parsing import parse_blocks, runnable_blocks
from rlm_kernel.loop.trajectory import BlockRecord, IterationRecord, RunMetadata, TrajectoryWriter, read_trajectory
from rlm_kernel.stored_runs import find_run, read_run
from rlm_kernel.values import CodeResult, FinalAnswer, Usage

SECRET = "sk-verysecretkey"


def episode(root: Path, name: str = "20250101-000000-aaaa", **content: Any) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"pid": 2**22 + 5, "host": os.uname().nodename, **content}))
    return folder


def turn(number: int, response: str, *results: CodeResult, final: Any = None, **more: Any) -> IterationRecord:
    blocks = tuple(BlockRecord(b.code, r) for b, r in zip(runnable_blocks(response), results, strict=False))
    answer = None if final is None else FinalAnswer(final)
    return IterationRecord(number, (), response, blocks, answer, Usage(1, 2, 3), started_at=1.0, **more)


def write(
    folder: Path,
    run_id: str,
    *turns: IterationRecord,
    end: str | None = "final",
    task: str = "the task",
    **metadata: Any,
) -> None:
    described = {"root_model": "demo", "run_id": run_id, "episode_id": "aaaa", "context": {"is_task": True}, **metadata}
    with TrajectoryWriter(folder / f"{run_id}.jsonl", metadata=RunMetadata(task=task, **described)) as writer:
        writer.write_metadata()
        for each in turns:
            writer.write_iteration(each)
        if end is not None:
            writer.write_end(stop_reason=end, final=turns[-1].final if turns else None, usage=Usage(1, 2, 3))


def notebook(folder: Path, run_id: str, tmp_path: Path, **options: Any) -> Any:
    out = tmp_path / "out.ipynb"
    export_run(read_run(folder, run_id), str(out), force=True, **options)
    read = nbformat.read(out, as_version=4)
    nbformat.validate(read)
    return read


def sources(notebook: Any, kind: str) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


# -- what a notebook holds


def test_a_notebook_holds_task_words_code_outputs_lineage_and_usage(tmp_path: Path) -> None:
    folder = episode(tmp_path)
    reply = "First I look.\n```repl\nprint(1)\n```\nThen:\n```python\n1 / 0\n```\nand\n```bash\nls\n```\nDone."
    results = (
        CodeResult("1\n", "warned\n"),
        CodeResult("", "Traceback\nZeroDivisionError: x", success=False, exception="ZeroDivisionError: x"),
    )
    write(
        folder,
        "c7",
        turn(1, reply, *results),
        turn(2, "```repl\nFINAL('a')\n```", CodeResult("'FINAL(a)'"), final="a"),
        parent_id="c1",
        depth=2,
        max_depth=4,
    )
    read = notebook(folder, "c7", tmp_path)
    assert read.metadata.kernelspec.name == "rlm"
    facts = read.metadata.rlm
    assert [facts[name] for name in ("run_id", "parent_id", "episode_id", "depth", "stop_reason", "final_answer")] == [
        "c7",
        "c1",
        "aaaa",
        2,
        "final",
        "a",
    ]
    assert facts.usage == {"calls": 1, "prompt_tokens": 2, "completion_tokens": 3}
    code = [cell for cell in read.cells if cell.cell_type == "code"]
    assert [cell.source for cell in code][2:] == ["print(1)", "1 / 0", "FINAL('a')"]
    assert "%rlm config max_depth=2" in code[0].source.splitlines()
    assert code[1].source == "context = 'the task'"
    assert [(o.output_type, o.get("name")) for o in code[2].outputs] == [("stream", "stdout"), ("stream", "stderr")]
    (error,) = code[3].outputs
    assert (error.ename, error.evalue, error.traceback) == (
        "ZeroDivisionError",
        "x",
        ["Traceback", "ZeroDivisionError: x"],
    )
    assert code[3].metadata.tags == ["raises-exception"]
    assert "tags" not in code[2].metadata
    assert code[2].metadata.rlm.iteration == 1
    words = "\n".join(sources(read, "markdown"))
    for part in ("the task", "First I look.", "Then:", "```bash\nls\n```", "Done.", "The answer:", "2 + 3 tokens"):
        assert part in words


@pytest.mark.parametrize(
    ("response", "printed", "answer", "cell"),
    [
        ("FINAL(it is 5)", None, "it is 5", "FINAL('it is 5')"),
        ("FINAL_VAR(x)", None, "5", "FINAL_VAR('x')"),
        ("It is 5, I think", None, "It is 5, I think", "FINAL('It is 5, I think')"),
        ("```repl\nprint('FINAL(5)')\n```", "FINAL(5)\n", "5", "FINAL('5')"),
        ("```repl\nprint(FINAL(5))\n```", "FINAL(5)\n", "5", None),
        ("```repl\n%time FINAL(5)\n```", "", "5", None),
    ],
)
def test_an_answer_that_was_given_as_text_is_a_cell(
    tmp_path: Path, response: str, printed: str | None, answer: str, cell: str | None
) -> None:
    folder = episode(tmp_path)
    write(folder, "c1", turn(1, response, *([] if printed is None else [CodeResult(printed)]), final=answer))
    last = sources(notebook(folder, "c1", tmp_path), "code")[-1]
    if cell is None:
        assert "gave as text" not in last
    else:
        assert last == f"# The answer, which the run gave as text\n{cell}"


@pytest.mark.parametrize(
    "text", ["a\nb'\"\\n\n" * 30 + "end", "x" * 500, "\r\n\x0c\u2028" * 50, "\udc80 lone", "", "a\n" * 5000]
)
def test_a_context_comes_back_exactly(tmp_path: Path, text: str) -> None:
    from rlm_kernel.loop.prompts import QueryMetadata
    from rlm_kernel.session.kept_contexts import describe_kept

    folder = episode(tmp_path)
    for context in (text, {"docs": [text, 1, None, True]}):
        kept = describe_kept(context, QueryMetadata.of(context), folder, ())
        write(folder, "c1", turn(1, "FINAL(1)", final=1), context=kept, depth=1)
        namespace: dict[str, Any] = {}
        exec(sources(notebook(folder, "c1", tmp_path), "code")[1], namespace)
        assert namespace["context"] == context
        assert namespace["task"] == "the task"
        (folder / "c1.jsonl").unlink()


def test_a_context_that_was_not_kept_is_asked_for(tmp_path: Path) -> None:
    folder = episode(tmp_path)
    write(folder, "c1", turn(1, "FINAL(1)", final=1), context={"type": "DataFrame", "length": 12, "file": None})
    with pytest.raises(LookupError, match="DataFrame, 12 characters"):
        exec(sources(notebook(folder, "c1", tmp_path), "code")[1], {})


@pytest.mark.parametrize(
    "context",
    [object(), b"bytes", {1: "a"}, (1,), ["x" * (1 << 20), "y"], [float("nan")]],
    ids=lambda c: type(c).__name__,
)
def test_only_small_contexts_of_text_or_plain_data_are_kept(tmp_path: Path, context: Any) -> None:
    from rlm_kernel.loop.prompts import QueryMetadata
    from rlm_kernel.session.kept_contexts import describe_kept

    kept = describe_kept(context, QueryMetadata.of(context), tmp_path, ())
    assert kept["file"] is None
    assert kept["type"]
    assert list(tmp_path.iterdir()) == []


def test_runs_with_one_context_share_one_file_and_a_full_disk_harms_nobody(tmp_path: Path) -> None:
    from rlm_kernel.loop.prompts import QueryMetadata
    from rlm_kernel.session.kept_contexts import describe_kept

    one, two = (describe_kept("text", QueryMetadata.of("text"), tmp_path, ()) for _ in range(2))
    assert one == two
    assert len(list(tmp_path.iterdir())) == 1
    assert describe_kept("text", QueryMetadata.of("text"), tmp_path / "gone", ())["file"] is None


def test_no_markup_of_a_model_is_markup_of_the_notebook(tmp_path: Path) -> None:
    folder = episode(tmp_path)
    evil = "<script>alert(1)</script> `<b>`\n```html\n<i></script>\n```\n\x1b[31m"
    write(folder, "c1", turn(1, evil), task="```\n<script>alert(2)</script>", end="no_answer")
    for cell in sources(notebook(folder, "c1", tmp_path), "markdown"):
        lines = cell.split("\n")
        for block in parse_blocks(cell):
            assert block.closed
            lines[block.line - 1 : block.end] = [""] * (block.end - block.line + 1)
        assert "<" not in "\n".join(lines)
        assert "\x1b" not in cell


def test_exit_in_code_does_not_end_the_kernel_that_runs_it_again(tmp_path: Path) -> None:
    folder = episode(tmp_path)
    write(folder, "c1", turn(1, "```repl\nexit()\n```", CodeResult("no\n")))
    assert "exit = quit = " in sources(notebook(folder, "c1", tmp_path), "code")[0]


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("demo", "%rlm model demo"),
        ("openai/gpt-5-mini", "%rlm model openai/gpt-5-mini"),
        ("make_client", "# %rlm model provider/model (the run used make_client)"),
        (None, "# %rlm model provider/model"),
    ],
)
def test_the_model_of_the_run_is_set_where_it_has_a_name(tmp_path: Path, model: str | None, line: str) -> None:
    folder = episode(tmp_path)
    write(folder, "c1", turn(1, "x"), root_model=model)
    assert line in sources(notebook(folder, "c1", tmp_path), "code")[0].splitlines()


def test_secrets_and_lone_surrogates_are_in_no_exported_file(tmp_path: Path) -> None:
    """Also those that the run itself did not know: another key may be set by now."""
    folder = episode(tmp_path)
    result = CodeResult(f"{SECRET}\n", f"{SECRET} \udc80", exception=f"E: {SECRET}", success=False)
    reply = f"\udc80 {SECRET}\n```repl\nx = {SECRET!r}\n```"
    write(
        folder,
        "c1",
        turn(1, reply, result, error=SECRET),
        turn(2, f"FINAL({SECRET})", final=SECRET),
        task=f"use {SECRET}",
        answer_schema=json.dumps({"const": SECRET}),
    )
    for name in ("o.ipynb", "o.jsonl"):
        path = export_run(read_run(folder, "c1"), str(tmp_path / name), secrets=(SECRET,))
        text = path.read_text("utf-8")
        assert SECRET not in text
        assert "[redacted]" in text


def test_a_tree_shows_descendants_as_text_below_the_run(tmp_path: Path) -> None:
    folder = episode(tmp_path, root_runs=[{"id": "root-1", "children": ["c2"]}])
    write(folder, "root-1", turn(1, "```repl\nFINAL(1)\n```", CodeResult(), final=1))
    write(folder, "c1", turn(1, "of somebody else"), depth=1)
    write(folder, "c2", turn(1, "I am two\n```repl\nprint('two')\n```", CodeResult("two out")), depth=1)
    write(folder, "c3", turn(1, "I am three"), parent_id="c2", depth=2)
    assert [run.run_id for run in read_run(folder, "root-1").descendants()] == ["c2", "c3"]
    plain, tree = notebook(folder, "root-1", tmp_path), notebook(folder, "root-1", tmp_path, tree=True)
    assert sources(plain, "code") == sources(tree, "code")
    shown = "\n".join(sources(tree, "markdown"))
    assert all(
        part in shown for part in ("# Child c2", "I am two", "print('two')", "two out", "# Child c3", "I am three")
    )
    assert "somebody else" not in shown


# -- how it stands with a run


def test_a_killed_run_exports_what_it_has_and_says_so(tmp_path: Path) -> None:
    folder = episode(tmp_path, children=[{"id": "c1", "state": "failed", "error": "killed by signal 9"}])
    write(folder, "c1", turn(1, "one"), end=None)
    with open(folder / "c1.jsonl", "ab") as file:
        file.write('{"type": "iteration", "response": "tor€'.encode()[:-1])
    run = read_run(folder, "c1")
    assert (run.state, run.error, run.is_over) == ("failed", "killed by signal 9", True)
    assert "killed by signal 9" in sources(notebook(folder, "c1", tmp_path), "markdown")[-1]
    path = export_run(run, str(tmp_path / "o.jsonl"))
    assert [line["type"] for line in read_trajectory(path)] == ["metadata", "iteration", "end"]
    assert read_trajectory(path)[-1]["stop_reason"] == "failed"


def test_a_run_whose_kernel_died_is_said_to_be_killed_and_one_that_runs_is_left_open(tmp_path: Path) -> None:
    dead, alive = episode(tmp_path), episode(tmp_path, "20250102-000000-bbbb", pid=os.getpid())
    for folder in (dead, alive):
        write(folder, "c1", turn(1, "one"), end=None)
    assert read_run(dead, "c1").state == "killed (its kernel has ended)"
    assert read_run(alive, "c1").state == "running"
    path = export_run(read_run(alive, "c1"), str(tmp_path / "o.jsonl"))
    assert [line["type"] for line in read_trajectory(path)] == ["metadata", "iteration"]
    assert notebook(alive, "c1", tmp_path).metadata.rlm.state == "running"


def test_a_file_that_holds_nothing_readable_still_exports(tmp_path: Path) -> None:
    folder = episode(tmp_path)
    (folder / "run.json").write_text("{")
    (folder / "c1.jsonl").write_bytes(b"\xff garbage\n[1]\n")
    assert notebook(folder, "c1", tmp_path).metadata.rlm.run_id == "c1"


# -- which run is meant


def test_runs_are_found_by_id_episode_and_both(tmp_path: Path) -> None:
    one, two = episode(tmp_path), episode(tmp_path, "20250102-000000-bbbb", episode_id="given/id")
    for folder, run_id in ((one, "c1"), (one, "root-1"), (one, "root-2"), (two, "c1"), (two, "c9")):
        write(folder, run_id, turn(1, "x"))
    os.utime(one / "root-1.jsonl", (9e9, 9e9))

    def found(wanted: str, **options: Any) -> tuple[Path, str]:
        run = find_run(tmp_path, wanted, **options)
        return run.folder, run.run_id

    assert found("c9") == (two, "c9")
    assert found("root") == found("aaaa") == found(one.name) == (one, "root-1")
    assert found("root-2") == found("aa/root-2") == (one, "root-2")
    assert found("bbbb/c1") == found("given/id/c1") == (two, "c1")
    assert found("c1", current=one) == (one, "c1")
    for wanted, parts in {
        "c1": ["fits 2 runs", "bbbb/c1, aaaa/c1"],
        "bbbb": ["fits 2 runs", "bbbb/c1, bbbb/c9"],
        "c5": ["there is no such run", "bbbb/c1", "aaaa/root-1"],
        "../x": ["there is no such run"],
        "": ["there is no such run"],
    }.items():
        with pytest.raises(ConfigurationError) as caught:
            find_run(tmp_path, wanted)
        assert [part for part in [f"ID={wanted!r}", *parts] if part not in str(caught.value)] == []
    with pytest.raises(ConfigurationError, match="none at all"):
        find_run(tmp_path / "nothing", "c1")


# -- where it goes


def test_nothing_is_overwritten_unless_forced_and_mistakes_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = episode(tmp_path)
    write(folder, "c1", turn(1, "x"))
    run = read_run(folder, "c1")
    out = tmp_path / "deep" / "er" / "o.ipynb"
    assert export_run(run, str(out)) == out
    out.write_text("mine")
    with pytest.raises(ConfigurationError, match=r"OUT=.*exists already; add --force"):
        export_run(run, str(out))
    assert out.read_text() == "mine"
    export_run(run, str(out), force=True)
    assert out.read_text() != "mine"
    assert [path.name for path in out.parent.iterdir()] == ["o.ipynb"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert export_run(run, "~/deep").name == "aaaa-c1.ipynb"
    for name, part in (("o.txt", r"\.ipynb or \.jsonl"), ("x.ipynb/y.ipynb", "cannot be written")):
        (tmp_path / "x.ipynb").touch()
        with pytest.raises(ConfigurationError, match=part):
            export_run(run, str(tmp_path / name))
    with pytest.raises(ConfigurationError, match="--tree"):
        export_run(run, "o.jsonl", tree=True)


def test_the_command_exports_runs_of_earlier_kernels(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    write(episode(tmp_path / "runs"), "c1", turn(1, "x"))
    monkeypatch.setenv("RLM_RUN_DIR", str(tmp_path / "runs"))
    out = tmp_path / "o.ipynb"
    assert cli.main(["export", "c1", str(out)]) == 0
    assert out.exists()
    assert f"c1 of episode aaaa (final): {out}" in capsys.readouterr().out
    assert cli.main(["export", "c2", str(out)]) == 1
    assert "ID='c2': there is no such run" in capsys.readouterr().err
