"""Modules that tests of remote experts serve, and ways to ask them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.experts import ExpertBackend, ExpertServer, RemoteExpert, TaskPool
from anabranch.tensors import Structure, TensorSpec
from waiting import join, running, wait_until


class Feedforward(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Nested(nn.Module):
    """Positional and keyword inputs, nested, bool and int ones; a dict with an integer output and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: tuple[Tensor, Tensor], *, ids: Tensor, options: dict[str, Tensor]) -> dict[str, object]:
        x, y = pair
        hidden = self.linear(x) * y + self.table(ids)
        hidden = torch.where(options["mask"][:, None], hidden, torch.zeros_like(hidden))
        return {"hidden": hidden, "best": hidden.argmax(dim=1), "parts": (hidden.sum(1), None, [y * 2])}


NESTED_SCHEMA = {
    "args_schema": ((TensorSpec(4), TensorSpec(4)),),
    "kwargs_schema": {"ids": TensorSpec(dtype=torch.int64), "options": {"mask": TensorSpec(dtype=torch.bool)}},
}


def nested_inputs(rows: int) -> tuple[tuple[Tensor, Tensor], dict[str, Structure]]:
    pair = torch.randn(rows, 4, requires_grad=True), torch.randn(rows, 4, requires_grad=True)
    return pair, {"ids": torch.arange(rows) % 10, "options": {"mask": torch.arange(rows) % 3 != 0}}


class Slow(nn.Module):
    """Waits for the test before it answers."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.entered = threading.Event()
        self.threads: list[str] = []
        self.open.set()

    def forward(self, x: Tensor) -> Tensor:
        self.threads.append(threading.current_thread().name)
        self.entered.set()
        self.open.wait(timeout=60)
        return x * 1.0


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.01)


def sgd(module: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr)


def expert_of(module: nn.Module, width: int = 4, uid: str = "ffn.0", **options: Any) -> ExpertBackend:
    """A module of rows of this width, in the dtype of its parameters; it is trained by SGD, if it can be."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if "args_schema" not in options:
        options["args_schema"] = [TensorSpec(width, dtype=parameters[0].dtype if parameters else torch.float32)]
    if "optimizer" not in options:
        options["optimizer"] = torch.optim.SGD(parameters, lr=0.1) if parameters else None
    return ExpertBackend(uid, module, **options)


def twins(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Two leaves of the same numbers."""
    x = torch.randn(*shape, dtype=dtype)
    return x.clone().requires_grad_(), x.requires_grad_()


@contextmanager
def served(*backends: ExpertBackend, **options: object) -> Iterator[ExpertServer]:
    options.setdefault("drain_seconds", 0.5)
    with ExpertServer(backends, **options) as server:  # type: ignore[arg-type]
        yield server


@contextmanager
def calling(backend: ExpertBackend, **options: object) -> Iterator[RemoteExpert]:
    """Serve an expert, and yield its caller."""
    with served(backend, **options) as server:
        yield RemoteExpert(backend.uid, server.endpoint)


@contextmanager
def in_the_module(module: Slow, ask: Callable[[], object]) -> Iterator[None]:
    """While the block runs a thread that asks is in the module; then it is let out, and ends."""
    module.open.clear()
    module.entered.clear()
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        assert module.entered.wait(timeout=60)
        yield
    finally:
        module.open.set()
        join(thread)


def together(count: int, ask: Callable[[int], object]) -> list[object]:
    """What ``ask`` returned, or raised, on so many threads at once."""
    outcomes: list[object] = [None] * count
    barrier = threading.Barrier(count)

    def run(index: int) -> None:
        barrier.wait(timeout=60)
        try:
            outcomes[index] = ask(index)
        except Exception as error:  # noqa: BLE001 - what a caller gets is what is tested
            outcomes[index] = error

    with running(*(partial(run, index) for index in range(count))):
        pass
    return outcomes


def four_servers(index: int) -> list[ExpertBackend]:
    """The two experts of one server of four; the same in every process."""
    backends = []
    for j in range(2):
        torch.manual_seed(10 * index + j)
        module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        backends.append(ExpertBackend(f"ffn.{index}.{j}", module, optimizer, args_schema=[TensorSpec(8)]))
    return backends


class CausalBlock(nn.Module):
    """A transformer block whose positions see those before them, with a cache of keys and values, and dropout."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))
        self.dropout = nn.Dropout(0.5)
        self.made: list[dict[str, Tensor]] = []

    def make_cache(self, rows: int, max_length: int) -> dict[str, Tensor]:
        cache: dict[str, Tensor] = {}
        self.made.append(cache)
        return cache

    def forward(self, x: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:
        rows, length, width = x.shape
        mixed = self.mix(self.before(x)).view(rows, length, 3, self.heads, width // self.heads)
        queries, keys, values = mixed.permute(2, 0, 3, 1, 4)
        if cache is not None:
            if cache:
                keys, values = torch.cat([cache["keys"], keys], 2), torch.cat([cache["values"], values], 2)
            cache["keys"], cache["values"] = keys, values
        whole = keys.shape[2]
        seen = torch.ones(length, whole, dtype=torch.bool).tril(whole - length)
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)))
        return x + self.dropout(self.inner(x))


def causal_backend(uid: str = "block.0", dtype: torch.dtype = torch.float32, **options: object) -> ExpertBackend:
    module = CausalBlock().to(dtype)
    schema = [TensorSpec(None, 8, dtype=dtype)]
    return ExpertBackend(uid, module, adam(module), args_schema=schema, **options)  # type: ignore[arg-type]


def all_waiting(calls: Sequence[Callable[[], object]], server: ExpertServer, slow: Slow, pool: TaskPool) -> None:
    """Make calls that find the device busy with ``slow.0``, so that all wait in ``pool`` together."""
    threads = [threading.Thread(target=call) for call in calls]
    with in_the_module(slow, lambda: RemoteExpert("slow.0", server.endpoint)(torch.ones(1, 1))):
        for thread in threads:
            thread.start()
        wait_until(lambda: pool.statistics().waiting_tasks == len(calls))
    join(*threads)
