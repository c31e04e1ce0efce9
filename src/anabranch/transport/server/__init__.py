"""The server side: connections, the threads that drive them, verbs with handlers, and idempotent retries.

It knows no tables or experts. Open ``server.py`` first.
"""

__all__: list[str] = []
