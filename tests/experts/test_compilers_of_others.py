"""``torch.compile`` around experts and mixtures: its graphs end at the call, which answers as it does without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.autodiff import opaque

# Dynamo looks at the .grad of what it meets, and hides the warning in a way that fails where warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


def compiled(module: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def _as_before_any_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opaque, "_whole", opaque._call_beside)


def backend(uid: str) -> ab.ExpertBackend:
    torch.manual_seed(len(uid) + int(uid[-1]))
    return ab.ExpertBackend(uid, nn.Linear(3, 3), args_schema=[ab.TensorSpec(3)])


def gradient(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = module(x)
    out = out[0] if isinstance(out, tuple) else out
    out.square().sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def test_an_expert_under_torch_compile_is_the_expert() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    with ab.ExpertServer([backend("linear.0")]) as server:
        expert = ab.RemoteExpert("linear.0", server.endpoint)
        for module in (expert, nn.Sequential(nn.Tanh(), expert, nn.Tanh()), nn.Sequential(expert).eval()):
            for found, known in zip(gradient(compiled(module), x), gradient(module, x), strict=True):
                torch.testing.assert_close(found, known, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("kind", [ab.RemoteMixtureOfExperts, ab.RemoteSwitchMixtureOfExperts])
def test_a_mixture_under_torch_compile_is_the_mixture(kind) -> None:
    x, directory = torch.arange(6.0).reshape(2, 3), ab.Directory()
    options = {"k_best": 2} if kind is ab.RemoteMixtureOfExperts else {}
    with ab.ExpertServer([backend("ffn.0"), backend("ffn.1")], directory=directory):
        mixture = kind(3, (2,), directory, "ffn", **options).eval()
        for found, known in zip(gradient(compiled(mixture), x), gradient(mixture, x), strict=True):
            torch.testing.assert_close(found, known, rtol=0.0, atol=0.0)
