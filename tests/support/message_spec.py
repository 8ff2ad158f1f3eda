"""The messaging protocol as a checklist: every field that a message must have, and of which type.

Written from the documentation "Messaging in Jupyter" (protocol 5.5 and the enhancement proposals for debugging, subshells and
control messages). `CheckedKernel` checks each message that comes in, whatever test causes it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.kernels import Kernel

Fields = Mapping[str, object]
"""Names of required fields and their types: a type, a tuple of allowed values, ``[type]`` (a list), or None for anything."""

HEADER: Fields = {
    "msg_id": str,
    "session": str,
    "username": str,
    "msg_type": str,
    "version": str,
    "date": datetime.datetime,
}

ERROR: Fields = {"ename": str, "evalue": str, "traceback": [str]}

BUNDLE: Fields = {"data": dict, "metadata": dict}

REPLIES: Mapping[str, Fields] = {
    "execute_reply": {"execution_count": int, "user_expressions": dict, "payload": [dict]},
    "inspect_reply": {"found": bool, **BUNDLE},
    "complete_reply": {"matches": [str], "cursor_start": int, "cursor_end": int, "metadata": dict},
    "history_reply": {"history": [None]},
    "comm_info_reply": {"comms": dict},
    "kernel_info_reply": {
        "protocol_version": str,
        "implementation": str,
        "implementation_version": str,
        "language_info": dict,
        "banner": str,
        "help_links": [dict],
    },
    "shutdown_reply": {"restart": bool},
    "interrupt_reply": {},
    "create_subshell_reply": {"subshell_id": str},
    "delete_subshell_reply": {},
    "list_subshell_reply": {"subshell_id": [str]},
}
"""What replies hold besides ``status``, when that is "ok"."""

OTHERS: Mapping[str, Fields] = {
    "is_complete_reply": {"status": ("complete", "incomplete", "invalid", "unknown")},
    "usage_reply": {"hostname": str, "pid": int},
    "debug_reply": {"type": ("response",), "request_seq": int, "success": bool, "command": str},
    "debug_event": {"type": ("event",), "event": str, "seq": int},
    "stream": {"name": ("stdout", "stderr"), "text": str},
    "display_data": {**BUNDLE, "transient": dict},
    "update_display_data": {**BUNDLE, "transient": dict},
    "execute_input": {"code": str, "execution_count": int},
    "execute_result": {**BUNDLE, "execution_count": int},
    "error": ERROR,
    "status": {"execution_state": ("busy", "idle", "starting")},
    "clear_output": {"wait": bool},
    "input_request": {"prompt": str, "password": bool},
    "comm_open": {"comm_id": str, "target_name": str, "data": dict},
    "comm_msg": {"comm_id": str, "data": dict},
    "comm_close": {"comm_id": str, "data": dict},
    "iopub_welcome": {"subscription": str},
    "rlm_activity": {},  # our own word to servers that children are live
}

WITHOUT_PARENT = ("status", "iopub_welcome", "debug_event", "stream", "rlm_activity")
"""What may come on the IOPub channel although nobody asked."""


def check_message(message: dict[str, Any]) -> None:
    """Check one message, whatever it is.

    Raises:
        AssertionError: it breaks the protocol; says where.
    """
    kind = message["msg_type"]
    _check(f"{kind}.header", message["header"], HEADER)
    assert message["header"]["msg_type"] == kind
    assert isinstance(message["metadata"], dict), f"{kind}: metadata is {message['metadata']!r}"
    if message["parent_header"]:
        assert {"msg_id", "session", "msg_type"} <= set(message["parent_header"]), f"{kind}: {message['parent_header']}"
    else:
        assert kind in WITHOUT_PARENT, f"{kind} belongs to no request"
    content = message["content"]
    json.dumps(content, allow_nan=False)
    if kind in REPLIES:
        _check_reply(kind, content)
        asked = message["parent_header"]["msg_type"]
        assert asked.removesuffix("_request") == kind.removesuffix("_reply"), f"{kind} for {asked}"
        if kind == "execute_reply":
            assert message["metadata"]["status"] == content["status"]
    else:
        assert kind in OTHERS, f"an unknown message: {kind}"
        _check(kind, content, OTHERS[kind])
    if "metadata" in content and isinstance(bundle := content.get("data"), dict):
        assert all("/" in mime for mime in bundle), f"{kind}: {sorted(bundle)} are not all MIME types"
        assert all(isinstance(value, str) for mime, value in bundle.items() if mime.startswith("text/"))


def _check_reply(kind: str, content: dict[str, Any]) -> None:
    status = content.get("status")
    if status == "ok":
        _check(kind, content, REPLIES[kind])
    elif status == "error":
        if kind in ("create_subshell_reply", "delete_subshell_reply", "list_subshell_reply"):
            assert isinstance(content["evalue"], str)
            return
        _check(kind, content, ERROR)
        if kind == "execute_reply":
            _check(kind, content, {"execution_count": int})
        if kind == "shutdown_reply":
            _check(kind, content, {"restart": bool})
    else:
        assert (kind, status) == ("execute_reply", "aborted"), f"{kind}: status {status!r}"


def _check(where: str, content: Mapping[str, Any], fields: Fields) -> None:
    for name, wanted in fields.items():
        assert name in content, f"{where}: no {name!r} in {sorted(content)}"
        value = content[name]
        assert _fits(value, wanted), f"{where}: {name} is {value!r}, wanted {wanted}"


def _fits(value: Any, wanted: Any) -> bool:
    if wanted is None:
        return True
    if isinstance(wanted, list):
        return isinstance(value, list) and all(_fits(item, wanted[0]) for item in value)
    if isinstance(wanted, tuple):
        return value in wanted
    return isinstance(value, wanted) and not (wanted is int and isinstance(value, bool))


class CheckedKernel(Kernel):
    """A kernel each message of which is checked, and the order of those that belong together.

    Attributes:
        seen: what has come, as pairs of a message's type and the status in its content (empty if it has none).
    """

    def __init__(self, home: Path, **variables: Any) -> None:
        super().__init__(home, **variables)
        self.seen: set[tuple[str, str]] = set()
        self.events: list[dict[str, Any]] = []
        self._states: dict[str, list[str]] = {}

    def _sort(self, message: dict[str, Any]) -> None:
        check_message(message)
        kind, content = message["msg_type"], message["content"]
        self.seen.add((kind, str(content.get("status", ""))))
        parent = message["parent_header"].get("msg_id", "")
        states = self._states.setdefault(parent, [])
        if kind == "status":
            states.append(content["execution_state"])
            assert states in (["busy"], ["busy", "idle"], ["starting"], ["starting", "busy"]) or not parent, (
                f"{message['parent_header'].get('msg_type')}: {states}"
            )
        elif kind == "debug_event":
            self.events.append(content)
        super()._sort(message)
