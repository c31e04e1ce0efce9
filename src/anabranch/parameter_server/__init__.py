"""Tables larger than a worker's memory, kept in rows that are read and updated by id.

Neither a key-value store nor a database: rows are numbers, changed by an optimizer's steps. Open
``row_table.py`` first: a table is a vocabulary (which row has this id), a storage and an optimizer's rule, and the
kernels that work on them, compiled (``_compiled.py``) beside their plain forms (``_plain.py``).
"""

from anabranch.parameter_server.cache import Cache, CacheStatistics, RowCache
from anabranch.parameter_server.client import ParameterClient, Pulled, Traffic, Worker
from anabranch.parameter_server.dense import DenseParameter
from anabranch.parameter_server.initial import Constant, Initial, Normal, Uniform
from anabranch.parameter_server.kernels import KernelThreads
from anabranch.parameter_server.optimizer import RowWiseAdagrad
from anabranch.parameter_server.optimizer_state import ParameterState, from_torch, to_torch
from anabranch.parameter_server.packing import Compression, check_compression
from anabranch.parameter_server.placement import Placement
from anabranch.parameter_server.remote_embedding import RemoteEmbedding
from anabranch.parameter_server.remote_tables import RemoteTables, merge_rows, rule_of, users_of
from anabranch.parameter_server.row_optimizers import Family, RowOptimizer
from anabranch.parameter_server.row_table import RowBlock, RowTable
from anabranch.parameter_server.server import ParameterServer
from anabranch.parameter_server.serving import serve_parameters
from anabranch.parameter_server.shard import Consistency, Shard, ShardStatistics, TableStatistics
from anabranch.parameter_server.table_group import TableGroup
from anabranch.parameter_server.table_spec import TableSpec
from anabranch.parameter_server.whole_parameters import WholeParameters

__all__ = [
    "Cache",
    "CacheStatistics",
    "Compression",
    "Consistency",
    "Constant",
    "DenseParameter",
    "Family",
    "Initial",
    "KernelThreads",
    "Normal",
    "ParameterClient",
    "ParameterServer",
    "ParameterState",
    "Placement",
    "Pulled",
    "RemoteEmbedding",
    "RemoteTables",
    "RowBlock",
    "RowCache",
    "RowOptimizer",
    "RowTable",
    "RowWiseAdagrad",
    "Shard",
    "ShardStatistics",
    "TableGroup",
    "TableSpec",
    "TableStatistics",
    "Traffic",
    "Uniform",
    "WholeParameters",
    "Worker",
    "check_compression",
    "from_torch",
    "merge_rows",
    "rule_of",
    "serve_parameters",
    "to_torch",
    "users_of",
]
