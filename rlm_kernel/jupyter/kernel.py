"""The kernel: ipykernel's, with a session attached to it from its start. How, and which threads run what, is in `attachment`."""

from __future__ import annotations

import sys
from typing import Any

from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from traitlets import Type

from rlm_kernel._version import __version__
from rlm_kernel.jupyter.attachment import KernelAttachment
from rlm_kernel.jupyter.extension import mark_built_in
from rlm_kernel.jupyter.shell_session import ShellSession
from rlm_kernel.session.config import RLM


class RLMKernel(IPythonKernel):
    """An IPython kernel that is the REPL of a Recursive Language Model."""

    implementation = "rlm-kernel"
    implementation_version = __version__

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        assert self.shell is not None
        cells = ShellSession(self.shell, self, self.log)
        self.rlm = cells.rlm
        self.attachment = KernelAttachment(self, cells)
        self.attachment.attach()
        mark_built_in(self.shell)

    def start(self) -> None:
        super().start()
        self.attachment.cells.start()


class RLMKernelApp(IPKernelApp):
    """Launch the RLM kernel. Reads the same config files as ``ipykernel`` does."""

    kernel_class = Type("rlm_kernel.jupyter.kernel.RLMKernel", klass="ipykernel.kernelbase.Kernel").tag(config=True)
    classes = [*IPKernelApp.classes, RLMKernel, RLM]  # type: ignore[assignment]  # noqa: RUF012  (as in traitlets)

    def start(self) -> None:
        verbs = self.kernel.attachment.verbs if isinstance(self.kernel, RLMKernel) else None
        try:
            super().start()
        finally:
            if verbs is not None:
                verbs.after_loop()
        if verbs is not None and verbs.exit_code:
            sys.exit(verbs.exit_code)
