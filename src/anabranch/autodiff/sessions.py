"""Which sessions are recording, and what that means for a backward sweep over the graph they share.

All sessions of a thread record one torch graph, so a sweep must leave it whole while another session may still need
it, and must itself be recorded if an outer session watches:

- ``retain_graph`` if any other session is recording, or could: a sweep that frees the graph would end it for all;
- ``create_graph`` if a session that began earlier, and is no sibling of the sweeping one, is recording.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

__all__ = ["Session", "begin", "end", "live", "sweep_flags"]


class Session(Protocol):
    """What the registry needs of a session: the group whose members do not record one another, if any."""

    @property
    def siblings(self) -> object | None:
        """An object shared by the members of a group; ``None`` outside one."""


class _Recording(threading.local):
    """The sessions of one thread, oldest first; weak, so that an abandoned session vanishes."""

    def __init__(self) -> None:
        self.sessions: list[weakref.ref[Session]] = []


_recording = _Recording()


def begin(session: Session) -> None:
    """``session`` records from here on."""
    _recording.sessions.append(weakref.ref(session))


def end(session: Session) -> None:
    """``session`` records no more; nothing happens if it did not."""
    sessions = _recording.sessions
    if len(sessions) == 1 and sessions[0]() is session:
        sessions.clear()
        return
    _recording.sessions = [ref for ref in sessions if ref() is not None and ref() is not session]


def live() -> list[Session]:
    """This thread's recording sessions, oldest first."""
    return [session for ref in _recording.sessions if (session := ref()) is not None]


def sweep_flags(session: Session) -> tuple[bool, bool]:
    """``(retain_graph, create_graph)`` for a backward sweep of ``session``, by the rules above."""
    if len(_recording.sessions) == 1:  # the common case: nobody else
        return False, False
    sessions = live()
    create = False
    for other in sessions:
        if other is session:
            break
        create = create or other.siblings is None or other.siblings is not session.siblings
    return len(sessions) > 1, create
