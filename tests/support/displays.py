"""What views are tested with: ipykernel's display publisher with nothing behind it but a list, a view, a status."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from ipykernel.zmqshell import ZMQDisplayPublisher
from jupyter_client.session import Session

from rlm_kernel.jupyter.views.base import View
from rlm_kernel.values import ChildState, ChildStatus

HOSTILE = "</td><script>alert(1)</script>"


def status(**changes: object) -> ChildStatus:
    """Return the status of a running child, with what is to be different."""
    given = {"id": "c1", "name": "c1", "depth": 1, "parent_id": None, "state": ChildState.RUNNING, **changes}
    return ChildStatus(**given)  # type: ignore[arg-type]


class Published:
    """Stands at the other end of the publisher. It is the socket.

    Attributes:
        messages: what was sent.
        failing: whether sending raises.
        publisher: the publisher.
        shell: has it as its ``display_pub``.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.failing = False
        self._changed = threading.Condition()
        self._session = Session(key=b"", check_pid=False)
        self.publisher = ZMQDisplayPublisher(session=self._session, pub_socket=self)
        self.shell = SimpleNamespace(display_pub=self.publisher)

    def begin_cell(self, name: str) -> None:
        """Do what ipykernel does when a cell begins in this thread."""
        self.publisher.set_parent({"header": {"msg_id": name, "msg_type": "execute_request"}})

    def send_multipart(self, parts: Any, **_: Any) -> None:
        if self.failing:
            raise OSError("nobody listens")
        message: Any = self._session.deserialize(self._session.feed_identities(parts)[1])
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()

    def wait_for(self, count: int, timeout_s: float = 10.0) -> None:
        """Wait until so many messages have been sent."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.messages) >= count, timeout_s), self.texts

    @property
    def texts(self) -> list[str]:
        return [message["content"]["data"]["text/plain"] for message in self.messages]

    @property
    def kinds(self) -> list[str]:
        return [message["msg_type"] for message in self.messages]

    @property
    def cells(self) -> set[str]:
        """The cells in whose name messages were sent."""
        return {message["parent_header"].get("msg_id", "") for message in self.messages}


class Text(View):
    """A view that is its text."""

    def __init__(self, text: object) -> None:
        self._text = str(text)

    def text(self) -> str:
        return self._text

    def html(self) -> str:
        return self._text
