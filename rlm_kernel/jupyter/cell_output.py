"""Turn what comes of one request into what a model is shown of it: text on two streams, and one line of error. Pure.

The same texts as a block of a child's gives (see `rlm_kernel.environment.interpreter`): displays and the value of a trailing expression
stand in the standard output, in their order, the traceback in the standard error, without colours.
"""

from __future__ import annotations

import re
from typing import Any

from rlm_kernel.environment.capture import BoundedText

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class CellOutput:
    """Take in the messages of one request, until its reply and its idle status have come.

    Args:
        msg_id: the request.
        limit: characters that are kept of each stream.
        is_silent: whether the kernel does not show its input when it begins it.

    Attributes:
        has_begun: whether an interrupt would hit it.
    """

    def __init__(self, msg_id: str, limit: int, *, is_silent: bool = False) -> None:
        self.msg_id = msg_id
        self.is_silent = is_silent
        self._stdout = BoundedText(limit)
        self._stderr = BoundedText(limit)
        self.reply: dict[str, Any] | None = None
        self.metadata: dict[str, Any] = {}
        self.has_begun = False
        self.is_idle = False
        self.has_error_output = False

    def take(self, channel: str, message: dict[str, Any]) -> None:
        """Take in one message; those of other requests are passed over."""
        if message["parent_header"].get("msg_id") != self.msg_id:
            return
        content = message["content"]
        match channel, message["msg_type"]:
            case "shell", "execute_reply":
                self.reply, self.metadata = content, message["metadata"]
            case "iopub", "stream":
                (self._stderr if content["name"] == "stderr" else self._stdout).add(content["text"])
            case "iopub", "execute_result" | "display_data":
                text = content["data"].get("text/plain")
                if isinstance(text, str):
                    self._stdout.add(f"{text}\n")
            case "iopub", "error":
                self.has_error_output = True
                self._add_traceback(content)
            case "iopub", "execute_input":
                self.has_begun = True
            case "iopub", "status":
                self.has_begun = self.has_begun or self.is_silent
                self.is_idle = self.is_idle or content["execution_state"] == "idle"

    def _add_traceback(self, content: dict[str, Any]) -> None:
        text = "\n".join(content.get("traceback") or [one_line(content)])
        self._stderr.add(_ANSI.sub("", text) + "\n")

    @property
    def stdout(self) -> str:
        return self._stdout.value()

    @property
    def stderr(self) -> str:
        """What was written there, with the traceback of an error that nothing has shown."""
        if self.reply is not None and self.reply["status"] == "error" and not self.has_error_output:
            self.has_error_output = True
            self._add_traceback(self.reply)
        return self._stderr.value()

    @property
    def exception(self) -> str | None:
        """``"NameError: name 'x' is not defined"``, None if the code ran to its end."""
        if self.reply is None or self.reply["status"] == "ok":
            return None
        return one_line(self.reply)


def one_line(content: dict[str, Any]) -> str:
    """Name an error as a reply describes it."""
    name, text = content.get("ename", "Aborted"), content.get("evalue", "")
    return f"{name}: {text}" if text else str(name)
