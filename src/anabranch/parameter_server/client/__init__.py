"""A worker's side: reading and updating tables on the servers by name and id.

Open ``parameter_client.py`` first: it asks all shards at once. Above it stand ``remote_tables.py`` (the tables of a
step, with caches) and ``whole_parameters.py``; ``remote_weight.py`` and ``remote_embedding.py`` are what a model holds
in place of a table. ``routing.py`` and ``row_messages.py`` say what is sent to which shard.
"""

from anabranch.parameter_server.client.embedding_bags import EmbeddingBagCollection
from anabranch.parameter_server.client.parameter_client import ParameterClient, Traffic, Worker
from anabranch.parameter_server.client.remote_embedding import RemoteEmbedding
from anabranch.parameter_server.client.remote_tables import RemoteTables, merge_rows, rule_of, users_of
from anabranch.parameter_server.client.row_messages import Pulled
from anabranch.parameter_server.client.whole_parameters import WholeParameters

__all__ = [
    "EmbeddingBagCollection",
    "ParameterClient",
    "Pulled",
    "RemoteEmbedding",
    "RemoteTables",
    "Traffic",
    "WholeParameters",
    "Worker",
    "merge_rows",
    "rule_of",
    "users_of",
]
