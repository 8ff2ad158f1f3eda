"""A real JupyterLab for tests: the server of `tests.support.server`, and a port for a browser that the system chooses.

JupyterLab asks nobody for news or updates, and keeps its settings in the test's own folders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tests.support.server import OPTIONS, TOKEN, Server

_LISTENS = "JupyterLab listens on port"

_EXTENSION = """
from tornado.netutil import bind_sockets

def _jupyter_server_extension_points():
    return [{{"module": "lab_for_tests"}}]

def _load_jupyter_server_extension(app):
    def listen():
        sockets = bind_sockets(0, "127.0.0.1")
        app.http_server.add_sockets(sockets)
        app.log.critical("{listens} %d", sockets[0].getsockname()[1])
    app.io_loop.add_callback(app.io_loop.add_callback, listen)
"""
"""An extension of the server: beside its Unix-domain socket it listens where a browser can reach it. The port is bound when it is
chosen, so nobody can take it in between."""

_OPTIONS: dict[str, Any] = {
    "ServerApp.jpserver_extensions": {
        **OPTIONS["ServerApp.jpserver_extensions"],
        "jupyterlab": True,
        "lab_for_tests": True,
    },
    "LabApp.extension_manager": "readonly",
    "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
    "LabApp.news_url": None,
    "MappingKernelManager.cull_interval": 3600,
}

_SETTINGS: dict[str, dict[str, Any]] = {
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
    "@jupyterlab/extensionmanager-extension:plugin": {"enabled": False},
    # Cells off the screen would not be in the page.
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none", "scrollPastEnd": False},
}


class Lab(Server):
    """One JupyterLab. Use as a context manager; on leaving, nothing of it runs any more.

    Args:
        home: a directory for what it and its kernels keep; also where its notebooks are.
        variables: more environment variables.

    Attributes:
        url: where a browser finds it.
    """

    def __init__(self, home: Path, **variables: str) -> None:
        super().__init__(home, {"rlm": {}}, HOME=str(home), **variables)
        self.home = home
        self.url = ""
        self._options.update(_OPTIONS)

    def start(self) -> Self:
        (self._short / "lab_for_tests.py").write_text(_EXTENSION.format(listens=_LISTENS))
        settings = Path(self.environment["JUPYTER_CONFIG_DIR"]) / "labconfig" / "default_setting_overrides.json"
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text(json.dumps(_SETTINGS))
        super().start()
        try:
            self.wait_for_line(_LISTENS)
        except BaseException:
            self.stop()
            raise
        found = re.search(rf"{_LISTENS} (\d+)", self.log)
        assert found is not None
        self.url = f"http://127.0.0.1:{found[1]}"
        return self

    @property
    def address(self) -> str:
        """What opens it in a browser, with all that is needed to come in."""
        return f"{self.url}/lab?token={TOKEN}&reset"

    def write(self, name: str, notebook: Mapping[str, Any]) -> str:
        """Put a notebook into its folder. Returns the name."""
        (self.home / name).write_text(json.dumps(notebook))
        return name
