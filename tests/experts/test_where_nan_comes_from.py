"""An error over NaN names where it was made: in the module, or in the gradients of its caller."""

from __future__ import annotations

import pytest
import torch
from expert_modules import calling, served
from torch import Tensor, nn

from anabranch.errors import NonFinite
from anabranch.experts import ExpertBackend, RemoteExpert
from anabranch.tensors import TensorSpec
from anabranch.tensors.spec import Compression


class Sick(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor


def make(keep_activations: int = 0) -> tuple[Sick, ExpertBackend]:
    module = Sick()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    backend = ExpertBackend("ffn.0", module, optimizer, args_schema=[TensorSpec(2)], keep_activations=keep_activations)
    return module, backend


@pytest.mark.parametrize("keep_activations", [0, 8])
def test_a_module_that_answers_nan_is_named_by_the_backward_that_it_spoils(keep_activations: int) -> None:
    module, backend = make(keep_activations)
    with calling(backend) as expert:
        module.factor = float("nan")
        y = expert(torch.ones(1, 2))  # as a local module, it hands NaN on
        assert y.isnan().all()
        with pytest.raises(NonFinite, match="If an output did too, the cause is the module, not the loss"):
            y.square().mean().backward()
    assert backend.updates == 0


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("compression", [None, "float16", "bfloat16", "int8"])
def test_no_compression_turns_infinity_into_a_number(compression: Compression | None, value: float) -> None:
    spec = TensorSpec(2, compression=compression)
    backend = ExpertBackend("ffn.0", nn.Identity(), args_schema=[spec], outputs_schema=spec)
    with calling(backend) as expert:
        y = expert(torch.tensor([[1.0, 1e30]]))  # a number, however large, is rounded to one
        assert y.isfinite().all()
        with pytest.raises(NonFinite, match="holds NaN or Inf"):
            expert(torch.tensor([[1.0, value]]))
        with pytest.raises(NonFinite, match="gradient of output 0 holds NaN or Inf"):
            y.backward(torch.tensor([[1.0, value]]))
    assert backend.updates == 0


def test_a_module_that_is_nan_in_backward_alone_is_named_by_its_server() -> None:
    module, backend = make()
    with served(backend) as server:
        y = RemoteExpert("ffn.0", server.endpoint)(torch.ones(1, 2))
        module.factor = float("nan")
        with pytest.raises(NonFinite, match=r"linear\.weight is NaN or Inf because the module's own output holds NaN"):
            y.sum().backward()
    assert backend.updates == 0
