"""Rules that all directories of services share, and the directory that is kept in Redis.

Open ``redis_directory.py`` first. ``uids.py``, ``rules.py`` and ``announced_endpoint.py`` say what may be announced, by
whom and where; ``anabranch.experts.directory`` has the directory that a process of ours keeps.
"""

__all__: list[str] = []
