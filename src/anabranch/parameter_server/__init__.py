"""Tables and parameters on servers: read by id before a step, updated by id after it, by any number of workers.

The tables themselves are in ``anabranch.tables``. ``server`` is one shard, ``client`` a worker's side, and
``messages.py`` the messages between them; open ``client/parameter_client.py`` first.
"""

from anabranch.parameter_server.client import (
    EmbeddingBagCollection,
    ParameterClient,
    Pulled,
    RemoteEmbedding,
    RemoteTables,
    Traffic,
    WholeParameters,
    Worker,
    merge_rows,
    rule_of,
    users_of,
)
from anabranch.parameter_server.messages import Merging
from anabranch.parameter_server.server import (
    Consistency,
    ParameterServer,
    Shard,
    ShardStatistics,
    TableStatistics,
)

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
    "users_of",
]
