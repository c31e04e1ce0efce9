"""Tables whose rows are read and updated by id, independent of any network.

They are neither a key-value store nor a database: rows are numbers, changed by an optimizer's steps. Open
``row_table.py`` first: a table is a vocabulary (which row has this id), a storage and an optimizer's rule;
``stored_rows`` has the operations on rows. ``optimizers`` has the rules, ``kernels`` the loops over rows, compiled
beside their plain forms; ``cache.py`` caches rows on workers.
"""

from anabranch.tables.cache import Cache, CacheStatistics, RowCache
from anabranch.tables.dense_parameter import DenseParameter
from anabranch.tables.initial import Constant, Initial, Normal, Uniform
from anabranch.tables.kernels import KernelThreads
from anabranch.tables.optimizers import FTRL, Family, ParameterState, RowOptimizer, RowWiseAdagrad, from_torch, to_torch
from anabranch.tables.row_table import RowTable
from anabranch.tables.shard_placement import Placement
from anabranch.tables.stored_rows import RowBlock
from anabranch.tables.table_group import TableGroup
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
    "RowCache",
    "RowOptimizer",
    "RowTable",
    "RowWiseAdagrad",
    "TableGroup",
    "TableSpec",
    "Uniform",
    "from_torch",
    "to_torch",
]
