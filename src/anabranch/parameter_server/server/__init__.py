"""A shard: the rows and parameters of one server, the order of changes to them, and their files.

Open ``shard.py`` first: it orders the changes and decides which requests wait. ``contents.py`` holds the tables,
``shard_server.py`` serves a shard at an endpoint, and ``durability.py`` keeps it on disk, in checkpoints and a log.
"""
