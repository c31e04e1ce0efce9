"""A request that does not fit an expert is refused as early as possible with the expected form, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from expert_modules import (
    Feedforward,
    adam,
    served,
)
from torch import Tensor, nn

from anabranch.errors import (
    NonFinite,
    ProtocolError,
    SchemaError,
)
from anabranch.experts import ExpertBackend, ExpertServer, RemoteExpert, wire
from anabranch.tensors import TensorSpec
from anabranch.tensors.spec import Compression
from anabranch.transport import Call, TensorHeader, allocate


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: (torch.ones(2, 5),), r"args\.0: expected \(rows, 4\) float32, got \(2, 5\)"),
        (lambda: (torch.ones(2, 4, dtype=torch.float64),), "float64"),
        (lambda: (torch.ones(4),), r"got \(4\)"),
        (lambda: (torch.ones(2, 4), torch.ones(2, 4)), "expected arguments"),
        (lambda: ([torch.ones(2, 4)],), "expected arguments"),
        (lambda: ("text",), "got str"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_locally_with_the_expected_form(
    make: Callable[[], tuple[object, ...]], says: str
) -> None:
    backend = ExpertBackend("ffn.0", Feedforward(), args_schema=[TensorSpec(4)])
    with served(backend) as server, pytest.raises(SchemaError, match=says):
        RemoteExpert("ffn.0", server.endpoint)(*make())


def test_rows_that_disagree_name_both_inputs() -> None:
    schema = [TensorSpec(2), TensorSpec(2)]
    backend = ExpertBackend("pair.0", nn.Bilinear(2, 2, 1), args_schema=schema)
    with served(backend) as server, pytest.raises(SchemaError, match=r"args\.0 has 2, args\.1 has 3"):
        RemoteExpert("pair.0", server.endpoint)(torch.ones(2, 2), torch.ones(3, 2))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_inputs_are_refused_at_the_server_and_counted(poison: float) -> None:
    module = Feedforward()
    backend = ExpertBackend("ffn.0", module, adam(module), args_schema=[TensorSpec(4)])
    with served(backend) as server:
        expert = RemoteExpert("ffn.0", server.endpoint)
        x = torch.ones(2, 4)
        x[0, 0] = poison
        with pytest.raises(NonFinite, match=r"args\.0"):
            expert(x)
        good = torch.ones(2, 4, requires_grad=True)
        with pytest.raises(NonFinite, match="gradient of output 0"):
            expert(good).backward(x)
        expert(good).sum().backward()
        assert sum(server.statistics().not_finite.values()) == 2
    assert backend.updates == 1
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


def test_a_gradient_that_overflows_inside_the_expert_updates_nothing() -> None:
    class Explode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * 1e30

    module = Explode()
    backend = ExpertBackend("big.0", module, adam(module), args_schema=[TensorSpec(1)])
    with served(backend) as server:
        output = RemoteExpert("big.0", server.endpoint)(torch.full((1, 1), 1e5))
        with pytest.raises(NonFinite, match="nothing was updated"):
            output.backward(torch.full((1, 1), 1e30))
    assert torch.equal(module.weight, torch.ones(1))


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: ExpertBackend("ffn", nn.Identity(), args_schema=[TensorSpec(1)]), ValueError, "not a uid"),
        (lambda: ExpertBackend("ffn.01", nn.Identity(), args_schema=[TensorSpec(1)]), ValueError, "leading"),
        (lambda: ExpertBackend("ffn.0", nn.Identity()), ValueError, "without inputs"),
        (
            lambda: ExpertBackend("ffn.0", nn.Linear(1, 1), adam(nn.Linear(1, 1)), args_schema=[TensorSpec(1)]),
            ValueError,
            "another module",
        ),
        (lambda: ExpertBackend("ffn.0", nn.Linear(2, 1), args_schema=[TensorSpec(1)]), SchemaError, "does not accept"),
        (lambda: ExpertBackend("ffn.0", nn.Flatten(0), args_schema=[TensorSpec(2)]), SchemaError, "as many rows"),
        (lambda: ExpertBackend("ffn.0", nn.Identity(), args_schema=["x"]), SchemaError, "TensorSpec"),
        (
            lambda: ExpertBackend("ffn.0", nn.Identity(), args_schema=[TensorSpec(1)], max_batch_size=0),
            ValueError,
            "batch sizes",
        ),
        (
            lambda: ExpertBackend("ffn.0", nn.Identity(), args_schema=[TensorSpec(1)], gradient_reduction="max"),  # type: ignore[arg-type]
            ValueError,
            "gradient_reduction",
        ),
        (lambda: ExpertServer([]), ValueError, "without experts"),
        (lambda: RemoteExpert("ffn", "unix:/nowhere"), ValueError, "not a uid"),
        (lambda: RemoteExpert("ffn.0", "unix:/nowhere", forward_timeout=0), ValueError, "forward_timeout"),
    ],
)
def test_mistakes_are_explained(make: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


class Many(nn.Module):
    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [x * 2 for x in inputs[1:]]


def test_an_expert_of_more_tensors_than_a_backward_can_send_is_refused_when_it_is_made() -> None:
    def make(inputs: int, compression: Compression | None = None, **options: object) -> ExpertBackend:
        spec = TensorSpec(2, compression=compression)
        return ExpertBackend("many.0", Many(), args_schema=[spec] * inputs, **options)  # type: ignore[arg-type]

    make(32)
    says = r"^many\.0: a message carries at most 64 tensors, and this expert needs 65 .*requires_grad=False"
    with pytest.raises(SchemaError, match=says):
        make(33)
    make(64, outputs_schema=[TensorSpec(2, requires_grad=False)] * 63)
    with pytest.raises(SchemaError, match="needs 68 "):
        make(23, "int8")


class Short(nn.Module):
    """A module that may lose its last row."""

    def __init__(self, *, pair: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.pair, self.loses = pair, False

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        whole = x * self.scale
        cut = whole[:-1] if self.loses else whole
        return (whole, cut) if self.pair else cut


@pytest.mark.parametrize("keep", [0, 64])
@pytest.mark.parametrize("pair", [False, True])
def test_a_module_that_returns_other_rows_than_it_took_is_named(pair: bool, keep: int) -> None:
    """Callers were told of the protocol, of autograd or of ``split_with_sizes``."""
    module = Short(pair=pair)
    backend = ExpertBackend(
        "e.0", module, torch.optim.SGD(module.parameters(), lr=1.0), args_schema=[TensorSpec(4)], keep_activations=keep
    )
    says = rf"^e\.0's output {int(pair)}: expected 2 rows, as in the input, got 1; "
    with ExpertServer([backend]) as server:
        expert = RemoteExpert("e.0", server.endpoint)
        x = torch.ones(2, 4, requires_grad=True)
        found = expert(x)
        module.loses = True
        with pytest.raises(SchemaError, match=says):
            expert(x)
        if not keep:  # else the forward that was whole is the one that runs back
            with pytest.raises(SchemaError, match=says):
                (found[1] if pair else found).sum().backward()
            assert not backend.updates


@pytest.mark.parametrize("shape", [(1 << 20, 4), (2, 1 << 20), (2, 4, 1)])
def test_the_answer_to_a_backward_is_checked_before_memory_is_taken(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient of 1 GB for an input of a few rows cost its caller as much memory, and then the error."""
    reply = Call.reply

    def other(call: Call, tensors: Sequence[Tensor] = (), payload: bytes = b"") -> None:
        reply(call, [torch.zeros(shape)] if call.verb == wire.BACKWARD else tensors, payload)

    taken: list[int] = []

    def counted(headers: Sequence[TensorHeader]) -> list[Tensor]:
        taken.extend(header.nbytes for header in headers)
        return allocate(headers)

    backend = ExpertBackend("ffn.0", Feedforward(), args_schema=[TensorSpec(4)])
    with served(backend) as server:
        y = RemoteExpert("ffn.0", server.endpoint)(torch.ones(2, 4, requires_grad=True))
        monkeypatch.setattr(Call, "reply", other)
        monkeypatch.setattr("anabranch.transport.client.allocate", counted)
        with pytest.raises((ProtocolError, SchemaError), match="gradient"):
            y.sum().backward()
    assert sum(taken) < 1000
