"""A shard's log and checkpoints on disk: acknowledged changes survive a kill, and damage is detected.

The order of changes is in ``shard.py``. Open ``durability.py`` first.
"""

__all__: list[str] = []
