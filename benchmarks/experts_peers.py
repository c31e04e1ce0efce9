"""The figures of ``experts.py`` beside hivemind, both sides in one run, taking turns.

    make bench-peers                     # in a virtual environment of its own, with hivemind 1.1.12 from PyPI

Both serve the same modules from a process of their own on this host: Anabranch over a Unix socket, hivemind over
libp2p on the loopback, which is all it has (it encrypts; compare Anabranch's TLS, which is measured beside it).
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hivemind
import torch
from hivemind.moe.server import get_experts
from hivemind.utils.tensor_descr import BatchTensorDescriptor
from measure import keep, machine
from torch import nn

from anabranch.experts import Directory, RemoteExpert, RemoteMixtureOfExperts
from anabranch.transport import make_keys
from experts import SIZES, WIDTH, alternate, feedforward, process, row

GRID = [f"ffn.{i}.{j}" for i in range(4) for j in range(4)]


def serve_hivemind(kind: str) -> None:
    """The process of hivemind's server: prints its addresses, serves until its input ends."""
    width = 1024 if kind == "nop" else WIDTH
    backends = {}
    for index, uid in enumerate(["nop.0.0"] if kind == "nop" else GRID):
        module = nn.Identity() if kind == "nop" else feedforward(index)
        backends[uid] = hivemind.moe.ModuleBackend(
            name=uid,
            module=module,
            optimizer=None if kind == "nop" else torch.optim.Adam(module.parameters(), fused=True),
            args_schema=(BatchTensorDescriptor(width),),
            outputs_schema=BatchTensorDescriptor(width),
            max_batch_size=4096,
        )
    dht = hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    server = hivemind.moe.Server(dht, backends, num_connection_handlers=2, device="cpu")
    server.run_in_background(await_ready=True, timeout=120)
    time.sleep(2)
    print([str(address) for address in dht.get_visible_maddrs()], flush=True)
    sys.stdin.read()
    server.shutdown()
    dht.shutdown()


@contextmanager
def hivemind_process(kind: str) -> Iterator[hivemind.DHT]:
    """A DHT that knows the experts of a server in a process of its own."""
    arguments = [sys.executable, __file__, "--serve-hivemind", kind]
    with subprocess.Popen(
        arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as child:
        assert child.stdout is not None
        dht = None
        try:
            dht = hivemind.DHT(start=True, initial_peers=ast.literal_eval(child.stdout.readline()))
            yield dht
        finally:
            if dht is not None:
                dht.shutdown()
            # It leaves processes of its own behind when it is merely asked to end.
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(timeout=10)


def beside(name: str, sides: dict[str, Callable[[], object]], seconds: float) -> dict[str, object]:
    """The sides in turns; a call that fails, as large ones to hivemind sometimes do, is counted and left out."""
    failed = dict.fromkeys(sides, 0)

    def tolerant(side: str, run: Callable[[], object]) -> Callable[[], object]:
        def attempt() -> None:
            for _ in range(5):
                try:
                    run()
                    return
                except Exception as error:  # noqa: BLE001 - whatever it raises is counted
                    failed[side] += 1
                    print(f"{name}: {side}: {error!r}", file=sys.stderr)

        return attempt

    made = row(name, alternate({side: tolerant(side, run) for side, run in sides.items()}, seconds), "hivemind")
    return made | {"failed": failed} if any(failed.values()) else made


def measure_nop(seconds: float, keys: str) -> Iterator[dict[str, object]]:
    with process("nop", keys) as unix, process("nop", keys, tls=True) as tls, hivemind_process("nop") as dht:
        sides = {
            "unix": RemoteExpert("nop.0", unix),
            "tls": RemoteExpert("nop.0", tls, keys=keys),
            "hivemind": get_experts(dht, ["nop.0.0"])[0],
        }
        for name, size in SIZES.items():
            x = torch.randn(size // 4096, 1024)
            with torch.no_grad():
                calls = {side: lambda e=expert, x=x: e(x) for side, expert in sides.items()}
                yield beside(f"nop {name}", calls, seconds)


def measure_ffn(seconds: float, keys: str) -> Iterator[dict[str, object]]:
    with process("ffn", keys) as endpoint, hivemind_process("ffn") as dht:
        ours, theirs = RemoteExpert("ffn.0.0", endpoint), get_experts(dht, ["ffn.0.0"])[0]

        def step(module: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
            module(x.detach().requires_grad_()).sum().backward()

        for batch in (16, 128, 2048):
            x = torch.randn(batch, WIDTH)
            with torch.no_grad():
                sides = {"anabranch": lambda x=x: ours(x), "hivemind": lambda x=x: theirs(x)}
                yield beside(f"ffn forward, batch {batch}", sides, seconds)
            sides = {"anabranch": lambda x=x: step(ours, x), "hivemind": lambda x=x: step(theirs, x)}
            yield beside(f"ffn forward+backward+Adam, batch {batch}", sides, seconds)
        directory = Directory()
        directory.announce(GRID, endpoint, ttl=3600.0)
        mixtures = {
            "anabranch": RemoteMixtureOfExperts(WIDTH, (4, 4), directory, "ffn", k_best=4),
            "hivemind": hivemind.moe.RemoteMixtureOfExperts(
                in_features=WIDTH, grid_size=(4, 4), dht=dht, uid_prefix="ffn.", k_best=4
            ),
        }
        x = torch.randn(32, WIDTH)
        with torch.no_grad():
            forwards = {side: lambda m=mixture: m(x) for side, mixture in mixtures.items()}
            yield beside("mixture forward, batch 32, 16 experts, best 4", forwards, seconds)
        steps = {side: lambda m=mixture: m(x).sum().backward() for side, mixture in mixtures.items()}
        yield beside("mixture forward+backward, batch 32, 16 experts, best 4", steps, seconds)
        for name, backward in (("forward", False), ("forward+backward+Adam", True)):
            rates = {
                side: call_from_threads(expert, backward=backward, seconds=seconds)
                for side, expert in (("anabranch", ours), ("hivemind", theirs))
            }
            yield {
                "work": f"64 callers of one row, {name}",
                "rows_per_second": {side: round(rate) for side, rate in rates.items()},
                "ratio": {"anabranch": round(rates["anabranch"] / max(rates["hivemind"], 1e-9), 2)},
            }


def call_from_threads(expert: nn.Module, *, backward: bool, seconds: float) -> float:
    """Calls a second of 64 threads, while each makes one after the other."""
    counts = [0] * 64
    stop = threading.Event()

    def ask(index: int) -> None:
        x = torch.randn(1, WIDTH)
        while not stop.is_set():
            if backward:
                expert(x.detach().requires_grad_()).sum().backward()
            else:
                with torch.no_grad():
                    expert(x)
            counts[index] += 1

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(64)]
    for thread in threads:
        thread.start()
    stop.wait(timeout=seconds / 2)
    before, start = sum(counts), time.perf_counter()
    stop.wait(timeout=seconds)
    rate = (sum(counts) - before) / (time.perf_counter() - start)
    stop.set()
    for thread in threads:
        thread.join(timeout=60)
    return rate


MEASURES = {"nop": measure_nop, "ffn": measure_ffn}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each measurement")
    parser.add_argument("--only", default=",".join(MEASURES), help="which, comma-separated")
    parser.add_argument("--out", type=Path, default=None, help="a directory for the figures")
    parser.add_argument("--serve-hivemind", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    # Threads of hivemind's own do not take over what was set here.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.serve_hivemind:
        serve_hivemind(options.serve_hivemind)
        return
    before = machine() | {"hivemind": hivemind.__version__}
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as keys:
        make_keys(keys)
        for name in options.only.split(","):
            for made in MEASURES[name](options.seconds, keys):
                rows.append(made)
                print(json.dumps(made), flush=True)
    print(json.dumps(before))
    keep("experts_peers", before, rows, options.out)


if __name__ == "__main__":
    main()
