"""Round trips of one tensor each way, against a bare echo of the same bytes over the same kind of socket.

    python benchmarks/transport.py [--seconds 2] [--out DIR]

Both sides run in one run, alternating, each with its server in another process; ratios count, absolute times do not.
The bare echo knows the size beforehand, checks nothing and reuses one buffer: it is the least a socket can do.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from measure import alternate_for, keep, machine, options_of

from anabranch.deadline import Deadline
from anabranch.transport import Call, Client, Request, Server, Verb, make_keys
from anabranch.transport.certificates import client_context, server_context

SIZES = {"64 KiB": 64 << 10, "2 MiB": 2 << 20, "8 MiB": 8 << 20}


def serve(listen: str | None, keys: str | None) -> None:
    """The process of our server: prints its endpoint, serves until its input ends."""

    def echo(call: Call) -> None:
        call.reply(call.tensors)

    with Server([Verb("echo", echo)], listen=listen, keys=keys) as server:
        print(server.endpoint, flush=True)
        sys.stdin.read()


def serve_bare(kind: str, keys: str, path: str) -> None:
    """The process of the bare echo: 8 bytes of size, then so many bytes there and back."""
    family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
    listener = socket.socket(family)
    listener.bind(path if kind == "unix" else ("127.0.0.1", 0))
    listener.listen()
    print(path if kind == "unix" else listener.getsockname()[1], flush=True)
    sock, _ = listener.accept()
    prepare(sock, kind)
    if kind == "tls":
        sock = server_context(Path(keys), "experts").wrap_socket(sock, server_side=True)
    memory = memoryview(bytearray(max(SIZES.values())))
    size = memoryview(bytearray(8))
    while receive(sock, size):
        count = int.from_bytes(size, "little")
        receive(sock, memory[:count])
        sock.sendall(memory[:count])


def prepare(sock: socket.socket, kind: str) -> None:
    if kind == "unix":
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def receive(sock: socket.socket, view: memoryview) -> bool:
    while view:
        count = sock.recv_into(view)
        if not count:
            return False
        view = view[count:]
    return True


@contextmanager
def process(*arguments: str) -> Iterator[str]:
    """A server in a process of its own, and what it prints first."""
    with subprocess.Popen(
        [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        try:
            yield child.stdout.readline().strip()
        finally:
            let_go(child)


def let_go(child: subprocess.Popen[str]) -> None:
    """Ends a server by the end of its input, so that it removes its socket; by force if it does not hear."""
    assert child.stdin is not None
    child.stdin.close()
    try:
        child.wait(timeout=10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait(timeout=10)


@contextmanager
def ours(kind: str, keys: str) -> Iterator[Callable[[torch.Tensor], None]]:
    listen = "tcp://127.0.0.1:0" if kind == "tls" else "-"
    with process("--serve", listen, keys) as endpoint, Client(keys=keys) as client:

        def round_trip(tensor: torch.Tensor) -> None:
            client.call(Request(endpoint, "echo", tensors=[tensor]), Deadline.after(30.0))

        yield round_trip


@contextmanager
def bare(kind: str, keys: str) -> Iterator[Callable[[torch.Tensor], None]]:
    path = f"{keys}/bare-{kind}"
    with process("--serve-bare", kind, keys, path) as address:
        sock = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
        prepare(sock, kind)
        sock.connect(address if kind == "unix" else ("127.0.0.1", int(address)))
        if kind == "tls":
            sock = client_context(Path(keys), "worker").wrap_socket(sock)
        into = memoryview(bytearray(max(SIZES.values())))
        with sock:

            def round_trip(tensor: torch.Tensor) -> None:
                memory = tensor.numpy().data.cast("B")
                sock.sendall(len(memory).to_bytes(8, "little"))
                sock.sendall(memory)
                receive(sock, into[: len(memory)])

            yield round_trip


def measure(seconds: float) -> list[dict[str, object]]:
    """A row for each kind of socket and size, the two sides alternating."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as keys, ExitStack() as stack:
        make_keys(keys)
        for kind in ("unix", "tls"):
            sides = {"anabranch": stack.enter_context(ours(kind, keys)), "echo": stack.enter_context(bare(kind, keys))}
            for name, size in SIZES.items():
                tensor = torch.randn(size // 4)
                runs = {side: partial(round_trip, tensor) for side, round_trip in sides.items()}
                rows.append(summary(kind, name, alternate_for(runs, seconds, runs=1)))
    return rows


def summary(kind: str, name: str, times: dict[str, list[float]]) -> dict[str, object]:
    medians = {side: statistics.median(values) for side, values in times.items()}
    return {
        "socket": kind,
        "size": name,
        "rounds": len(times["echo"]),
        "median_ms": medians,
        "minimum_ms": {side: min(values) for side, values in times.items()},
        "ratio": medians["anabranch"] / medians["echo"],
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each kind of socket and size")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--serve-bare", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        listen, keys = options.serve
        serve(None if listen == "-" else listen, keys)
        return
    if options.serve_bare:
        serve_bare(*options.serve_bare)
        return
    before = machine()
    rows = measure(options.seconds)
    print(f"{'socket':8}{'size':8}{'anabranch ms':>14}{'echo ms':>10}{'ratio':>8}")
    for row in rows:
        medians = row["median_ms"]
        assert isinstance(medians, dict)
        print(f"{row['socket']:8}{row['size']:8}{medians['anabranch']:14.3f}{medians['echo']:10.3f}{row['ratio']:8.2f}")
    print(json.dumps(before))
    keep("transport", before, rows, options.out, bars="ratio", by=("socket", "size"))


if __name__ == "__main__":
    main()
