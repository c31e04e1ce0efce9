"""One client for all modules of a process with the same role, so that they share connections.

A module holds a ``ModuleClient``, not a client: it pickles as the arguments of the client, and creates it at the first
use, also in a forked child, which must not use its parent's connections.
"""

from __future__ import annotations

import os
import threading
import weakref

from anabranch.transport import Client
from anabranch.transport.client import ClientOptions

_clients: weakref.WeakValueDictionary[ClientOptions, Client] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def shared_client(options: ClientOptions) -> Client:
    """Return this process's client of these options; its connections close when its last user closes it."""
    with _lock:
        client = _clients.get(options)
        if client is None:
            client = _clients[options] = options.make()
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
        self._options: ClientOptions | None = None  # of the user's own, once it is pickled
        if client is None:
            folder = None if keys is None else os.fspath(keys)
            self._options = ClientOptions(role, folder, insecure, heartbeat=1.0, retries=retries)
            client = shared_client(self._options)
        self._client: Client | None = client

    @property
    def client(self) -> Client:
        """The client of this process."""
        client = self._client
        if client is None or client.forked:
            # Without a lock that a thread of the parent may have held.
            options = self._its_options()
            client = self._client = shared_client(options) if self._shared else options.make()
        return client

    def _its_options(self) -> ClientOptions:
        if self._options is None:
            assert self._client is not None
            return self._client.options
        return self._options

    def __deepcopy__(self, memo: dict[int, object]) -> ModuleClient:
        # Copying a model copies no connection.
        return self

    def __getstate__(self) -> dict[str, object]:
        # Created at the first use: where a model is only loaded, there may be no keys.
        return {"_shared": self._shared, "_options": self._its_options(), "_client": None}


def _forget_in_child() -> None:
    """Forget the client in a forked child: a module made there gets a client of the child."""
    global _lock
    _lock = threading.Lock()
    _clients.clear()


os.register_at_fork(after_in_child=_forget_in_child)
