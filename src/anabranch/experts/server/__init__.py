"""The server of experts: requests are checked, batched, computed one expert at a time, and answered.

Open ``expert_server.py`` first, then follow a request: ``scheduler.py`` and ``backend.py``.
"""

__all__: list[str] = []
