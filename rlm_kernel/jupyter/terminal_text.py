"""Turn what a program wrote to a terminal into text that is safe to show: piece by piece, as it comes. Pure.

Kept are printable characters, ends of lines, tabs and carriage returns that go back in a line (a front end overwrites the line then, as a
terminal does). Colours and all other escape sequences are taken out, backspaces are carried out, other control characters dropped.
"""

from __future__ import annotations

import codecs
import re

_HELD_LENGTH = 4096
"""Characters of an unfinished escape sequence to wait for; more is no escape sequence."""

_CSI = r"\x1b\[[0-?]*[ -/]*[@-~]"
_STRING = r"\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)"
_SHORT = r"\x1b[ -/]*[0-OQ-WYZ\\`-~]"
_ESCAPES = re.compile(f"{_CSI}|{_STRING}|{_SHORT}")
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b\n]*\x1b?|[ -/]*)\Z")
_CONTROLS = re.compile(r"[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]")


class TerminalText:
    """Takes bytes in, in any pieces, and gives text out. What is cut in the middle waits for its rest."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._in_line = False

    def add(self, data: bytes, *, last: bool = False) -> str:
        """Take bytes in, and return the text that is complete.

        Args:
            data: the next bytes.
            last: whether nothing follows; nothing is then held back.
        """
        text = self._held + self._decoder.decode(data, last)
        unfinished = None if last else _UNFINISHED.search(text)
        end = len(text)
        if unfinished is not None and end - unfinished.start() <= _HELD_LENGTH:
            end = unfinished.start()
        elif not last and text.endswith("\r"):
            end -= 1  # the end of a line may follow
        text, self._held = text[:end], text[end:]
        text = _ESCAPES.sub("", text).replace("\r\n", "\n")
        text = _CONTROLS.sub("", text)
        if "\b" in text:
            text = _without_backspaces(text)
        return self._without_overwritten(text)

    def _without_overwritten(self, text: str) -> str:
        """Leave out what a carriage return goes back over. A line that was begun earlier is gone back over where it is shown."""
        if not text:
            return ""
        if "\r" in text:
            lines = [line.rstrip("\r") for line in text.split("\n")]
            goes_back = self._in_line and "\r" in lines[0]
            text = ("\r" if goes_back else "") + "\n".join(line.rpartition("\r")[2] for line in lines)
        self._in_line = not text.endswith("\n")
        return text


def _without_backspaces(text: str) -> str:
    kept: list[str] = []
    for character in text:
        if character != "\b":
            kept.append(character)
        elif kept and kept[-1] not in "\n\r":
            kept.pop()
    return "".join(kept)
