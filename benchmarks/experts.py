"""What experts on the far side cost: calls that do nothing, calls that compute, mixtures, many small callers, overload.

    python benchmarks/experts.py [--seconds 2] [--only nop,ffn,mixture,callers,overload] [--out DIR]

The server is another process, on a Unix socket and under TLS. Where there is something to compare with it runs in the
same run, alternating: the same module in this process. Ratios count, absolute times do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import cast

import torch
from measure import alternate_for, keep, machine, options_of
from torch import nn

from anabranch.errors import DeadlineExceeded, Overloaded
from anabranch.experts import Directory, ExpertBackend, ExpertServer, RemoteExpert, RemoteMixtureOfExperts, Schema
from anabranch.experts.client.calls import Calls, ExpertCall, call_experts
from anabranch.experts.client.remote_expert import fetch_schema
from anabranch.tensors import TensorSpec
from anabranch.transport import Client, Deadline, make_keys
from transport import bare, let_go

SIZES = {"64 KiB": 64 << 10, "2 MiB": 2 << 20, "8 MiB": 8 << 20}
WIDTH = 512


DEVICE_ROWS, DEVICE_SECONDS = 4, 0.1


class Device(nn.Module):
    """A device of known rate, so slow that the processors have little to do even under ten times its load."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(DEVICE_SECONDS)
        return x + 1


def feedforward(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))


def serve(kind: str, listen: str, keys: str) -> None:
    """The process of a server: prints its endpoint, serves until its input ends."""
    backends: list[ExpertBackend] = []
    if kind == "nop":
        backends = [ExpertBackend("nop.0", nn.Identity(), args_schema=[TensorSpec(1024)], max_batch_size=1 << 16)]
    if kind == "device":
        limits = {"max_batch_size": DEVICE_ROWS, "max_queue_rows": 2 * DEVICE_ROWS}
        schema = TensorSpec(2)
        backends = [ExpertBackend("device.0", Device(), args_schema=[schema], outputs_schema=schema, **limits)]
    # Waits for the 64th row, at most 10 ms.
    full = {"min_batch_size": 64, "timeout": 0.01, "keep_activations": 4096} if "full" in kind else {}
    # "ffn" serves all of a grid of 4 x 4, "ffn 2" its third row.
    row_of_grid = kind.removeprefix("ffn ")
    every = range(16 if kind.startswith("ffn") else 0)
    for index in range(4 * int(row_of_grid), 4 * int(row_of_grid) + 4) if row_of_grid.isdecimal() else every:
        module = feedforward(index)
        optimizer = torch.optim.Adam(module.parameters(), fused=True)
        backends.append(
            ExpertBackend(f"ffn.{index // 4}.{index % 4}", module, optimizer, args_schema=[TensorSpec(WIDTH)], **full)
        )
    with ExpertServer(backends, listen=None if listen == "-" else listen, keys=keys) as server:
        print(server.endpoint, flush=True)
        sys.stdin.read()


@contextmanager
def process(kind: str, keys: str, *, tls: bool = False) -> Iterator[str]:
    """The endpoint of a server in a process of its own."""
    arguments = [sys.executable, __file__, "--serve", kind, "tcp://127.0.0.1:0" if tls else "-", keys]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield child.stdout.readline().strip()
        finally:
            let_go(child)


def row(name: str, times: dict[str, list[float]], over: str | None = None) -> dict[str, object]:
    medians = {side: round(statistics.median(values), 4) for side, values in times.items()}
    made: dict[str, object] = {
        "work": name,
        "rounds": len(next(iter(times.values()))),
        "median_ms": medians,
        "minimum_ms": {side: round(min(values), 4) for side, values in times.items()},
    }
    if over is not None:
        made["ratio"] = {side: round(medians[side] / medians[over], 3) for side in medians if side != over}
    return made


def measure_nop(seconds: float, keys: str) -> Iterator[dict[str, object]]:
    """A call that does nothing: what is left is the way; beside it the least a socket can do, a bare echo."""
    with ExitStack() as stack:
        sides: dict[str, Callable[[torch.Tensor], object]] = {}
        for kind in ("unix", "tls"):
            endpoint = stack.enter_context(process("nop", keys, tls=kind == "tls"))
            sides[kind] = RemoteExpert("nop.0", endpoint, keys=keys if kind == "tls" else None)
            sides[f"{kind} echo"] = stack.enter_context(bare(kind, keys))
        for name, size in SIZES.items():
            x = torch.randn(size // 4096, 1024)
            with torch.no_grad():
                times = alternate_for({side: lambda run=run, x=x: run(x) for side, run in sides.items()}, seconds)
            made = row(f"nop {name}", times)
            medians = cast(dict[str, float], made["median_ms"])
            made["ratio"] = {kind: round(medians[kind] / medians[f"{kind} echo"], 2) for kind in ("unix", "tls")}
            yield made


def measure_ffn(seconds: float, keys: str) -> Iterator[dict[str, object]]:
    """A feed-forward expert of width 512, against the same module here."""
    here = feedforward()
    optimizer = torch.optim.Adam(here.parameters(), fused=True)

    def step(module: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, *, local: bool) -> None:
        module(x.requires_grad_()).sum().backward()
        x.grad = None
        if local:
            optimizer.step()
            optimizer.zero_grad()

    def recomputed(x: torch.Tensor) -> None:
        with torch.no_grad():
            here(x)
        step(here, x, local=True)

    with process("ffn", keys) as endpoint:
        there = RemoteExpert("ffn.0.0", endpoint)
        for batch in (16, 128, 2048):
            x = torch.randn(batch, WIDTH)
            with torch.no_grad():
                sides = {"here": lambda x=x: here(x), "expert": lambda x=x: there(x)}
                yield row(f"ffn forward, batch {batch}", alternate_for(sides, seconds), "here")
            sides = {
                "here, recomputing": lambda x=x: recomputed(x),
                "expert": lambda x=x: step(there, x, local=False),
            }
            yield row(f"ffn forward+backward+Adam, batch {batch}", alternate_for(sides, seconds), "here, recomputing")


def measure_mixture(seconds: float, keys: str) -> Iterator[dict[str, object]]:
    """Batch 32, 16 experts on 4 servers, the best 4 a row.

    "here" is what the servers have to compute, in this process: all experts, each with its share of the rows.
    """
    directory = Directory()
    modules = [feedforward(index) for index in range(16)]
    optimizers = [torch.optim.Adam(module.parameters(), fused=True) for module in modules]
    share = torch.randn(32 * 4 // 16, WIDTH)

    def forwards() -> None:
        with torch.no_grad():
            for module in modules:
                module(share)

    def steps() -> None:
        forwards()
        for module, optimizer in zip(modules, optimizers, strict=True):
            module(share.detach().requires_grad_()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with ExitStack() as stack:
        for i in range(4):
            endpoint = stack.enter_context(process(f"ffn {i}", keys))
            directory.announce([f"ffn.{i}.{j}" for j in range(4)], endpoint, ttl=3600.0)
        mixture = RemoteMixtureOfExperts(WIDTH, (4, 4), directory, "ffn", k_best=4)
        x = torch.randn(32, WIDTH)
        sides: dict[str, Callable[[], object]] = {"here": forwards, "mixture": lambda: mixture(x)}
        with torch.no_grad():
            times = alternate_for(sides, seconds)
        yield row("mixture forward, batch 32, 16 experts on 4 servers, best 4", times, "here")
        before = mixture.statistics().calls
        sides = {"here, recomputing": steps, "mixture": lambda: mixture(x).sum().backward()}
        times = alternate_for(sides, seconds)
        made = row(
            "mixture forward+backward+Adam, batch 32, 16 experts on 4 servers, best 4", times, "here, recomputing"
        )
        facts = mixture.statistics()
        made["calls_a_step"] = round((facts.calls - before) / (2 * len(times["mixture"]) + 1), 2)
        made["experts_chosen"] = len(facts.rows)
        yield made


def measure_callers(seconds: float, keys: str) -> Iterator[dict[str, object]]:
    """64 clients, each with a connection of its own, send a row each, against the module here on batches of 64.

    Once one thread asks for all of them, as a mixture does, and once each has a thread. "recomputing" is what a server
    that keeps no activations has to compute at least, on full batches and with no way to go: its ratio is the bound.
    """
    here = feedforward()
    optimizer = torch.optim.Adam(here.parameters(), fused=True)
    x = torch.randn(64, WIDTH)
    rows = [torch.randn(1, WIDTH) for _ in range(64)]

    def step() -> None:
        here(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def forward() -> None:
        with torch.no_grad():
            here(x)

    def recomputed() -> None:
        forward()
        here(x.detach().requires_grad_()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def ask(calls: Calls, *, backward: bool) -> None:
        with torch.set_grad_enabled(backward):
            answers = call_experts(calls)
        if backward:
            torch.cat([cast(list[torch.Tensor], answer)[0] for answer in answers]).sum().backward()

    for kind in ("ffn", "ffn, full batches"):
        with process(kind, keys) as endpoint, Client() as client:
            client.most_idle = 64
            schema = fetch_schema(client, "ffn.0.0", endpoint, Deadline.after(30.0))

            def all_at_once(client: Client = client, schema: Schema = schema, endpoint: str = endpoint) -> Calls:
                calls = [ExpertCall("ffn.0.0", endpoint, schema, [row], 1) for row in rows]
                return Calls(client, calls, Deadline.after(30.0), 30.0)

            sides: dict[str, Callable[[], object]] = {
                "here": forward,
                "experts": lambda make=all_at_once: ask(make(), backward=False),
            }
            yield rate_row(f"64 clients of one row on one thread, {kind}, forward", alternate_for(sides, seconds))
            sides = {
                "here": step,
                "here, recomputing": recomputed,
                "experts": lambda make=all_at_once: ask(make(), backward=True),
            }
            name = f"64 clients of one row on one thread, {kind}, forward+backward+Adam"
            yield rate_row(name, alternate_for(sides, seconds))
    with process("ffn", keys) as endpoint:
        expert = RemoteExpert("ffn.0.0", endpoint)
        for name, local, backward in (("forward", forward, False), ("forward+backward+Adam", step, True)):
            local_ms = statistics.median(alternate_for({"here": local}, seconds / 2)["here"])
            rate, _ = call_from_threads(expert, backward=backward, seconds=seconds)
            rows_here = 64 / local_ms * 1e3
            yield {
                "work": f"64 clients of one row on 64 threads, {name}",
                "rows_per_second": {"experts": round(rate), "here, batch 64": round(rows_here)},
                "ratio": {"experts": round(rate / rows_here, 3)},
            }


def rate_row(name: str, times: dict[str, list[float]]) -> dict[str, object]:
    """Rates as shares of the local one, by medians and by the quietest rounds."""
    made = row(name, times)
    here = times["here"]
    made["ratio"] = {
        side: round(statistics.median(here) / statistics.median(values), 3) for side, values in times.items()
    }
    made["ratio_of_minima"] = {side: round(min(here) / min(values), 3) for side, values in times.items()}
    return made


def call_from_threads(expert: nn.Module, *, backward: bool, seconds: float) -> tuple[float, str]:
    """Calls a second of 64 threads, while each makes one after the other, and an error if there was one.

    Counted once every thread has been answered, or after ten times as long.
    """
    counts = [0] * 64
    errors: list[str] = []
    stop = threading.Event()

    def ask(index: int) -> None:
        x = torch.randn(1, WIDTH)
        while not stop.is_set():
            try:
                if backward:
                    expert(x.detach().requires_grad_()).sum().backward()
                else:
                    with torch.no_grad():
                        expert(x)
            except Exception as error:  # noqa: BLE001 - whatever it raises is told
                errors.append(repr(error)[:300])
                return
            counts[index] += 1

    # Daemons: a call of hivemind that never returns must not hold the process.
    threads = [threading.Thread(target=ask, args=(index,), daemon=True) for index in range(64)]
    for thread in threads:
        thread.start()
    until = time.perf_counter() + 10 * seconds
    while not all(counts) and time.perf_counter() < until and not errors:
        stop.wait(timeout=0.01)
    before, start = sum(counts), time.perf_counter()
    stop.wait(timeout=seconds)
    rate = (sum(counts) - before) / (time.perf_counter() - start)
    stop.set()
    until = time.perf_counter() + 30.0
    for thread in threads:
        thread.join(timeout=max(until - time.perf_counter(), 0.0))
    return rate, errors[0] if errors else ""


def measure_overload(seconds: float, keys: str) -> Iterator[dict[str, object]]:
    """Rows a second that are answered within a second, with two callers and with ten for each row of a batch."""
    counts: dict[str, list[int]] = {"2 x": [], "10 x": []}
    declined = 0
    with process("device", keys) as endpoint:
        for _ in range(3):
            for name, callers in (("2 x", 2 * DEVICE_ROWS), ("10 x", 10 * DEVICE_ROWS)):
                answered, refused = offer(endpoint, callers, seconds)
                counts[name].append(answered)
                declined += refused if name == "10 x" else 0
    rates = {name: round(statistics.median(found) / seconds, 1) for name, found in counts.items()}
    yield {
        "work": f"overload: a device of {DEVICE_ROWS / DEVICE_SECONDS:.0f} rows a second, callers of one row",
        "rows_per_second": rates,
        "declined": declined,
        "ratio": round(rates["10 x"] / rates["2 x"], 3),
    }


def offer(endpoint: str, callers: int, seconds: float) -> tuple[int, int]:
    """Calls answered and declined when so many threads ask for one row after the other; a declined one asks again after
    the time of a batch.
    """
    answered, declined = [0] * callers, [0] * callers
    stop = threading.Event()

    def ask(index: int) -> None:
        expert = RemoteExpert("device.0", endpoint, forward_timeout=1.0)
        x = torch.ones(1, 2)
        with torch.no_grad():
            while not stop.is_set():
                try:
                    expert(x)
                    answered[index] += 1
                except (Overloaded, DeadlineExceeded):
                    declined[index] += 1
                    stop.wait(timeout=DEVICE_SECONDS)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(callers)]
    for thread in threads:
        thread.start()
    stop.wait(timeout=seconds)
    stop.set()
    for thread in threads:
        thread.join(timeout=30)
    return sum(answered), sum(declined)


MEASURES = {
    "nop": measure_nop,
    "ffn": measure_ffn,
    "mixture": measure_mixture,
    "callers": measure_callers,
    "overload": measure_overload,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each measurement")
    parser.add_argument("--only", default=",".join(MEASURES), help="which, comma-separated")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.serve:
        serve(*options.serve)
        return
    before = machine()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as keys:
        make_keys(keys)
        for name in options.only.split(","):
            for made in MEASURES[name](options.seconds, keys):
                rows.append(made)
                print(json.dumps(made), flush=True)
    print(json.dumps(before))
    keep("experts", before, rows, options.out)


if __name__ == "__main__":
    main()
