"""What a program wrote to a terminal becomes text that is safe to show, in whatever pieces it comes."""

from __future__ import annotations

import pytest

from rlm_kernel.jupyter.terminal_text import TerminalText

WRITTEN = [
    (b"plain\n", "plain\n"),
    (b"no end of line", "no end of line"),
    ("é数🎉\n".encode(), "é数🎉\n"),
    (b"bad \xff byte\n", "bad \N{REPLACEMENT CHARACTER} byte\n"),
    (b"\x1b[31mred\x1b[0m\n", "red\n"),
    (b"\x1b[2J\x1b[H\x1b[?25lcleared\n", "cleared\n"),
    (b"\x1b]0;a title\x07text\n", "text\n"),
    (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n", "link\n"),
    (b"\x1b(B\x1b=\x1b7keys\n", "keys\n"),
    (b"a\x00b\x07c\x0bd\x7fe\n", "abcde\n"),
    ("\x9b31m8 bits\n".encode(), "31m8 bits\n"),
    (b"windows\r\nlines\r\n", "windows\nlines\n"),
    (b" 10%\r 50%\r100%\n", "100%\n"),
    (b"typo\b\b\b\bfixed\n", "fixed\n"),
    (b"\b\b\bnothing before\n", "nothing before\n"),
    (b"tab\tkept\n", "tab\tkept\n"),
    (b"<script>alert(1)</script>\n", "<script>alert(1)</script>\n"),
]


@pytest.mark.parametrize(("data", "shown"), WRITTEN, ids=lambda value: repr(value) if isinstance(value, bytes) else "")
def test_it_is_shown_as_a_terminal_would_without_its_colours(data: bytes, shown: str) -> None:
    assert TerminalText().add(data, last=True) == shown


@pytest.mark.parametrize(
    ("data", "shown"), [pair for pair in WRITTEN if b"\r 50%" not in pair[0] and b"\b" not in pair[0]]
)
def test_pieces_of_one_byte_give_the_same(data: bytes, shown: str) -> None:
    terminal = TerminalText()
    pieces = [terminal.add(data[i : i + 1]) for i in range(len(data))]
    assert "".join(pieces) + terminal.add(b"", last=True) == shown


def test_a_line_is_shown_before_its_end_and_gone_back_over_when_it_changes() -> None:
    terminal = TerminalText()
    assert terminal.add(b" 10%") == " 10%"
    assert terminal.add(b"\r 20%\r 30%") == "\r 30%"
    assert terminal.add(b"\r") == ""
    assert terminal.add(b"\ndone") == "\ndone"


def test_the_beginning_of_an_escape_sequence_waits_for_its_rest_but_not_for_ever() -> None:
    terminal = TerminalText()
    assert terminal.add(b"a\x1b[3") == "a"
    assert terminal.add(b"1mb") == "b"
    assert terminal.add(b"\x1b]0;" + b"x" * 10_000).endswith("x" * 100)


def test_an_escape_sequence_without_an_end_swallows_one_line_at_most() -> None:
    shown = TerminalText().add(b"\x1b]0;never ended\nthe next line\n", last=True)
    assert shown.endswith("\nthe next line\n")
    assert "\x1b" not in shown


@pytest.mark.parametrize("data", [b"a" * 300_000 + b"\b" * 300_000, b"\x1b[" * 200_000, b"a\r" * 300_000])
def test_hostile_output_costs_no_more_than_its_length(data: bytes) -> None:
    assert len(TerminalText().add(data, last=True)) <= len(data)
