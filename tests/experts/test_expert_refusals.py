"""A request that does not fit an expert is refused as early as possible with the expected form, and changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from expert_modules import (
    Feedforward,
    adam,
    served,
)
from torch import Tensor, nn

from anabranch.deadline import Deadline
from anabranch.errors import (
    NonFinite,
    NotFound,
    ProtocolError,
    SchemaError,
)
from anabranch.experts import ExpertBackend, ExpertServer, RemoteExpert, wire
from anabranch.tensors import TensorSpec
from anabranch.tensors.spec import Compression
from anabranch.transport import Call, Client, Request, TensorHeader, allocate, pack
from waiting import join


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


def test_a_bad_request_that_passes_the_caller_is_refused_by_the_server_before_it_is_queued() -> None:
    backend = ExpertBackend("ffn.0", Feedforward(), args_schema=[TensorSpec(4)])
    right = backend.schema.hash
    one, two = (pack(wire.Backward([True] * count, b"", False, True)) for count in (1, 2))
    bad = [
        Request("", wire.FORWARD, "ffn.0", [torch.ones(2, 5)], schema=right),
        Request("", wire.FORWARD, "ffn.0", [torch.ones(2, 4).double()], schema=right),
        Request("", wire.FORWARD, "ffn.0", [], schema=right),
        Request("", wire.FORWARD, "ffn.0", [torch.tensor(1.0)], schema=right),
        Request("", wire.FORWARD, "ffn.0", [torch.ones(2, 4)] * 2, schema=right),
        Request("", wire.FORWARD, "ffn.0", [torch.ones(2, 4)], schema=b"other"),
        Request("", wire.FORWARD, "ffn.9", [torch.ones(2, 4)], schema=right),
        Request("", "expert.steal", "ffn.0", [torch.ones(2, 4)], schema=right),
        Request("", wire.BACKWARD, "ffn.0", [torch.ones(2, 4)], schema=right, payload=b"\xc1", once=True),
        Request("", wire.BACKWARD, "ffn.0", [torch.ones(2, 4)], one, right, once=True),
        Request("", wire.BACKWARD, "ffn.0", [torch.ones(2, 4)], two, right, once=True),
        Request("", wire.BACKWARD, "ffn.0", [torch.ones(2, 4), torch.ones(3, 4)], one, right, once=True),
    ]
    with served(backend) as server, Client() as client:
        for request in bad:
            request = type(request)(
                server.endpoint,
                request.verb,
                request.target,
                request.tensors,
                request.payload,
                request.schema,
                request.once,
            )
            with pytest.raises((SchemaError, NotFound, Exception)) as caught:
                client.call(request, Deadline.after(60.0))
            assert isinstance(caught.value, (SchemaError, NotFound)) or "ProtocolError" in type(caught.value).__name__
        assert backend.forward_pool.statistics().tasks == 0
        assert backend.backward_pool.statistics().tasks == 0
        assert RemoteExpert("ffn.0", server.endpoint)(torch.ones(1, 4)).shape == (1, 4)


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
    says = r"^many\.0: a message carries at most 64 tensors, and this expert needs 33 .* 32 for the gradients"
    with pytest.raises(SchemaError, match=says):
        make(33)
    make(64, outputs_schema=[TensorSpec(2, requires_grad=False)] * 63)
    with pytest.raises(SchemaError, match="needs 46 for its inputs with 22"):
        make(23, "int8")


def plateau(module: nn.Module) -> dict[str, object]:
    optimizer = torch.optim.SGD(module.parameters())
    return {"optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda module: {"optimizer": torch.optim.LBFGS(module.parameters())},
            "of LBFGS needs more than gradients",
        ),
        (plateau, "of ReduceLROnPlateau needs more than gradients"),
    ],
)
def test_optimizers_that_need_more_than_gradients_are_refused_at_the_start(
    make: Callable[[nn.Module], dict[str, object]], says: str
) -> None:
    class Own(ExpertBackend):
        def apply_gradients(self) -> None:
            """Gives them what they need."""

    module = nn.Linear(4, 4)
    given = make(module)
    with pytest.raises(ValueError, match=f"ffn.0: a step {says}.*use another .* or override apply_gradients"):
        ExpertBackend("ffn.0", module, args_schema=[TensorSpec(4)], **given)  # type: ignore[arg-type]
    Own("ffn.0", module, args_schema=[TensorSpec(4)], **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("timeout", "least"), [(None, 8), (0.01, 8), (None, 1)])
def test_a_server_warns_that_small_requests_may_wait_until_their_deadline(
    caplog: pytest.LogCaptureFixture, timeout: float | None, least: int
) -> None:
    made = [
        ExpertBackend(
            f"ffn.{index}", nn.Linear(4, 4), args_schema=[TensorSpec(4)], min_batch_size=least, timeout=timeout
        )
        for index in range(9)
    ]
    with served(*made):
        pass
    assert ("ffn.7 and 1 more: min_batch_size is 8 and there is no timeout" in caplog.text) == (
        least > 1 and timeout is None
    )


def test_an_unknown_uid_is_not_found() -> None:
    backend = ExpertBackend("ffn.0", Feedforward(), args_schema=[TensorSpec(4)])
    with served(backend) as server, pytest.raises(NotFound, match=r"no expert 'ffn\.1' here"):
        RemoteExpert("ffn.1", server.endpoint)(torch.ones(1, 4))


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


@pytest.mark.parametrize("keep", [0, 64])
def test_a_batch_that_comes_back_with_other_rows_is_refused_to_each_caller(keep: int) -> None:
    module = Short(pair=False)
    backend = ExpertBackend(
        "e.0", module, args_schema=[TensorSpec(4)], keep_activations=keep, min_batch_size=4, timeout=60.0
    )
    module.loses = True
    refusals: list[SchemaError] = []
    with ExpertServer([backend]) as server:

        def call() -> None:
            try:
                RemoteExpert("e.0", server.endpoint)(torch.ones(2, 4, requires_grad=True))
            except SchemaError as error:
                refusals.append(error)

        threads = [threading.Thread(target=call, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            join(thread)
    # Found for four rows, and then for each caller's two.
    assert [str(error).partition(";")[0] for error in refusals] == [
        "e.0's output 0: expected 2 rows, as in the input, got 1"
    ] * 2


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
