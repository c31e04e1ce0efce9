"""Processes of a job as forks of one process that has imported everything: milliseconds each, not seconds.

Open ``launcher_side.py`` for the launcher's requests, ``fork_server.py`` for the responses and how a
fork becomes a process like any other.
"""
