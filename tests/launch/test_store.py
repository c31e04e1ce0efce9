"""The rendezvous store is reachable from this machine alone."""

from __future__ import annotations

from pathlib import Path

from anabranch.launch.meeting.rendezvous import Rendezvous

LISTENING = "0A"
LOOPBACK = "0100007F"


def listening_addresses(port: int) -> set[str]:
    """The local addresses, in the kernel's hexadecimal, on which somebody listens at the port."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    ends = [row[1].split(":") for row in rows if row[3] == LISTENING]
    return {address for address, end in ends if int(end, 16) == port}


def test_the_store_listens_on_the_loopback_alone() -> None:
    with Rendezvous(None) as rendezvous:
        assert listening_addresses(rendezvous.port) == {LOOPBACK}
