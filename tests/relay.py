"""The cable between two network namespaces: passes packets from one TUN device to the other, late, slowly or not.

Run as a program. It makes two devices, prints their names, and ends when its stdin does. Each line there cuts the cable
for so many seconds: it prints "cut", and at the end how many packets it has swallowed.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque
from contextlib import suppress

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_PACKET_BYTES = 65536
_QUEUE_BYTES = 1 << 20


class _Direction:
    """Packets on their way from one device to the other, the first to arrive first."""

    def __init__(self, into: int, delay: float, bits_per_second: float) -> None:
        self._into, self._delay, self._bits_per_second = into, delay, bits_per_second
        self._way: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self._sent_at = 0.0

    def take(self, packet: bytes, now: float) -> None:
        """Queue a packet, or drop it if too many are queued."""
        if self._bytes + len(packet) > _QUEUE_BYTES:
            return
        self._sent_at = max(now, self._sent_at) + len(packet) * 8 / self._bits_per_second
        self._way.append((self._sent_at + self._delay, packet))
        self._bytes += len(packet)

    def deliver(self, now: float) -> float | None:
        """Deliver the packets that have arrived, and return the seconds until the next one."""
        while self._way and self._way[0][0] <= now:
            packet = self._way.popleft()[1]
            self._bytes -= len(packet)
            with suppress(OSError):  # the device is not up yet, or its host is gone
                os.write(self._into, packet)
        return self._way[0][0] - now if self._way else None


def main(delay: float, bits_per_second: float) -> None:
    """Relay until stdin ends."""
    devices = [_device(f"ab{os.getpid()}-{side}") for side in "ab"]
    ways = {devices[i]: _Direction(devices[1 - i], delay, bits_per_second) for i in range(2)}
    swallowed, cut_until = 0, 0.0
    with selectors.DefaultSelector() as selector:
        for descriptor in (0, *devices):
            selector.register(descriptor, selectors.EVENT_READ)
        while True:
            now = time.monotonic()
            if cut_until and now >= cut_until:
                print(swallowed, flush=True)
                cut_until = 0.0
            waits = [way.deliver(now) for way in ways.values()] + ([cut_until - now] if cut_until else [])
            for key, _ in selector.select(min((wait for wait in waits if wait is not None), default=None)):
                if key.fd in ways:
                    packet = _packet(key.fd)
                    if packet is None:
                        selector.unregister(key.fd)
                    elif time.monotonic() < cut_until:
                        swallowed += 1
                    else:
                        ways[key.fd].take(packet, time.monotonic())
                elif line := os.read(0, _PACKET_BYTES):
                    cut_until = time.monotonic() + float(line)
                    print("cut", flush=True)
                else:
                    return


def _packet(device: int) -> bytes | None:
    """Return one packet; ``None`` if the host and its device are gone."""
    try:
        return os.read(device, _PACKET_BYTES)
    except OSError:
        return None


def _device(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    print(name, flush=True)
    return descriptor


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
