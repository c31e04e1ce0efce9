"""Tables whose rows are read and updated by id, independent of any network.

They are neither a key-value store nor a database: rows are numbers, changed by an optimizer's steps. Open
``table.py`` first: how a lookup becomes a row, and a row moves. ``arena.py`` has the memory that tables of one kind
share, ``kernels`` the loops over rows, ``optimizers`` what torch's optimizers mean for a row; ``cache.py`` caches rows
on workers.
"""

from anabranch.tables.cache import Cache, CacheStatistics
from anabranch.tables.dense_parameter import DenseParameter
from anabranch.tables.initial import Constant, Initial, Normal, Uniform
from anabranch.tables.kernels.memory import KernelThreads
from anabranch.tables.optimizers import FTRL, Family, ParameterState, RowOptimizer, RowWiseAdagrad, from_torch, to_torch
from anabranch.tables.row_block import RowBlock
from anabranch.tables.shard_placement import Placement
from anabranch.tables.table import Table, TableGroup
from anabranch.tables.table_spec import TableSpec

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
