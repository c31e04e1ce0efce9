"""Rules shared by all directories of services, and the directory in Redis.

Open ``redis_directory.py`` first. ``uids.py``, ``rules.py`` and ``announced_endpoint.py`` define what may be announced,
by whom and where; ``anabranch.experts.directory`` has the directory kept by an anabranch process.
"""

__all__: list[str] = []
