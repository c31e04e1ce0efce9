"""One client for all modules of a process with the same role, so that they share connections.

A module holds a ``ModuleClient``, not a client: it pickles as the arguments of the client, and creates it at the first
use, also in a forked child, which must not use its parent's connections.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import cast

from anabranch.transport import Client
from anabranch.transport.client import ClientOptions

__all__ = ["ModuleClient", "shared_client"]

_clients: weakref.WeakValueDictionary[tuple[str, str | None, bool, int], Client] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def shared_client(
    *, role: str = "worker", keys: str | os.PathLike[str] | None = None, insecure: bool = False, retries: int = 8
) -> Client:
    """Return the client with ``role`` and ``keys``; its connections close when its last user closes it."""
    key = (role, None if keys is None else os.fspath(keys), insecure, retries)
    with _lock:
        client = _clients.get(key)
        if client is None:
            client = _clients[key] = Client(role=role, keys=keys, insecure=insecure, retries=retries)
        return client


class ModuleClient:
    """The client of a module, recreated in another process.

    Args:
        client: the client that the user gave, if any; a pickled module gets a new one with the same options.
        role: of the shared client used otherwise, with ``keys``, ``insecure`` and ``retries``.

    Raises:
        ValueError: keys that are missing or damaged.
    """

    def __init__(
        self,
        client: Client | None = None,
        *,
        role: str = "worker",
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        retries: int = 8,
    ) -> None:
        self._shared = client is None
        self._options: ClientOptions | None = None
        if client is None:
            client = shared_client(role=role, keys=keys, insecure=insecure, retries=retries)
        self._client: Client | None = client

    @property
    def client(self) -> Client:
        """The client of this process."""
        client = self._client
        if client is not None and not client.forked:
            return client
        # Without a lock that a thread of the parent may have held.
        options = self._options or cast("Client", client).options
        if self._shared:
            made = shared_client(
                role=options.role, keys=options.keys, insecure=options.insecure, retries=options.retries
            )
        else:
            made = options.make()
        self._client = made
        return made

    def __deepcopy__(self, memo: dict[int, object]) -> ModuleClient:
        # Copying a model copies no connection.
        return self

    def __getstate__(self) -> dict[str, object]:
        return {"shared": self._shared, "options": self._options or cast("Client", self._client).options}

    def __setstate__(self, state: dict[str, object]) -> None:
        self._shared = cast(bool, state["shared"])
        self._options = cast(ClientOptions, state["options"])
        # Created at the first use: where a model is only loaded, there may be no keys.
        self._client = None


def _forget_in_child() -> None:
    """Forget the client in a forked child: a module made there gets a client of the child."""
    global _lock
    _lock = threading.Lock()
    _clients.clear()


os.register_at_fork(after_in_child=_forget_in_child)
