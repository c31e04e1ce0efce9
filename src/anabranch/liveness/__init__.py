"""The processes of a ``torch.distributed`` job: how they meet, which of them are lost, and waits that end with a name.

Open ``group.py`` first: every wait for other ranks is there. ``membership.py`` says which processes are the workers,
``meeting.py`` is where they come together, and ``peers.py`` watches them, by ``/proc`` on this host and by the beats of
``watcher.py`` elsewhere. Servers and experts are not peers: their clients watch them, see ``transport``.
"""

from __future__ import annotations

__all__: list[str] = []
