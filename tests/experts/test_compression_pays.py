"""Rounded on the way: half and a quarter of the bytes, and training ends where it would have."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anabranch.experts import ExpertBackend, ExpertServer, RemoteExpert
from anabranch.experts.server.layers import Feedforward
from anabranch.tensors import TensorSpec

FEATURES = 256


@functools.cache
def train(compression: str | None) -> tuple[int, float]:
    """Bytes that crossed, and the loss at the end of learning which of ten random points a noisy one is nearest to."""
    torch.manual_seed(0)
    points = torch.randn(10, 16)
    stem, far, head = nn.Linear(16, FEATURES), Feedforward(FEATURES), nn.Linear(FEATURES, 10)
    spec = TensorSpec(FEATURES, compression=compression)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([*stem.parameters(), *head.parameters()], lr=0.1)
    theirs = torch.optim.SGD(far.parameters(), lr=0.1)
    backend = ExpertBackend("far.0", far, theirs, args_schema=[spec], outputs_schema=spec)
    with ExpertServer([backend]) as server:
        expert = RemoteExpert("far.0", server.endpoint)
        for _ in range(60):
            labels = torch.randint(10, (64,))
            x = points[labels] + torch.randn(64, 16)
            loss = F.cross_entropy(head(expert(torch.tanh(stem(x)))), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        facts = server.statistics().transport
    labels = torch.arange(10).repeat(100)
    with torch.no_grad():
        x = points[labels] + torch.randn(1000, 16)
        final = F.cross_entropy(head(far(torch.tanh(stem(x)))), labels)
    return facts.bytes_received + facts.bytes_sent, float(final)


@pytest.mark.parametrize(
    ("compression", "share"),
    [*(pytest.param(kind, 0.5, marks=pytest.mark.slow) for kind in ("bfloat16", "float16")), ("int8", 0.27)],
)
def test_compressed_training_sends_less_and_ends_at_the_same_loss(compression: str, share: float) -> None:
    plain_bytes, plain_loss = train(None)
    nbytes, loss = train(compression)
    assert nbytes <= share * plain_bytes
    assert abs(loss / plain_loss - 1) < 0.01
