"""Tables and parameters on servers: read by id before a step, updated by id after it, by any number of workers.

The tables themselves are in ``anabranch.tables``. ``server`` is one shard, ``client`` a worker's side, and
``messages.py`` the messages between them; open ``client/parameter_client.py`` first.
"""

from anabranch.parameter_server.client.embedding_bags import EmbeddingBagCollection
from anabranch.parameter_server.client.parameter_client import ParameterClient, Traffic, Worker
from anabranch.parameter_server.client.remote_embedding import RemoteEmbedding
from anabranch.parameter_server.client.remote_tables import RemoteTables, merge_rows, rule_of
from anabranch.parameter_server.client.row_messages import Pulled
from anabranch.parameter_server.client.whole_parameters import WholeParameters
from anabranch.parameter_server.messages import Merging
from anabranch.parameter_server.server.contents import ShardStatistics, TableStatistics
from anabranch.parameter_server.server.shard import Shard
from anabranch.parameter_server.server.shard_server import ParameterServer
from anabranch.parameter_server.server.worker_order import Consistency

__all__ = [
    "Consistency",
    "EmbeddingBagCollection",
    "Merging",
    "ParameterClient",
    "ParameterServer",
    "Pulled",
    "RemoteEmbedding",
    "RemoteTables",
    "Shard",
    "ShardStatistics",
    "TableStatistics",
    "Traffic",
    "WholeParameters",
    "Worker",
    "merge_rows",
    "rule_of",
]
