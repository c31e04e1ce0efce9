"""The answering side: connections, the threads that drive them, verbs with handlers, retries that are not done twice.

Knows no tables or experts. Open ``server.py`` first.
"""

__all__: list[str] = []
