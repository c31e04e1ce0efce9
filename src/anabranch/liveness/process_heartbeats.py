"""Liveness of a job's ranks, checked by a rank while it waits for the others.

A frozen peer keeps its sockets open and acknowledges data, so gloo waits for its whole timeout. Ranks therefore
watch each other outside the collectives::

    a peer on this host      /proc says whether it runs, is stopped, or is gone; asked while waiting, no thread needed
    a peer elsewhere         writes a counter to the job's store every heartbeat; a counter that stands still for two
                             heartbeats means that the peer is lost

A peer on this host that merely holds its interpreter's lock (a long import, a compilation) counts as running and is
waited for until the deadline; if it is stopped in two checks, one heartbeat apart, it is lost. Two ranks share a host
if they have the same kernel boot id and pid namespace; names are not compared.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Protocol

__all__ = ["Identity", "ProcessHeartbeats", "Store"]

_STOPPED = frozenset("Tt")
_GONE = frozenset("ZXx")


class Store(Protocol):
    """The methods of a ``torch.distributed`` store that are used here."""

    def set(self, key: str, value: str) -> None:
        """Store ``value`` under ``key``."""
        ...

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values under ``keys``, waiting for those that are not set yet."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Return True if all of ``keys`` have been set."""
        ...


@dataclass(frozen=True, slots=True)
class Identity:
    """A process, distinct from any other that ever had its pid: its host, its pid, and its start time."""

    host: str
    pid: int
    started: str

    @classmethod
    def of_this_process(cls) -> Identity:
        """Return the identity of the calling process."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        pid = os.getpid()
        return cls(f"{boot}/{namespace}", pid, _process_status(pid)[1])

    def encode(self) -> str:
        """Return the identity as a string, for another rank to ``decode``."""
        return f"{self.host} {self.pid} {self.started}"

    @classmethod
    def decode(cls, text: str) -> Identity:
        """Return the identity written by ``encode``."""
        host, pid, started = text.split(" ")
        return cls(host, int(pid), started)


def _process_status(pid: int) -> tuple[str, str]:
    """Return the state letter and start time of a process, ``("X", "")`` when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X", ""
    # The command's name is in parentheses and may itself contain spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split(" ")
    return fields[0], fields[19]


class ProcessHeartbeats:
    """Watches the other ranks of a group; a context manager.

    Args:
        identities: the identity of every rank watched, by its rank in the job; this process's own among them.
        rank: this process's rank.
        store: where ranks on other hosts write their beats; needed only if there are other hosts.
        heartbeat: seconds between two beats; a lost peer is known within two.
        clock: seconds that never run backwards.
    """

    def __init__(
        self,
        identities: Mapping[int, Identity],
        rank: int,
        *,
        store: Store | None = None,
        heartbeat: float = 1.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        if not heartbeat > 0:
            raise ValueError(f"heartbeat is a number of seconds above 0, got {heartbeat!r}")
        self.heartbeat = heartbeat
        self._rank = rank
        self._clock = clock
        self._here = identities[rank].host
        self._near: dict[int, Identity] = {}
        self._far: list[int] = []
        self._stopped_since: dict[int, float] = {}
        self._counters: dict[int, tuple[bytes, float]] = {}
        self._store = store
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        for peer, who in identities.items():
            if peer != rank:
                self.watch(peer, who)

    def watch(self, peer: int, who: Identity) -> None:
        """Watches one more rank."""
        if who.host == self._here:
            self._near[peer] = who
            return
        if self._store is None:
            raise ValueError(
                f"rank {peer} runs on another host; give ProcessHeartbeats the job's store to receive its beats"
            )
        self._far.append(peer)
        if self._thread is None:
            self._beat(0)
            self._thread = threading.Thread(target=self._run, name="anabranch-beats", daemon=True)
            self._thread.start()

    def lost(self) -> dict[int, str]:
        """Return the ranks known to be lost, each with the reason.

        Only a frozen rank is reported: those that ended in the meantime may have ended because of it. While a rank is
        stopped and may or may not have frozen, no rank is reported, for a heartbeat at most.
        """
        now = self._clock()
        frozen = self._stopped_here(now)
        for peer, (_, seen) in list(self._counters.items()):
            if now - seen > 2 * self.heartbeat:
                frozen[peer] = f"sent no beat for {now - seen:.1f} s"
        return frozen or ({} if self._stopped_since else self.gone())

    def gone(self) -> dict[int, str]:
        """Return the ranks of this host whose process has ended: known at once, without waiting for a beat."""
        return {peer: "its process has ended" for peer, who in list(self._near.items()) if _has_ended(who)}

    def _stopped_here(self, now: float) -> dict[int, str]:
        found = {}
        for peer, who in list(self._near.items()):
            if _process_status(who.pid)[0] not in _STOPPED:
                self._stopped_since.pop(peer, None)
            elif now - self._stopped_since.setdefault(peer, now) >= self.heartbeat:
                found[peer] = "its process is stopped"
        return found

    def _run(self) -> None:
        count = 0
        while not self._closing.wait(self.heartbeat):
            count += 1
            try:
                self._beat(count)
            except RuntimeError:
                # The store is gone, and every rank's beats with it: waiting ranks will name the missing ones.
                return

    def _beat(self, count: int) -> None:
        assert self._store is not None
        self._store.set(_beat_of(self._rank), str(count))
        far = [peer for peer in self._far if peer in self._counters or self._store.check([_beat_of(peer)])]
        counters = self._store.multi_get([_beat_of(peer) for peer in far]) if far else []
        now = self._clock()
        for peer, counter in zip(far, counters, strict=True):
            if self._counters.get(peer, (None,))[0] != counter:
                self._counters[peer] = (counter, now)

    def close(self) -> None:
        """Stop beating; the thread has ended when this returns."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(2 * self.heartbeat + 1.0)
            self._thread = None

    def __enter__(self) -> ProcessHeartbeats:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _beat_of(rank: int) -> str:
    return f"anabranch/beat/{rank}"


def _has_ended(who: Identity) -> bool:
    state, started = _process_status(who.pid)
    return state in _GONE or started != who.started
