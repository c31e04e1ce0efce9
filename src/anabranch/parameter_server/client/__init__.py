"""A worker's side: reading and updating tables on the servers by name and id.

Open ``parameter_client.py`` first: it asks all shards at once. Above it stand ``remote_tables.py`` (the tables of a
step, with caches) and ``whole_parameters.py``; ``remote_weight.py`` and ``remote_embedding.py`` are what a model holds
in place of a table. ``row_messages.py`` says what is sent to which shard.
"""
