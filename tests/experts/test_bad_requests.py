"""One bad request among good ones in a batch, of every kind there is: the others never notice."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from anabranch.deadline import Deadline
from anabranch.errors import AnabranchError
from anabranch.experts import ExpertBackend, ExpertServer, RemoteExpert, wire
from anabranch.tensors import TensorSpec
from anabranch.transport import Client, Request, pack
from anabranch.transport.frame import Hello, RequestHeader, encode

ROWS = 2
GRADIENT = pack(wire.BackwardHeader([True], [wire.RequestPart(ROWS, b"")], False, True))
PLAIN = pack(wire.ForwardHeader([wire.RequestPart(ROWS, b"")], False))
GOOD = 7


class Table(nn.Module):
    """Rows that do not see one another, and a value that it cannot take."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if (x == 666.0).any():
            raise IndexError("no such row")
        # A row at a time: then a batch's answers are those of its requests alone, bit for bit.
        return torch.stack([self.linear(row) for row in x])


def ask(**changes: object) -> Callable[[str, bytes], None]:
    """Asks for a forward that differs from a good one."""

    def run(endpoint: str, schema: bytes) -> None:
        facts: dict[str, object] = {
            "verb": wire.FORWARD,
            "target": "table.0",
            "tensors": [torch.ones(ROWS, 4)],
            "payload": PLAIN,
        }
        facts |= {"schema": schema, **changes}
        with Client(retries=0) as client:
            client.call(Request(endpoint, **facts), Deadline.after(60.0))  # type: ignore[arg-type]

    return run


def send(data: bytes) -> Callable[[str, bytes], None]:
    """Sends bytes and goes."""

    def run(endpoint: str, schema: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(60)
            sock.connect(endpoint.removeprefix("unix:"))
            sock.sendall(data)
        raise ValueError("gone")

    return run


def leave(endpoint: str, schema: bytes) -> None:
    """Asks and does not wait."""
    ask_once = Request(endpoint, wire.FORWARD, "table.0", [torch.ones(ROWS, 4)], PLAIN, schema)
    with Client(retries=0) as client:
        client.gather([ask_once], Deadline.after(0.001))
    raise ValueError("left")


def frame(header: RequestHeader, *tensors: Tensor) -> bytes:
    return b"".join(bytes(part) for part in (*encode(Hello()), *encode(header, tensors)))


WHOLE = frame(RequestHeader(wire.FORWARD, "table.0", seconds=5.0), torch.ones(ROWS, 4))
BAD: dict[str, Callable[[str, bytes], None]] = {
    "another shape": ask(tensors=[torch.ones(ROWS, 5)]),
    "another dtype": ask(tensors=[torch.ones(ROWS, 4).double()]),
    "no rows dimension": ask(tensors=[torch.tensor(1.0)]),
    "no tensor": ask(tensors=[]),
    "a tensor too many": ask(tensors=[torch.ones(ROWS, 4)] * 2),
    "a body over the limit": ask(tensors=[torch.ones(10_000, 4)]),
    "NaN": ask(tensors=[torch.full((ROWS, 4), float("nan"))]),
    "infinity": ask(tensors=[torch.full((ROWS, 4), float("inf"))]),
    "another schema": ask(schema=b"other"),
    "another uid": ask(target="table.9"),
    "a path for a uid": ask(target="../table.0"),
    "another verb": ask(verb="expert.steal"),
    "a long ticket": ask(payload=pack(wire.ForwardHeader([wire.RequestPart(ROWS, bytes(100))], False))),
    "a forward of garbage": ask(payload=b"\xc1"),
    "a backward without a number": ask(verb=wire.BACKWARD, payload=GRADIENT),
    "a backward of garbage": ask(verb=wire.BACKWARD, payload=b"\xc1", once=True),
    "gradients of other rows": ask(
        verb=wire.BACKWARD, tensors=[torch.ones(ROWS, 4), torch.ones(ROWS + 1, 4)], payload=GRADIENT, once=True
    ),
    "a gradient that is NaN": ask(
        verb=wire.BACKWARD,
        tensors=[torch.ones(ROWS, 4), torch.full((ROWS, 4), float("nan"))],
        payload=GRADIENT,
        once=True,
    ),
    "a value the module cannot take": ask(tensors=[torch.full((ROWS, 4), 666.0)]),
    "no greeting": send(bytes(64)),
    "half a request": send(WHOLE[:-7]),
    "a request with a changed bit": send(WHOLE[:60] + bytes([WHOLE[60] ^ 4]) + WHOLE[61:]),
    "a request that is not waited for": send(WHOLE),
    "a caller that leaves": leave,
}


def test_one_bad_request_of_eight_harms_none_of_the_others_whatever_is_wrong_with_it() -> None:
    module = Table()
    backend = ExpertBackend("table.0", module, args_schema=[TensorSpec(4)], min_batch_size=GOOD * ROWS, timeout=0.2)
    torch.manual_seed(0)
    with ExpertServer([backend], max_body=4096) as server:
        experts = [RemoteExpert("table.0", server.endpoint) for _ in range(GOOD)]
        for expert in experts:
            expert.get_info()
        # Each kind with fresh neighbours, then one of them alone.
        for name in BAD:
            inputs = [torch.randn(ROWS, 4) for _ in range(GOOD)]
            outcomes: list[object] = [None] * GOOD
            barrier = threading.Barrier(GOOD + 1)

            def good(
                index: int, inputs: list[Tensor] = inputs, barrier: threading.Barrier = barrier,
                outcomes: list[object] = outcomes,
            ) -> None:  # fmt: skip
                barrier.wait(timeout=60)
                with torch.no_grad():
                    outcomes[index] = experts[index](inputs[index])

            threads = [threading.Thread(target=good, args=(index,)) for index in range(GOOD)]
            for thread in threads:
                thread.start()
            barrier.wait(timeout=60)
            with pytest.raises((AnabranchError, ValueError, OSError)):
                BAD[name](server.endpoint, backend.schema.hash)
            for thread in threads:
                thread.join(timeout=60)
            for x, outcome in zip(inputs, outcomes, strict=True):
                assert isinstance(outcome, Tensor), name
                with torch.no_grad():
                    assert torch.equal(outcome, module(x)), name
        backend.forward_pool.min_batch_size = 1
        x = torch.randn(1, 4)
        with torch.no_grad():
            for _ in range(1000):
                assert torch.equal(experts[0](x), module(x))
    assert backend.updates == 0
