"""The loops over rows: plain PyTorch and NumPy, and the same compiled by Numba; both give the same bits.

Open ``selection.py`` first: it says which are used. ``_plain.py`` is the reference, ``_compiled.py`` its compiled twin;
the rest exist only compiled: several tables in one call (``_compiled_group.py``), several caches
(``_compiled_cache.py``), a vocabulary's index and the routing of ids to shards.
"""

from anabranch.tables.kernels.selection import KernelThreads, kernels

__all__ = ["KernelThreads", "kernels"]
