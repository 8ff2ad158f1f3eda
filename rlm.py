"""The short name for ``%load_ext rlm``. This module holds nothing else: import `rlm_kernel`.

Where another distribution installs a package ``rlm/`` (``rlms`` does), Python prefers that package to this module, and the two
leave each other alone. ``%load_ext rlm`` then finds theirs, and IPython says that it has no load function:
``%load_ext rlm_kernel`` works everywhere.
"""

from __future__ import annotations

from rlm_kernel import load_ipython_extension, unload_ipython_extension

__all__ = ["load_ipython_extension", "unload_ipython_extension"]
