"""One client for all modules of a process with the same role, so that they share connections."""

from __future__ import annotations

import os
import threading
import weakref

from anabranch.transport import Client

__all__ = ["shared_client"]

_clients: weakref.WeakValueDictionary[tuple[str, str | None, bool, int], Client] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def shared_client(
    *, role: str = "worker", keys: str | os.PathLike[str] | None = None, insecure: bool = False, retries: int = 8
) -> Client:
    """Return the client with ``role`` and ``keys``; its connections close when its last user is gone."""
    key = (role, None if keys is None else os.fspath(keys), insecure, retries)
    with _lock:
        client = _clients.get(key)
        if client is None:
            client = _clients[key] = Client(role=role, keys=keys, insecure=insecure, retries=retries)
        return client


def _forget_in_child() -> None:
    """Forget the client in a forked child: a module that is made there gets one of the child's own."""
    global _lock
    _lock = threading.Lock()
    _clients.clear()


os.register_at_fork(after_in_child=_forget_in_child)
