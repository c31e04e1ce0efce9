"""Tensors that servers cannot keep are refused in one sentence that says what to give instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from anabranch.errors import SchemaError
from anabranch.parameter_server import ParameterClient
from anabranch.transport.frame import memory_to_send


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the prototype may change
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantised() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)


KINDS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "complex": (lambda: torch.full((2, 2), 1 + 2j), r"view_as_real"),
    "sparse": (lambda: torch.eye(2).to_sparse(), r"sparse_push, or tensor.to_dense\(\)"),
    "quantised": (quantised, r"tensor.dequantize\(\)"),
    "nested": (nested, r"to_padded_tensor"),
    "meta": (lambda: torch.ones(2, 2, device="meta"), r"has no values"),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_anything_but_a_plain_tensor_is_refused_in_one_sentence(kind: str) -> None:
    make, cure = KINDS[kind]
    odd = make()
    with ParameterClient() as client:
        client.init("w", (2, 2))
        client.init("t", (4, 2), kind="rows")
        for ask in (
            lambda: client.push("w", odd),
            lambda: client.sparse_push("t", torch.tensor([0, 1]), odd),
            lambda: client.init("v", (2, 2), init=odd),
        ):
            with pytest.raises(SchemaError, match=cure) as told:
                ask()
            assert "\n" not in str(told.value)
        assert client.pull("w").tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("make", [nested, lambda: torch.ones(2, device="meta"), quantised])
def test_nor_does_it_cross_any_boundary(make: Callable[[], Tensor]) -> None:
    odd = make()
    with pytest.raises(TypeError, match="cross"):
        memory_to_send(odd)
