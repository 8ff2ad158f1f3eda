"""Write the REPL code of the `demo` model. Pure: a task in, Python source out.

The code is read by people, in progress displays and trajectories, so it is written as a person would write it, and
prints little. What is to be found stands in it as ``repr(needle)``, so that any text survives. What comes from the
context is printed as ``repr`` only, so that it cannot pass for a marker line. The code of later steps uses the names
that earlier steps have bound: the REPL keeps them.
"""

from __future__ import annotations

import re
from string import Template

from rlm_kernel.clients.demo_tasks import Kind, SearchTask, piece_prompt_code

SHOWN_NEEDLE = 60
"""Characters of a needle that are shown in full."""

_HITS_SHOWN = 50

_SPLIT_LINES = r"""
def split_lines(text):
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]
"""

_SEARCH_NUMBERS = """
def search(piece):
    texts = [piece] if isinstance(piece, str) else piece
    return sum($count for text in texts)
"""

_SEARCH_HITS = """
def search(piece, first=1):
    if isinstance(piece, str):
        return [(f"line {n}", shown) for n, shown in hits_in(piece, first)]
    return [(f"item {i}, line {n}", shown) for i, text in enumerate(piece, first) for n, shown in hits_in(text)]
"""

_LINE_HITS = """
def hits_in(text, first=1):
    lines = enumerate(split_lines(text), first)
    return [(n, excerpt(line, found.start())) for n, line in lines if (found := pattern.search(line))]
"""

_CODE_HITS = """
def hits_in(text, first=1):
    return [(n, code) for n, line in enumerate(split_lines(text), first) for code in pattern.findall(line)]
"""

# What spans lines is found in the whole text; it belongs to the line in which it begins.
_SPANNING_HITS = r"""
def hits_in(text, first=1):
    starts = [0] + [end.end() for end in re.finditer(r"\r\n|\n|\r", text)]
    lines = split_lines(text)
    numbers = sorted({bisect.bisect_right(starts, found.start()) for found in pattern.finditer(text)})
    return [(first + n - 1, excerpt(lines[n - 1], 0)) for n in numbers]
"""

_EXCERPT = """
def excerpt(line, at):
    return line if len(line) <= 160 else f"…{line[max(0, at - 60):at + 100]}…"
"""

_READ = """
def as_text(value):
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode("utf-8", "replace")
    return "" if value is None else str(value)

source = globals().get("context")
if isinstance(source, dict):
    source = list(source.values())
whole = [as_text(part) for part in source] if isinstance(source, (list, tuple)) else as_text(source)
"""

_LOOK = """
texts = whole if isinstance(whole, list) else [whole]
parts = source if isinstance(whole, list) else [source]
not_text = sum(not isinstance(part, (str, bytes, bytearray, memoryview, type(None))) for part in parts)
line_lengths = [len(line) for text in texts for line in split_lines(text)]
print(f"The context is a {type(source).__name__} with {len(line_lengths)} lines.")
print("It begins:", [line[:60] for line in split_lines("".join(texts[:1])[:500])[:3]])
print(f"demo: begins={''.join(texts[:1])[:60]!r}")
print(
    f"demo: kind={'list' if isinstance(whole, list) else 'text'} texts={len(texts)} lines={len(line_lengths)}"
    f" longest={max(line_lengths, default=0)} length={sum(map(len, texts))} odd={not_text}"
)
"""

_STRIP_QUESTION = """
question = $question
whole = whole.lstrip().removeprefix(question).lstrip("\\r\\n")
"""

# Every cut is just behind a line end, so that no line is torn and the numbers of the pieces add up exactly.
_TEXT_PIECES = r"""
line_end = "\n" if "\n" in whole else "\r"
targets = [len(whole) * k // $pieces for k in range(1, $pieces)]
cuts = sorted({0, len(whole)} | {whole.find(line_end, target) + 1 for target in targets})
pieces = [whole[a:b] for a, b in zip(cuts, cuts[1:])]
firsts = list(itertools.accumulate((len(split_lines(piece)) for piece in pieces[:-1]), initial=1))
"""

_LIST_PIECES = """
cuts = [len(whole) * k // $pieces for k in range($pieces + 1)]
pieces = [whole[a:b] for a, b in zip(cuts, cuts[1:])]
firsts = [cut + 1 for cut in cuts[:-1]]
"""

_START = """
handles = [
    rlm_query(
        $prompt,
        context=piece, blocking=False, name=f"piece-{number}",
    )
    for number, (piece, first) in enumerate(zip(pieces, firsts), 1)
]
print("; ".join(f"{status.name} {status.state}" for status in map(rlm_status, handles)))
average = sum(line_lengths) / max(1, len(line_lengths))
print(f"Meanwhile: {line_lengths.count(0)} blank lines, {average:.1f} characters per line.")
print(f"demo: started={len(handles)}")
"""

_COLLECT_NUMBERS = """
counts, recounted = [], []
for number, (handle, status) in enumerate(zip(handles, rlm_wait(handles), strict=True), 1):
    reply = str(rlm_result(handle)).strip() if status.state == "completed" else ""
    if not reply.isdecimal():
        print(f"piece-{number} ({status.state}) gave no number, so I count it myself.")
        recounted.append(number)
        reply = search(pieces[number - 1])
    counts.append(int(reply))
print("Per piece:", counts)
total = sum(counts)
"""

_COLLECT_HITS = """
total, hits, recounted = 0, [], []
for number, (handle, status) in enumerate(zip(handles, rlm_wait(handles), strict=True), 1):
    try:
        reply = json.loads(rlm_result(handle) if status.state == "completed" else "")
        found, shown = int(reply["total"]), [(place, text) for place, text in reply["hits"]]
    except (ValueError, TypeError, KeyError):
        print(f"piece-{number} ({status.state}) gave no usable answer, so I search it myself.")
        recounted.append(number)
        shown = search(pieces[number - 1], firsts[number - 1])
        found = len(shown)
    total += found
    hits += shown
print("Hits in all pieces:", total)
"""

_COLLECT_NOTE = """
note = $note
if recounted:
    note += f" (Children failed on {len(recounted)} of the {len(pieces)} pieces; I searched those myself.)"
"""

_FINAL_LIST = """
summary = f"$summary" + (f", of which these are the first {len(hits[:50])}" if total > 50 else "")
FINAL("\\n".join([summary + (":" if hits else ".") + note] + [f"$each" for place, text in hits[:50]]))
"""

_MODULES = re.compile(r"\b(bisect|itertools|json|re)\.")


def look_code(task: SearchTask) -> str:
    """Look at `context`, and print the marker lines that say what it is."""
    return _code(_search(task, with_split=True), _READ, _LOOK)


def start_code(task: SearchTask, pieces: int, *, is_list: bool) -> str:
    """Cut what `look_code` read into pieces and start a child on each; print a marker line."""
    cut = Template(_LIST_PIECES if is_list else _TEXT_PIECES).substitute(pieces=pieces)
    prompt = piece_prompt_code(task, "item" if is_list else "line")
    return _code(cut, Template(_START).substitute(prompt=prompt))


def collect_code(task: SearchTask, note: str = "") -> str:
    """Wait for the children of `start_code`, add their answers up, search again where one failed, and finalize.

    Args:
        note: a sentence to follow the answer.
    """
    collect = _COLLECT_NUMBERS if task.kind.gives_number else _COLLECT_HITS
    return _code(collect, Template(_COLLECT_NOTE).substitute(note=_note_literal(note)), _final(task))


def direct_code(task: SearchTask, note: str = "", *, skip_question: bool = False) -> str:
    """Search the whole `context` in one go, and finalize; uses nothing that an earlier step has bound.

    Args:
        note: a sentence to follow the answer.
        skip_question: the context is the prompt: search behind the question only.
    """
    strip = Template(_STRIP_QUESTION).substitute(question=repr(task.question)) if skip_question else ""
    if task.piece:
        return _code(_search(task), _READ, strip, _final_of_piece(task, "whole"))
    count = "total = search(whole)" if task.kind.gives_number else "hits = search(whole)\ntotal = len(hits)"
    return _code(_search(task), _READ, strip, f"{count}\nnote = {_note_literal(note)}", _final(task))


def piece_code(task: SearchTask) -> str:
    """Search the piece that a parent of our own has put into `context`, and hand in what its code can read."""
    return _code(_search(task), _final_of_piece(task, "context"))


def _code(*sections: str) -> str:
    body = "\n\n".join(section.strip("\n") for section in sections if section)
    modules = sorted(set(_MODULES.findall(body)))
    return f"import {', '.join(modules)}\n\n{body}" if modules else body


def _search(task: SearchTask, *, with_split: bool = False) -> str:
    """Write the functions that search a text or a list of texts."""
    sections = [f"needle = {task.needle!r}"]
    if not (task.kind is Kind.COUNT and task.plain):
        flags = ", re.IGNORECASE" if task.ignore_case else ""
        sections[0] += f"\npattern = re.compile({task.pattern!r}{flags})"
    if with_split or task.kind is not Kind.COUNT:
        sections.append(_SPLIT_LINES)
    if task.kind is Kind.COUNT:
        count = "text.count(needle)" if task.plain else "len(pattern.findall(text))"
        return _joined(*sections, Template(_SEARCH_NUMBERS).substitute(count=count))
    if task.kind is Kind.CODES:
        sections.append(_CODE_HITS)
    else:
        sections += [_EXCERPT, _SPANNING_HITS if task.spans_lines else _LINE_HITS]
    if task.kind is Kind.LINE_COUNT:
        return _joined(*sections, Template(_SEARCH_NUMBERS).substitute(count="len(hits_in(text))"))
    return _joined(*sections, _SEARCH_HITS)


def _note_literal(note: str) -> str:
    return repr(f" {note}" if note else "")


def _joined(*sections: str) -> str:
    return "\n\n".join(section.strip("\n") for section in sections)


def _final_of_piece(task: SearchTask, text: str) -> str:
    if task.kind.gives_number:
        return f"FINAL(search({text}))"
    first = task.piece.first if task.piece else 1
    hits = f'{{"total": len(hits), "hits": hits[:{_HITS_SHOWN}]}}'
    return f"hits = search({text}, {first})\nFINAL(json.dumps({hits}))"


def _final(task: SearchTask) -> str:
    """Write the code that words the answer from `total`, `hits` and `note`, and finalizes."""
    label = "{needle!r}"
    if len(task.needle) > SHOWN_NEEDLE:
        label = f"{{needle[:{SHOWN_NEEDLE}]!r}}… ({{len(needle)}} characters)"
    plural, singular = "{'' if total == 1 else 's'}", "{'s' if total == 1 else ''}"
    if task.kind is Kind.COUNT:
        return f'FINAL(f"{label} occurs {{total}} time{plural}{task.scope}.{{note}}")'
    if task.kind is Kind.LINE_COUNT:
        return f'FINAL(f"{{total}} line{plural} contain{singular} {label}{task.scope}.{{note}}")'
    if task.kind is Kind.LINES:
        summary, each = f"{{total}} line{plural} contain{singular} {label}{task.scope}", "{place}: {text}"
    else:
        summary, each = f"{{total}} place{plural} look{singular} like {label}{task.scope}", "{text} ({place})"
    return Template(_FINAL_LIST).substitute(summary=summary, each=each)
