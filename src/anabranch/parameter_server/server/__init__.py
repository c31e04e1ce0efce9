"""A shard: the rows and parameters of one server, the order of changes to them, and their files.

Open ``shard.py`` first: it holds the state and decides who waits. ``shard_server.py`` puts it behind an endpoint;
``durability.py`` keeps it on disk, in checkpoints and a log (``push_log.py``, ``recovery.py``, ``ownership.py``).
"""

from anabranch.parameter_server.server.shard import Shard
from anabranch.parameter_server.server.shard_server import ParameterServer
from anabranch.parameter_server.server.shard_service import serve_parameters
from anabranch.parameter_server.server.shard_statistics import ShardStatistics, TableStatistics
from anabranch.parameter_server.server.worker_order import Consistency

__all__ = ["Consistency", "ParameterServer", "Shard", "ShardStatistics", "TableStatistics", "serve_parameters"]
