"""Tables whose rows are read and updated by id, independent of any network.

They are neither a key-value store nor a database: rows are numbers, changed by an optimizer's steps. Open
``table.py`` first: how a lookup becomes a row, and a row moves. ``arena.py`` has the memory that tables of one kind
share, ``kernels`` the loops over rows, ``optimizers`` what torch's optimizers mean for a row; ``cache.py`` caches rows
on workers.
"""

from anabranch.tables.cache import Cache, CacheStatistics
from anabranch.tables.dense_parameter import DenseParameter
from anabranch.tables.kernels.rows import KernelThreads
from anabranch.tables.optimizers.gradient_optimizers import FTRL, RowWiseAdagrad
from anabranch.tables.optimizers.row_optimizers import Family, ParameterState, RowOptimizer, from_torch, to_torch
from anabranch.tables.row_block import RowBlock
from anabranch.tables.table import Table, TableGroup
from anabranch.tables.table_spec import Constant, Initial, Normal, Placement, TableSpec, Uniform

__all__ = [
    "Cache",
    "CacheStatistics",
    "Constant",
    "DenseParameter",
    "FTRL",
    "Family",
    "Initial",
    "KernelThreads",
    "Normal",
    "ParameterState",
    "Placement",
    "RowBlock",
    "RowOptimizer",
    "RowWiseAdagrad",
    "Table",
    "TableGroup",
    "TableSpec",
    "Uniform",
    "from_torch",
    "to_torch",
]
