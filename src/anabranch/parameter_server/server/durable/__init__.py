"""A shard's log and checkpoints on disk: what was acknowledged survives a kill, and damage is found.

Not the order of changes, which ``shard.py`` has. Open ``durability.py`` first.
"""

__all__: list[str] = []
