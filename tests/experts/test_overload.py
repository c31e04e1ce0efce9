"""Under ten times the load that it can bear, a server's device computes full batches of requests that are answered."""

from __future__ import annotations

import threading
from functools import partial

import torch
from expert_modules import served
from torch import Tensor, nn

from anabranch.errors import Overloaded
from anabranch.experts import ExpertBackend, RemoteExpert
from anabranch.tensors import TensorSpec
from anabranch.transport import Client
from waiting import running, wait_until

BATCH = 4
BATCHES = 30


class Device(nn.Module):
    """Computes one batch whenever the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = threading.Semaphore(0)
        self.begun = 0
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.begun += 1
        assert self.turns.acquire(timeout=60)
        self.rows.append(len(x))
        return x + 1


def test_ten_times_the_load_leaves_every_batch_full() -> None:
    device = Device()
    backend = ExpertBackend(
        "device.0",
        device,
        args_schema=[TensorSpec(2)],
        outputs_schema=TensorSpec(2),
        max_batch_size=BATCH,
        max_queue_rows=2 * BATCH,
    )
    answered: list[Tensor] = []
    declined: list[Overloaded] = []
    stop = threading.Event()

    def ask(row: int) -> None:
        expert, x = RemoteExpert("device.0", server.endpoint, client=client), torch.full((1, 2), float(row))
        with torch.no_grad():
            while not stop.is_set():
                try:
                    answered.append(expert(x) - x)
                except Overloaded as error:
                    declined.append(error)
                    stop.wait(timeout=0.01)

    with served(backend) as server, Client() as client, running(*(partial(ask, row) for row in range(10 * BATCH))):
        for number in range(1, BATCHES + 1):
            wait_until(lambda number=number: device.begun == number)
            wait_until(lambda: backend.forward_pool.statistics().waiting_rows >= BATCH)
            device.turns.release()
        wait_until(lambda: len(device.rows) == BATCHES and declined)
        rows = device.rows[1:]  # the first batch began with the first request
        stop.set()
        device.turns.release(10 * BATCH)
    assert rows == [BATCH] * (BATCHES - 1)
    assert len(answered) == sum(device.rows)
    assert all(torch.equal(answer, torch.ones(1, 2)) for answer in answered)
