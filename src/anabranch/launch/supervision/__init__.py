"""Watching the processes of a job until the last has ended, whatever fails and however often Ctrl-C is pressed.

Open ``supervisor.py`` first; ``worker.py`` is one process, ``outcome.py`` describes the end of a job.
"""
