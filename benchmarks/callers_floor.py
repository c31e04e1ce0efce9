"""The least that small calls cost in Python: bare loops that make the same system calls and compute the same.

    python benchmarks/callers_floor.py [--seconds 3]

Whoever asks sends a row on each of 64 sockets and reads 64 answers; whoever serves reads what has come, computes it as
one batch and answers, all on one thread. There are no headers, checks, deadlines, retries, bounds or faults. Beside it
the same module in this process. ``experts.py`` measures what Anabranch makes of it.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from measure import alternate_for
from torch import Tensor, nn

from experts import WIDTH, feedforward
from transport import let_go

HEADER = 40
FORWARD, KEEP, BACKWARD = 0, 1, 2


def memory_of(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().numpy().data.cast("B")


def read(sock: socket.socket, buffer: memoryview, rows: int) -> tuple[int, Tensor] | None:
    """The kind and the rows of a message, ``None`` at the end."""
    count = 0
    while count < HEADER + rows * WIDTH * 4:
        try:
            some = sock.recv_into(buffer[count:])
        except BlockingIOError:
            continue
        if not some:
            return None
        count += some
    tensor = torch.empty((rows, WIDTH))
    memory_of(tensor)[:] = buffer[HEADER:count]
    return buffer[0], tensor


class Module:
    """The expert: the module, its optimizer, and the graph of the last batch."""

    def __init__(self) -> None:
        self.module: nn.Module = feedforward()
        self.optimizer = torch.optim.Adam(self.module.parameters(), fused=True)
        self.kept: tuple[Tensor, Tensor] | None = None

    def compute(self, kind: int, batch: Sequence[Tensor]) -> Sequence[Tensor]:
        joined = torch.cat(list(batch)) if len(batch) > 1 else batch[0]
        if kind == FORWARD:
            with torch.no_grad():
                answer: Tensor = self.module(joined)
        elif kind == KEEP:
            self.kept = joined.requires_grad_(), self.module(joined)
            answer = self.kept[1].detach()
        else:
            assert self.kept is not None
            inputs, outputs = self.kept
            outputs.backward(joined)
            self.optimizer.step()
            self.optimizer.zero_grad()
            assert inputs.grad is not None
            answer = inputs.grad
        return torch.split(answer, [len(rows) for rows in batch])


def serve(path: str, callers: int, rows: int, *, full: bool) -> None:
    """The process of the server; ends when its clients have left."""
    expert = Module()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(callers)
        print("ready", flush=True)
        socks = [listener.accept()[0] for _ in range(callers)]
    poller = select.epoll()
    by_number = {sock.fileno(): sock for sock in socks}
    for sock in socks:
        sock.setblocking(False)
        poller.register(sock, select.EPOLLIN)
    buffer = memoryview(bytearray(HEADER + rows * WIDTH * 4))
    waiting: list[tuple[socket.socket, Tensor]] = []
    while True:
        for number, _ in poller.poll():
            message = read(by_number[number], buffer, rows)
            if message is None:
                return
            kind = message[0]
            waiting.append((by_number[number], message[1]))
        if not full or len(waiting) == callers:
            answers = expert.compute(kind, [tensor for _, tensor in waiting])
            for (sock, _), answer in zip(waiting, answers, strict=True):
                sock.sendmsg([bytes(HEADER), memory_of(answer)])
            waiting.clear()


@contextmanager
def asking(callers: int, rows: int, *, full: bool) -> Iterator[Callable[[int, Sequence[Tensor]], list[Tensor]]]:
    """A function that asks on all sockets at once."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/floor"
        arguments = [sys.executable, __file__, "--serve", path, str(callers), str(rows), "full" if full else "any"]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            child.stdout.readline()
            socks = [socket.socket(socket.AF_UNIX) for _ in range(callers)]
            numbers = {sock.fileno(): index for index, sock in enumerate(socks)}
            poller = select.poll()
            for sock in socks:
                sock.connect(path)
                sock.setblocking(False)
                poller.register(sock, select.POLLIN)
            buffer = memoryview(bytearray(HEADER + rows * WIDTH * 4))

            def ask(kind: int, tensors: Sequence[Tensor]) -> list[Tensor]:
                for sock, tensor in zip(socks, tensors, strict=True):
                    sock.sendmsg([bytes([kind]) * HEADER, memory_of(tensor)])
                answers: dict[int, Tensor] = {}
                while len(answers) < callers:
                    for number, _ in poller.poll():
                        message = read(socks[numbers[number]], buffer, rows)
                        assert message is not None
                        answers[numbers[number]] = message[1]
                return [answers[index] for index in range(callers)]

            try:
                yield ask
            finally:
                for sock in socks:
                    sock.close()
                let_go(child)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each measurement")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        path, callers, rows, how = options.serve
        serve(path, int(callers), int(rows), full=how == "full")
        return
    here = Module()
    for callers, rows, full in ((64, 1, True), (64, 1, False), (1, 16, True)):
        whole = torch.randn(callers * rows, WIDTH)
        parts = list(torch.split(whole, rows))
        with asking(callers, rows, full=full) as ask:
            name = f"{callers} callers of {rows} rows, {'full batches' if full else 'batches of what has come'}"
            kinds = {"forward": [FORWARD], "forward+backward+Adam, kept": [KEEP, BACKWARD]}
            for what, sequence in kinds.items():
                if not full and len(sequence) > 1:
                    continue

                def local(sequence: list[int] = sequence, whole: Tensor = whole) -> None:
                    for kind in sequence:
                        here.compute(kind, [whole.detach()])

                def floor(
                    sequence: list[int] = sequence,
                    parts: list[Tensor] = parts,
                    ask: Callable[[int, Sequence[Tensor]], list[Tensor]] = ask,
                ) -> None:
                    for kind in sequence:
                        ask(kind, parts)

                times = alternate_for({"here": local, "floor": floor}, options.seconds)
                medians = {side: statistics.median(values) for side, values in times.items()}
                minima = {side: min(values) for side, values in times.items()}
                made = {
                    "work": f"{name}, {what}",
                    "median_ms": {side: round(value, 3) for side, value in medians.items()},
                    "minimum_ms": {side: round(value, 3) for side, value in minima.items()},
                    "share_of_local_rate": round(medians["here"] / medians["floor"], 3),
                    "share_by_minima": round(minima["here"] / minima["floor"], 3),
                }
                print(json.dumps(made), flush=True)


if __name__ == "__main__":
    main()
