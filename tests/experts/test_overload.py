"""Under ten times the load it can bear, a server keeps nearly its best throughput."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from anabranch.errors import DeadlineExceeded, Overloaded
from anabranch.experts import RemoteExpert

BATCH = 4
BATCH_SECONDS = 0.1
# What is measured is the server, so the module's work is a wait of known length: a device whose rate is known, and so
# slow that the processors have little to do even under ten times its load.
PROGRAM = f"""
import sys, time, torch
from torch import nn
from anabranch.experts import ExpertBackend, ExpertServer
from anabranch.tensors import TensorSpec

class Timed(nn.Module):
    def forward(self, x):
        time.sleep({BATCH_SECONDS})
        return x + 1

backend = ExpertBackend("timed.0", Timed(), args_schema=[TensorSpec(2)], outputs_schema=TensorSpec(2),
                        max_batch_size={BATCH}, max_queue_rows={2 * BATCH})
with ExpertServer([backend]) as server:
    print(server.endpoint, flush=True)
    sys.stdin.read()
"""


def offer(endpoint: str, callers: int, seconds: float) -> tuple[int, int]:
    """Calls answered and declined when so many callers ask for one row after the other, each with a short deadline."""
    answered, declined = [0] * callers, [0] * callers
    stop = threading.Event()

    def ask(index: int) -> None:
        expert = RemoteExpert("timed.0", endpoint, forward_timeout=1.0)
        x = torch.ones(1, 2)
        with torch.no_grad():
            while not stop.is_set():
                try:
                    expert(x)
                    answered[index] += 1
                except (Overloaded, DeadlineExceeded):
                    declined[index] += 1
                    # A caller that was declined asks again after the time of a batch: ten callers a row of the device
                    # are then ten times its load.
                    stop.wait(timeout=BATCH_SECONDS)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(callers)]
    for thread in threads:
        thread.start()
    stop.wait(timeout=seconds)
    stop.set()
    for thread in threads:
        thread.join(timeout=30)
    return sum(answered), sum(declined)


@pytest.mark.slow
def test_ten_times_the_load_keeps_nine_tenths_of_the_best_rate() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        peak, _ = offer(endpoint, 2 * BATCH, 5.0)
        crowded, declined = offer(endpoint, 10 * BATCH, 5.0)
        # It ends with its input.
        process.communicate(timeout=30)
    assert peak > 0
    assert declined > 0
    assert crowded >= 0.9 * peak
