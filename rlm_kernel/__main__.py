"""Start the kernel: ``python -m rlm_kernel -f CONNECTION_FILE``, which is what the kernelspec does."""

from __future__ import annotations

if __name__ == "__main__":
    from rlm_kernel.jupyter.kernel import RLMKernelApp

    RLMKernelApp.launch_instance()
