"""The parts of ``rlm-kernel run`` that need no kernel."""

from __future__ import annotations

import argparse
import io
import signal

import pytest

from rlm_kernel.errors import ConfigurationError
from rlm_kernel.jupyter import run_command
from rlm_kernel.jupyter.run_command import EVENT_MIME, read_text


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"a\r\nb\nc", "a\r\nb\nc"),
        ("é 鯨".encode(), "é 鯨"),
        (b"\xef\xbb\xbfbom", "bom"),
        (b"bad \xff byte", "bad � byte"),
        (b"", ""),
    ],
)
def test_a_text_is_read_as_it_is(tmp_path, raw, text) -> None:
    path = tmp_path / "text"
    path.write_bytes(raw)
    assert read_text(str(path)) == text


def test_standard_input_becomes_a_file_that_is_gone_afterwards(monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\r\nb"), newline=""))
    with run_command._context_file("-") as path:
        assert path is not None
        assert read_text(path) == "a\r\nb"
    with pytest.raises(FileNotFoundError):
        read_text(path)


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_a_context_that_cannot_be_read_is_named_before_anything_starts(tmp_path, monkeypatch, name) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="--context") as caught, run_command._context_file(name):
        pass
    assert name in str(caught.value)


def test_options_become_the_kernels_environment(monkeypatch) -> None:
    """And no live table is shown, which would be output of the model's code."""
    for name in ("RLM_MODEL", "RLM_CLIENT_FACTORY", "RLM_MAX_ITERATIONS", "RLM_MAX_DEPTH"):
        monkeypatch.delenv(name, raising=False)
    args = argparse.Namespace(model="openai/test", max_iterations=3, max_depth=None)
    expected = {"RLM_MODEL": "openai/test", "RLM_MAX_ITERATIONS": "3", "RLM_LIVE_VIEWS": "false"}
    assert run_command._settings(args) == expected


@pytest.mark.parametrize(("name", "value"), [("max_iterations", 0), ("max_depth", 0), ("model", "nonsense")])
def test_a_bad_option_is_named_before_anything_starts(name, value) -> None:
    args = argparse.Namespace(**{"model": "demo", name: value})
    with pytest.raises(ConfigurationError, match=name):
        run_command._settings(args)


def test_signals_that_come_in_between_are_delivered_at_the_end() -> None:
    steps = []

    def interrupted() -> None:
        with run_command._signals_put_off():
            signal.raise_signal(signal.SIGINT)
            steps.append("went on")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert steps == ["went on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigterm_unwinds_the_command() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(run_command._Terminated), run_command._terminable():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_long_output_is_cut_with_the_number_of_lines_that_are_missing(capsys) -> None:
    run_command._Display().show({"kind": "output", "text": "\n".join(map(str, range(100)))})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 12
    assert "89 more lines" in lines[-1]


def test_progress_goes_to_standard_error_only(capsys) -> None:
    display = run_command._Display()
    for event in (
        {"kind": "start", "model": "demo", "context": "text"},
        {"kind": "model", "iteration": 1, "text": "I look"},
        {"kind": "code", "iteration": 1, "code": "x = 1"},
        {"kind": "output", "iteration": 1, "text": "1"},
        {"kind": "child", "id": "c1", "line": "c1 running"},
        {"kind": "end", "answer": "42", "children": [{"id": "c1", "state": "completed", "exited": True}]},
    ):
        display.show(event)
    display.show_end(1.0)
    out, err = capsys.readouterr()
    assert out == ""
    for word in ("demo", "I look", "x = 1", "c1 running", "1 of 1 exits confirmed"):
        assert word in err


def test_an_exit_that_was_not_confirmed_is_not_counted_as_one(capsys) -> None:
    display = run_command._Display()
    display.show({"kind": "end", "answer": None, "children": [{"id": "c1", "state": "failed", "exited": False}]})
    display.show_end(1.0)
    assert "0 of 1 exits confirmed" in capsys.readouterr().err


def test_what_a_model_says_around_its_code_is_shown_apart_from_it() -> None:
    assert run_command._words("I look.\n```repl\nx = 1\n```\nThen I go on.") == "I look.\nThen I go on."
    assert run_command._words("```repl\nx = 1\n```") == "(code only)"


def test_progress_messages_have_a_media_type_of_our_own() -> None:
    assert EVENT_MIME.startswith("application/vnd.rlm-kernel.")
