"""The process through which a job's members find one another: it holds the rendezvous store and the directory.

It is separate from the launcher, so that the launcher imports no torch, and a paused launcher does not delay the job.
It starts before all others, outlives them, and ends with the launcher, which holds the other end of its stdin.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack, suppress

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # defined in C++

from anabranch.experts import DirectoryServer
from anabranch.launch.socket_messages import Message, receive, send


def main() -> None:
    """Serve until the launcher closes the channel on stdin."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the job decides when it ends
        signal.signal(number, signal.SIG_IGN)
    with suppress(ConnectionError), socket.socket(fileno=os.dup(0)) as channel, ExitStack() as stack:
        received = receive(channel)
        if received is not None:
            _serve(channel, *received, stack)


def _serve(channel: socket.socket, facts: Message, descriptors: list[int], stack: ExitStack) -> None:
    store = _store(socket.socket(fileno=descriptors[0]))
    if facts["directory"] is not None:
        keys = None if facts["keys"] is None else str(facts["keys"])
        stack.enter_context(DirectoryServer(str(facts["directory"]), keys=keys))
        send(channel, {"ready": True})
    receive(channel)  # the end of the stream
    del store


def _store(listening: socket.socket) -> TCPStore:
    """Return the store for scripts that make their own process group, which outlives every rank.

    torch's own server listens on every interface and answers anyone. Here it adopts a socket that is already bound: no
    other host reaches it, and no port is guessed. (Only the store's non-libuv backend adopts a socket.)
    """
    host, port = listening.getsockname()[:2]
    descriptor = listening.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor, use_libuv=False)


if __name__ == "__main__":
    main()
