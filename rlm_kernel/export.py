"""Turn a run into a notebook that opens anywhere and runs again under the ``rlm`` kernel, or into a trajectory by itself.

The notebook begins with cells that put back what the run's code found: limits, model, ``context``. Its code cells are the
blocks that the run ran, with what came of them. An answer that was given as text and not by code becomes a cell as well.
What the run's code started (children, model calls) is started again by running it; descendants are therefore shown as
text, if they are wanted at all.

Nothing secret goes into the file: what the environment's secret-looking variables hold is replaced, as in the
trajectories. Reads the run's folder, writes the one file, and knows no Jupyter but the notebook format.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlm_kernel._version import __version__
from rlm_kernel.errors import ConfigurationError
from rlm_kernel.final_text import FinalCall, find_final, find_final_in_reply
from rlm_kernel.loop.parsing import parse_blocks, strip_reasoning
from rlm_kernel.session.kept_contexts import read_kept
from rlm_kernel.session.rundir import redacted, write_whole
from rlm_kernel.session.structured import load_validator
from rlm_kernel.stored_runs import StoredRun

FORMATS = (".ipynb", ".jsonl")

_LONGEST_LINE_LIST = 2_000
"""Lines up to which a text is written as one literal per line, which is pleasant to read; beyond that as a single one."""

_EXITS = re.compile(r"\b(?:exit|quit)\b")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def export_run(
    run: StoredRun, out: str, *, force: bool = False, tree: bool = False, secrets: Sequence[str] = ()
) -> Path:
    """Write a run to a file.

    Args:
        run: the run.
        out: the file; its ending decides: ``.ipynb`` or ``.jsonl``. In an existing directory the file is named after the
            run. Missing directories are made.
        force: replace a file that exists.
        tree: also show the run's descendants (in a notebook).
        secrets: strings that are replaced.

    Returns:
        the file.

    Raises:
        ConfigurationError: the file's name has another ending, exists already, or cannot be written.
    """
    target = Path(out).expanduser()
    if target.is_dir():
        target = target / f"{run.folder.name.rpartition('-')[2]}-{run.run_id}.ipynb"
    if target.suffix not in FORMATS:
        raise ConfigurationError("OUT", out, f"must end in {' or '.join(FORMATS)}, or be a directory")
    if tree and target.suffix != ".ipynb":
        raise ConfigurationError(
            "--tree", out, "a trajectory is one run's; export to .ipynb, or export each run by itself"
        )
    if target.suffix == ".jsonl":
        text = "".join(f"{json.dumps(line)}\n" for line in redacted(_complete_lines(run), tuple(secrets)))
    else:
        text = notebook_text(run, tree=tree, secrets=secrets)
    _write(target, text.encode("utf-8", "backslashreplace"), force=force)
    return target


def notebook_text(run: StoredRun, *, tree: bool = False, secrets: Sequence[str] = ()) -> str:
    """Return a run as the text of a notebook."""
    load_validator()  # before nbformat does it, in its own, slower way
    import nbformat

    notebook = _Builder(run, tuple(secrets)).build(tree=tree)
    nbformat.validate(notebook)
    text: str = nbformat.writes(notebook)
    return f"{text}\n"


def _complete_lines(run: StoredRun) -> list[dict[str, Any]]:
    """Return the trajectory, with the end that its own process could not write."""
    lines = list(run.lines)
    if run.end is None and run.is_over:
        lines.append(
            {
                "type": "end",
                "run_id": run.run_id,
                "stop_reason": run.state,
                "final_answer": run.final_answer,
                "iterations": len(run.iterations),
                "usage": run.usage,
                "error": run.error,
            }
        )
    return lines


def _write(target: Path, data: bytes, *, force: bool) -> None:
    """Write a file under another name and put it in its place, so that it is whole or not there."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not force:
            raise ConfigurationError("OUT", str(target), "exists already; add --force to replace it")
        write_whole(target, data, 0o666)
    except OSError as error:
        raise ConfigurationError("OUT", str(target), f"cannot be written: {error.strerror}") from error


class _Builder:
    """Builds one notebook.

    Args:
        run: the run.
        secrets: strings that are replaced.
    """

    def __init__(self, run: StoredRun, secrets: tuple[str, ...]) -> None:
        self._run = run
        self._secrets = secrets
        self._cells: list[Any] = []
        self._count = 0

    def build(self, *, tree: bool) -> Any:
        from nbformat import v4

        run = self._run
        self._markdown(f"# RLM run {run.run_id}\n\n{self._overview(run)}")
        self._set_up()
        for line in redacted(run.iterations, self._secrets):
            self._turn(line)
        self._markdown(_end_of(run, self._secrets))
        if tree:
            for below in run.descendants():
                self._show(below)
        metadata = {
            "kernelspec": {"name": "rlm", "display_name": "Python 3 (RLM)", "language": "python"},
            "language_info": {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"},
            "rlm": self._clean(_facts(run)),
        }
        return v4.new_notebook(cells=self._cells, metadata=metadata)

    # -- what goes before the run

    def _overview(self, run: StoredRun) -> str:
        facts = _facts(run)
        usage = run.usage
        rows = [
            ("episode", facts["episode_id"]),
            ("parent", run.parent_id or ("none" if run.depth == 0 else "the notebook")),
            ("depth", run.depth),
            ("model", facts["model"] or "-"),
            ("started", facts["started"] or "-"),
            ("ended", run.state),
            ("iterations", len(run.iterations)),
            ("usage", f"{usage['calls']} calls, {usage['prompt_tokens']} + {usage['completion_tokens']} tokens"),
        ]
        table = "\n".join(f"| {name} | {_cell_text(self._clean(str(value)))} |" for name, value in rows)
        return f"The task:\n\n{_fenced(self._clean(_task(run)))}\n\n| | |\n|---|---|\n{table}"

    def _set_up(self) -> None:
        metadata = self._run.metadata
        lines = ["# Set-up: puts back what the code of the run found. Runs under the kernel `rlm`.", "%rlm reset"]
        model = str(metadata.get("root_model") or "")
        if model == "demo" or re.fullmatch(r"[\w.-]+/[\w./:@+-]+", model):
            lines.append(f"%rlm model {model}")
        else:
            named = f" (the run used {self._clean(model)})" if model else ""
            lines.append(f"# %rlm model provider/model{' '.join(named.splitlines())}")
        max_depth = metadata.get("max_depth")
        if isinstance(max_depth, int):
            lines.append(f"%rlm config max_depth={max(1, max_depth - self._run.depth)}")
        if any(_EXITS.search(str(block.get("code"))) for line in self._run.iterations for block in _blocks(line)):
            lines.append("exit = quit = lambda *_: print('exit() did not end the run')  # nor shall it end this kernel")
        self._code("\n".join(lines))
        self._code("\n".join(self._context_lines(metadata)))

    def _context_lines(self, metadata: dict[str, Any]) -> list[str]:
        described = metadata.get("context")
        described = described if isinstance(described, dict) else {}
        task = redacted(_task(self._run), self._secrets)
        lines = []
        if described.get("is_task"):
            lines.append(f"context = {_literal(task)}")
        else:
            lines += self._kept(described)
            if self._run.depth > 0:
                lines.append(f"task = {_literal(task)}")
        schema = metadata.get("answer_schema")
        if isinstance(schema, str):
            lines += ["import json", f"answer_schema = json.loads({_literal(redacted(schema, self._secrets))})"]
        return lines

    def _kept(self, described: dict[str, Any]) -> list[str]:
        try:
            context = redacted(read_kept(self._run.folder, described), self._secrets)
        except LookupError:
            what = f"{described.get('type', 'unknown type')}, {described.get('length', '?')} characters or bytes"
            return [
                "# The context of the run was not kept: it was too large, or no text. Load it here.",
                f"raise LookupError({f'put the context of the run ({self._clean(what)}) into `context` in this cell'!r})",
            ]
        if isinstance(context, str):
            return [f"context = {_literal(context)}"]
        return ["import json", f"context = json.loads({_literal(json.dumps(context, indent=1, ensure_ascii=False))})"]

    # -- the run

    def _turn(self, line: dict[str, Any]) -> None:
        number = "The last chance" if line.get("last_chance") else f"Turn {line.get('iteration')}"
        response = str(line.get("response") or "")
        reply = strip_reasoning(response)
        words = _prose(response.removesuffix(reply)) if response != reply else ""
        heading = f"## {number}\n\n"
        ran = _blocks(line)
        for kind, text in _segments(reply):
            if kind == "code" and ran and ran[0].get("code") == text:
                self._markdown(f"{heading}{words}")
                heading, words = "", ""
                self._block(ran.pop(0), line)
            elif kind == "code":
                words += f"\n\nNot run:\n\n{_fenced(text, 'python')}\n\n"
            else:
                words += text
        if line.get("error"):
            words += f"\n\nBroken off: {_prose(str(line['error']))}"
        self._markdown(f"{heading}{words}")
        for block in ran:
            self._block(block, line)
        self._answer_as_text(reply, line)

    def _block(self, block: dict[str, Any], line: dict[str, Any]) -> None:
        result = block.get("result") or {}
        failed = result.get("success") is False
        facts = {
            "iteration": line.get("iteration"),
            "execution_time": result.get("execution_time"),
            "model_calls": len(result.get("rlm_calls") or []),
        }
        self._code(str(block.get("code", "")), outputs=_outputs(result), facts=facts, failed=failed)

    def _answer_as_text(self, reply: str, line: dict[str, Any]) -> None:
        """Give an answer that was printed, or written in a reply, by a cell: elsewhere such text finalizes nothing."""
        if line.get("final_answer") is None:
            return
        call: FinalCall | None = None
        for block in _blocks(line):
            printed = find_final(str((block.get("result") or {}).get("stdout", "")))
            call = call or (None if _calls_final(str(block.get("code", ""))) else printed)
        if not _blocks(line):
            call = find_final_in_reply(reply) or FinalCall("FINAL", str(line["final_answer"]))
            if call.kind == "FINAL":
                call = FinalCall("FINAL", str(line["final_answer"]))
        if call is not None:
            self._code(f"# The answer, which the run gave as text\n{call.kind}({_literal(call.argument)})")

    # -- descendants

    def _show(self, run: StoredRun) -> None:
        self._markdown(
            f"# Child {run.run_id}\n\n{self._overview(run)}\n\nShown as text: the run above starts its own again."
        )
        for line in redacted(run.iterations, self._secrets):
            parts = [f"## {run.run_id}, turn {line.get('iteration')}"]
            parts += [_prose_of(str(line.get("response") or ""))]
            for block in _blocks(line):
                result = block.get("result") or {}
                parts.append(_fenced(str(block.get("code", "")), "python"))
                output = f"{result.get('stdout', '')}{result.get('stderr', '')}".rstrip()
                parts.append(_fenced(output) if output else "*(no output)*")
            self._markdown("\n\n".join(part for part in parts if part))
        self._markdown(_end_of(run, self._secrets))

    # -- cells

    def _markdown(self, text: str) -> None:
        from nbformat import v4

        if text.strip():
            self._cells.append(v4.new_markdown_cell(self._clean(text.strip()), id=self._next_id()))

    def _code(
        self,
        source: str,
        *,
        outputs: list[Any] | None = None,
        facts: dict[str, Any] | None = None,
        failed: bool = False,
    ) -> None:
        from nbformat import from_dict, v4

        metadata: dict[str, Any] = {} if facts is None else {"rlm": facts}
        if failed:
            metadata["tags"] = ["raises-exception"]  # so that running all cells goes on behind it, as the run did
        ran = outputs is not None
        self._count += ran
        cell = v4.new_code_cell(
            self._clean(source),
            id=self._next_id(),
            metadata=metadata,
            outputs=[from_dict(self._clean(output)) for output in outputs or []],
            execution_count=self._count if ran else None,
        )
        self._cells.append(cell)

    def _next_id(self) -> str:
        return f"rlm-{len(self._cells) + 1}"

    def _clean(self, value: Any) -> Any:
        """Replace secrets, and what is no UTF-8 by its escape."""
        if isinstance(value, str):
            return redacted(value, self._secrets).encode("utf-8", "backslashreplace").decode()
        if isinstance(value, dict):
            return {key: self._clean(item) for key, item in value.items()}
        return [self._clean(item) for item in value] if isinstance(value, list) else value


def _facts(run: StoredRun) -> dict[str, Any]:
    metadata = run.metadata
    return {
        "run_id": run.run_id,
        "parent_id": run.parent_id,
        "episode_id": run.episode_id,
        "depth": run.depth,
        "model": metadata.get("root_model"),
        "started": metadata.get("timestamp"),
        "state": run.state,
        "stop_reason": None if run.end is None else run.end.get("stop_reason"),
        "iterations": len(run.iterations),
        "usage": run.usage,
        "final_answer": run.final_answer,
        "error": run.error,
        "exported_by": f"rlm-kernel {__version__}",
    }


def _task(run: StoredRun) -> str:
    return str(run.metadata.get("task") or run.record.get("prompt") or "")


def _blocks(line: dict[str, Any]) -> list[dict[str, Any]]:
    blocks = line.get("code_blocks")
    return [block for block in blocks if isinstance(block, dict)] if isinstance(blocks, list) else []


def _end_of(run: StoredRun, secrets: tuple[str, ...]) -> str:
    answer, error = run.final_answer, run.error
    parts = [f"## The end of {run.run_id}\n\nHow it ended: {_prose(run.state)}."]
    if answer is not None:
        parts.append(f"The answer:\n\n{_fenced(redacted(answer, secrets))}")
    if error is not None:
        parts.append(f"Why:\n\n{_fenced(redacted(error, secrets))}")
    return "\n\n".join(parts)


def _segments(reply: str) -> Iterator[tuple[str, str]]:
    """Cut a reply into words (as Markdown that shows them as they are) and the blocks that were to run."""
    lines = reply.split("\n")
    at = 0
    for block in parse_blocks(reply):
        yield "words", _prose("\n".join(lines[at : block.line - 1]))
        at = block.end
        if block.runnable:
            yield "code", block.code
        else:
            yield "words", f"\n\n{_fenced(block.code, block.language)}\n\n"
    yield "words", _prose("\n".join(lines[at:]))


def _prose_of(response: str) -> str:
    return "".join(text for kind, text in _segments(strip_reasoning(response)) if kind == "words").strip()


def _prose(text: str) -> str:
    """Return a model's words for Markdown: its formatting works, HTML does not."""
    return _CONTROL.sub("", text).replace("<", "&lt;")


def _cell_text(text: str) -> str:
    return _prose(" ".join(text.split())).replace("|", "\\|")


def _fenced(text: str, language: str = "text") -> str:
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    tag = language if re.fullmatch(r"[\w+-]{1,20}", language) else "text"
    return f"{fence}{tag}\n{_CONTROL.sub('', text)}\n{fence}"


def _literal(text: str) -> str:
    """Write a text as a Python expression, line by line where that can be read."""
    lines = text.splitlines(keepends=True)
    if len(text) < 80 or not 1 < len(lines) <= _LONGEST_LINE_LIST:
        return repr(text)
    return "(\n" + "".join(f"    {line!r}\n" for line in lines) + ")"


def _outputs(result: dict[str, Any]) -> list[Any]:
    """Return what a block printed and raised as a notebook's outputs."""
    from nbformat import v4

    outputs: list[Any] = []
    exception = result.get("exception")
    stderr = str(result.get("stderr") or "")
    streams = [("stdout", str(result.get("stdout") or "")), ("stderr", "" if exception else stderr)]
    for name, text in streams:
        if text:
            outputs.append(v4.new_output("stream", name=name, text=text))
    if exception:
        name, _, value = str(exception).partition(": ")
        traceback = stderr.rstrip("\n").split("\n") if stderr else [str(exception)]
        outputs.append(v4.new_output("error", ename=name, evalue=value, traceback=traceback))
    return outputs


def _calls_final(code: str) -> bool:
    """Tell whether code calls ``FINAL`` or ``FINAL_VAR`` itself. Code with magics is looked at as text."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return re.search(r"^\s*(?:print\()?FINAL(?:_VAR)?\(", code, re.MULTILINE) is not None
    names = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return bool(names & {"FINAL", "FINAL_VAR"})
