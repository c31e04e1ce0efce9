"""The figures of ``experts.py`` beside hivemind, both sides in one run, taking turns.

    make bench-peers                     # in a virtual environment of its own, with hivemind 1.1.12 from PyPI

Both serve the same modules from a process of their own on this host: Anabranch over a Unix socket, hivemind over
libp2p on the loopback, which is all it has (it encrypts; compare Anabranch's TLS, which is measured beside it).

hivemind forks processes out of one with threads, and its calls have no deadline, so now and then one never returns.
Each measurement therefore runs in a session of processes of its own that ends, by force, at its limit; it is tried
again, and what cannot be had is a row that says why.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

import hivemind
import torch
from hivemind.moe.client.remote_expert_worker import RemoteExpertWorker
from hivemind.moe.server import get_experts
from hivemind.utils.tensor_descr import BatchTensorDescriptor
from measure import keep, machine, options_of
from torch import nn

from anabranch.experts import Directory, RemoteExpert, RemoteMixtureOfExperts
from anabranch.transport import make_keys
from experts import SIZES, WIDTH, call_from_threads, feedforward, process, row

GRID = [f"ffn.{i}.{j}" for i in range(4) for j in range(4)]
ATTEMPTS = 3
# Of one call to hivemind, and of its start.
LONGEST_CALL = 30.0
LONGEST_START = 60.0


def serve_hivemind(kind: str) -> None:
    """The process of hivemind's server: prints its addresses, serves until it is killed."""
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
    dht = start_dht(host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    server = hivemind.moe.Server(dht, backends, num_connection_handlers=2, device="cpu")
    server.run_in_background(await_ready=True, timeout=LONGEST_START)
    time.sleep(2)
    print([str(address) for address in dht.get_visible_maddrs()], flush=True)
    sys.stdin.read()


def start_dht(**options: object) -> hivemind.DHT:
    dht = hivemind.DHT(start=False, **options)
    dht.run_in_background(await_ready=True, timeout=LONGEST_START)
    return dht


@contextmanager
def hivemind_process(kind: str) -> Iterator[hivemind.DHT]:
    """A DHT that knows the experts of a server in a process of its own, which ends with the measurement's session."""
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            [sys.executable, __file__, "--serve-hivemind", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        assert child.stdout is not None
        line = child.stdout.readline() if select.select([child.stdout], [], [], 2 * LONGEST_START)[0] else ""
        if not line:
            said.seek(0)
            raise RuntimeError(f"hivemind's server did not start: {said.read()[-1000:].decode(errors='replace')}")
        dht = start_dht(initial_peers=ast.literal_eval(line))
        yield dht
        dht.shutdown()


def bound_calls() -> None:
    """Gives every call of hivemind's client a deadline; it has none."""
    unbounded = RemoteExpertWorker.run_coroutine.__func__

    def run_coroutine(cls: type, coroutine: object, return_future: bool = False) -> object:
        future: Future[object] = unbounded(cls, coroutine, True)
        return future if return_future else future.result(timeout=LONGEST_CALL)

    RemoteExpertWorker.run_coroutine = classmethod(run_coroutine)


def beside(name: str, sides: dict[str, Callable[[], object]], seconds: float) -> dict[str, object]:
    """The sides in turns; a call that fails, as large ones to hivemind sometimes do, is counted and left out.

    A turn is two runs of which the second counts, as in ``measure.alternate_for``.
    """
    times: dict[str, list[float]] = {side: [] for side in sides}
    failed = dict.fromkeys(sides, 0)
    errors: dict[str, str] = {}

    def attempt(side: str) -> float | None:
        start = time.perf_counter()
        try:
            sides[side]()
        except Exception as error:  # noqa: BLE001 - whatever it raises is counted
            failed[side] += 1
            errors[side] = repr(error)[:300]
            print(f"{name}: {side}: {error!r}", file=sys.stderr, flush=True)
            return None
        return (time.perf_counter() - start) * 1e3

    for side in sides:
        attempt(side)
    until = time.perf_counter() + seconds
    for _ in range(100_000):
        if time.perf_counter() > until and (
            min(map(len, times.values())) >= 3 or max(failed.values()) >= 5 or time.perf_counter() > until + 60
        ):
            break
        for side, values in times.items():
            attempt(side)
            spent = attempt(side)
            if spent is not None:
                values.append(spent)
    measured = {side: values for side, values in times.items() if values}
    made = row(name, measured)
    made["rounds"] = {side: len(values) for side, values in times.items()}
    if "hivemind" in measured:
        theirs = statistics.median(measured["hivemind"])
        made["times_faster"] = {
            side: round(theirs / statistics.median(values), 1)
            for side, values in measured.items()
            if side != "hivemind"
        }
    return made | ({"failed": failed, "errors": errors} if errors else {})


def measure_nop(seconds: float, keys: str) -> Iterator[dict[str, object]]:
    with hivemind_process("nop") as dht, process("nop", keys) as unix, process("nop", keys, tls=True) as tls:
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
    with hivemind_process("ffn") as dht, process("ffn", keys) as endpoint:
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


def measure_mixture(seconds: float, keys: str) -> Iterator[dict[str, object]]:
    with hivemind_process("ffn") as dht, process("ffn", keys) as endpoint:
        directory = Directory()
        directory.announce(GRID, endpoint, ttl=3600.0)
        ours = RemoteMixtureOfExperts(WIDTH, (4, 4), directory, "ffn", k_best=4)
        theirs = hivemind.moe.RemoteMixtureOfExperts(
            in_features=WIDTH,
            grid_size=(4, 4),
            dht=dht,
            uid_prefix="ffn.",
            k_best=4,
            forward_timeout=LONGEST_CALL,
            backward_timeout=LONGEST_CALL,
        )
        mixtures = {"anabranch": ours, "hivemind": theirs}
        x = torch.randn(32, WIDTH)
        with torch.no_grad():
            forwards = {side: lambda m=mixture: m(x) for side, mixture in mixtures.items()}
            yield beside("mixture forward, batch 32, 16 experts, best 4", forwards, seconds)
        steps = {side: lambda m=mixture: m(x).sum().backward() for side, mixture in mixtures.items()}
        yield beside("mixture forward+backward, batch 32, 16 experts, best 4", steps, seconds)


def measure_callers(seconds: float, keys: str) -> Iterator[dict[str, object]]:
    with hivemind_process("ffn") as dht, process("ffn", keys) as endpoint:
        ours, theirs = RemoteExpert("ffn.0.0", endpoint), get_experts(dht, ["ffn.0.0"])[0]
        for name, backward in (("forward", False), ("forward+backward+Adam", True)):
            rates = {
                side: call_from_threads(expert, backward=backward, seconds=seconds)
                for side, expert in (("anabranch", ours), ("hivemind", theirs))
            }
            made: dict[str, object] = {
                "work": f"64 callers of one row, {name}",
                "rows_per_second": {side: round(rate) for side, (rate, _) in rates.items()},
            }
            if rates["hivemind"][0]:
                made["times_faster"] = {"anabranch": round(rates["anabranch"][0] / rates["hivemind"][0], 1)}
            errors = {side: error for side, (_, error) in rates.items() if error}
            yield made | ({"errors": errors} if errors else {})


MEASURES = {"nop": measure_nop, "ffn": measure_ffn, "mixture": measure_mixture, "callers": measure_callers}


def measure_here(name: str, seconds: float, keys: str) -> None:
    """The process of one measurement: prints its rows."""
    bound_calls()
    # What hivemind cannot close complains from its destructors.
    sys.unraisablehook = lambda _: None
    for made in MEASURES[name](seconds, keys):
        print(json.dumps(made), flush=True)
    sys.stdout.flush()
    # Without the farewells of hivemind's threads and processes, which may not end; the session is killed anyway.
    os._exit(0)


def measure_bounded(name: str, seconds: float, keys: str) -> list[dict[str, object]]:
    """The rows of one measurement; of the attempt that came furthest, if none came to its end within its limit."""
    limit = 120.0 + 25.0 * seconds
    best: list[dict[str, object]] = []
    why = ""
    for attempt in range(ATTEMPTS):
        rows: list[dict[str, object]] = []
        with tempfile.TemporaryDirectory() as temporary, sockets_removed():
            child = subprocess.Popen(
                [sys.executable, __file__, "--measure", name, "--seconds", str(seconds), "--keys", keys],
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                # A process that is aborted says where its threads were.
                env={**os.environ, "TMPDIR": temporary, "PYTHONFAULTHANDLER": "1"},
            )
            reader = threading.Thread(target=read_rows, args=(child, rows), daemon=True)
            reader.start()
            try:
                code = child.wait(timeout=limit)
                why = f"its process ended with {code}"
            except subprocess.TimeoutExpired:
                code = None
                why = f"it did not end within {limit:.0f} s"
                child.send_signal(signal.SIGABRT)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=10)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait(timeout=10)
            reader.join(timeout=10)
        if code == 0:
            return rows
        print(f"{name}: attempt {attempt + 1}: {why}", file=sys.stderr, flush=True)
        best = max(best, rows, key=len)
    return [*best, {"work": f"the rest of {name}", "errors": {"hivemind": f"{why}, in {ATTEMPTS} attempts"}}]


@contextmanager
def sockets_removed() -> Iterator[None]:
    """Removes the sockets that hivemind's killed processes leave in /tmp, its one place for them."""
    before = set(Path("/tmp").glob("hivemind-p2p*.sock"))
    try:
        yield
    finally:
        for path in set(Path("/tmp").glob("hivemind-p2p*.sock")) - before:
            path.unlink(missing_ok=True)


def read_rows(child: subprocess.Popen[str], rows: list[dict[str, object]]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
        print(line, end="", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each measurement")
    parser.add_argument("--only", default=",".join(MEASURES), help="which, comma-separated")
    for internal in ("--serve-hivemind", "--measure", "--keys"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    # Threads of hivemind's own do not take over what was set here.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.serve_hivemind:
        serve_hivemind(options.serve_hivemind)
        return
    if options.measure:
        measure_here(options.measure, options.seconds, options.keys)
        return
    before = machine() | {"hivemind": hivemind.__version__}
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as keys:
        make_keys(keys)
        for name in options.only.split(","):
            rows += measure_bounded(name, options.seconds, keys)
    print(json.dumps(before))
    keep("experts_peers", before, rows, options.out)


if __name__ == "__main__":
    main()
