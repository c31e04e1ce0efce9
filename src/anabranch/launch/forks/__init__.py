"""Processes of a job as forks of one process that has imported everything: milliseconds each, not seconds.

Open ``launcher_side.py`` for what the launcher asks, ``fork_server.py`` for the answers, and ``forked_process.py`` for
how a fork becomes a process like any other.
"""

__all__: list[str] = []
