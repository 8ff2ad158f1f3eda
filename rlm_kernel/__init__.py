"""A Jupyter kernel in which the notebook is the REPL of a Recursive Language Model."""

from rlm_kernel._version import __version__

__all__ = ["__version__"]
