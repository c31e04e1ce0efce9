"""The process in which a job's members find one another: it holds the rendezvous store and the directory.

Apart from the launcher, so that the launcher imports no torch, and a launcher that is paused holds nobody up. It is
there before all others, outlives them, and dies with the launcher, to which its stdin leads.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack, suppress

from anabranch.experts import DirectoryServer
from anabranch.launch.forks.fork_messages import Message, receive, send
from anabranch.launch.meeting.store import host_store

__all__ = ["main"]


def main() -> None:
    """Serve until the launcher closes the channel on stdin."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the job decides when it is over
        signal.signal(number, signal.SIG_IGN)
    with suppress(ConnectionError), socket.socket(fileno=os.dup(0)) as channel, ExitStack() as stack:
        received = receive(channel)
        if received is not None:
            _serve(channel, *received, stack)


def _serve(channel: socket.socket, facts: Message, descriptors: list[int], stack: ExitStack) -> None:
    store = host_store(socket.socket(fileno=descriptors[0]))
    directory = None
    if facts["directory"] is not None:
        keys = facts["keys"]
        server = DirectoryServer(str(facts["directory"]), keys=None if keys is None else str(keys))
        directory = stack.enter_context(server).directory
        send(channel, {"ready": True})
    while (question := receive(channel)) is not None:
        uid = str(question[0]["uid"])
        send(channel, {"found": directory is not None and bool(directory.lookup([uid]))})
    del store


if __name__ == "__main__":
    main()
