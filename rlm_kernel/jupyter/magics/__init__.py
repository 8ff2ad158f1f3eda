"""``%rlm`` and ``%%rlm``: one module parses, one completes, and each of the others holds commands of one kind."""

from rlm_kernel.jupyter.magics.rlm import COMMANDS, RLMMagics

__all__ = ["COMMANDS", "RLMMagics"]
