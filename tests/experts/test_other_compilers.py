"""``torch.compile`` around experts and mixtures: its graphs end at the call, which answers as it does without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.autodiff.boundary import whole_calls
from covering import slow_except

# Dynamo looks at the .grad of what it meets, and hides the warning in a way that fails where warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


def compiled(module: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


@pytest.fixture(params=["before", "after"], autouse=True)
def _any_capture_of_ours(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The calls as they are before and after the process's first capture by this library."""
    monkeypatch.setattr(whole_calls, "_whole", whole_calls._call_beside)
    if request.param == "after":
        whole_calls.keep_whole(torch._dynamo.nonstrict_trace)
    yield
    torch._dynamo.reset()  # its programs hold the experts, and so their connections


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


@pytest.mark.quick_cases(1)
def test_an_expert_under_torch_compile_is_the_expert() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    with ab.ExpertServer([backend("linear.0")]) as server:
        expert = ab.RemoteExpert("linear.0", server.endpoint)
        for learned, module in (
            (False, expert),
            (False, nn.Sequential(nn.Tanh(), expert, nn.Tanh())),
            (False, nn.Sequential(expert).eval()),
            (True, nn.Sequential(nn.Tanh(), expert, nn.Tanh())),
        ):
            if learned:
                whole_calls.learn_forms([expert])
            for found, known in zip(gradient(compiled(module), x), gradient(module, x), strict=True):
                torch.testing.assert_close(found, known, rtol=0.0, atol=0.0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", [ab.RemoteMixtureOfExperts, ab.RemoteSwitchMixtureOfExperts])
def test_a_mixture_under_torch_compile_is_the_mixture(kind) -> None:
    x, directory = torch.arange(6.0).reshape(2, 3), ab.Directory()
    options = {"k_best": 2} if kind is ab.RemoteMixtureOfExperts else {}
    with ab.ExpertServer([backend("ffn.0"), backend("ffn.1")], directory=directory):
        mixture = kind(3, (2,), directory, "ffn", **options).eval()
        for learned in (False, True):
            if learned:
                whole_calls.learn_forms([mixture])
            for found, known in zip(gradient(compiled(mixture), x), gradient(mixture, x), strict=True):
                torch.testing.assert_close(found, known, rtol=0.0, atol=0.0)


class Bags(nn.Module):
    def __init__(self, mode: str | None) -> None:
        super().__init__()
        options = {} if mode is None else {"mode": mode}
        self.table = ab.RemoteEmbedding("t", 20, 4, optimizer=lambda p: torch.optim.SGD(p, lr=0.5), **options)
        self.linear = nn.Linear(4, 2)

    def forward(self, *ids: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.table(*ids)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", slow_except([None, "sum"], "sum"))
def test_a_table_under_torch_compile_trains_as_without(mode: str | None) -> None:
    def train(wrap) -> list[Tensor]:
        torch.manual_seed(0)
        model = Bags(mode)
        run, outputs = wrap(model), []
        for step in range(3):
            ids = torch.arange(6 + step) % 5
            out = run(ids, *([] if mode is None else [torch.tensor([0, 2, 4])]))
            outputs.append(out.detach())
            out.square().sum().backward()
        model.table.close()
        return outputs

    for found, known in zip(train(compiled), train(lambda module: module), strict=True):
        torch.testing.assert_close(found, known, rtol=0.0, atol=0.0)
