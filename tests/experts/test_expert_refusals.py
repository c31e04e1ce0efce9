"""A request that does not fit an expert is refused as early as possible with the expected form, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from expert_modules import CausalBlock, Feedforward, adam, calling, served
from torch import Tensor, nn

from anabranch.errors import NonFinite, ProtocolError, SchemaError
from anabranch.experts import (
    Directory,
    ExpertBackend,
    ExpertServer,
    RemoteExpert,
    RemoteMixtureOfExperts,
    RemoteSwitchMixtureOfExperts,
    wire,
)
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
    with calling(backend) as caller, pytest.raises(SchemaError, match=says):
        caller(*make())


def test_rows_that_disagree_name_both_inputs_and_a_keyword_too_many_is_refused() -> None:
    backend = ExpertBackend("pair.0", nn.Bilinear(2, 2, 1), args_schema=[TensorSpec(2), TensorSpec(2)])
    with calling(backend) as caller, pytest.raises(SchemaError, match=r"args\.0 has 2, args\.1 has 3"):
        caller(torch.ones(2, 2), torch.ones(3, 2))
    with calling(expert()) as caller, pytest.raises(SchemaError, match="expected arguments"):
        caller(torch.ones(2, 1), by=torch.ones(2, 1))


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
        with pytest.raises(NonFinite, match=r"^ffn\.0: gradient of output 0 holds NaN or Inf"):
            expert(good).backward(x)
        expert(good).sum().backward()
        assert sum(server.statistics().not_finite.values()) == 2
    assert backend.updates == 1
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


def expert(uid: str = "ffn.0", module: nn.Module | None = None, **options: object) -> ExpertBackend:
    options.setdefault("args_schema", [TensorSpec(1)])
    return ExpertBackend(uid, module or nn.Linear(1, 1), **options)  # type: ignore[arg-type]


def mixture(kind: type = RemoteMixtureOfExperts, **options: object) -> nn.Module:
    arguments = {"in_features": 4, "grid_size": (2,), "directory": Directory(), "uid_prefix": "ffn", **options}
    return kind(**arguments)  # type: ignore[no-any-return]


def stepping(make: Callable[[torch.optim.Optimizer], object], kind: type[ExpertBackend] = ExpertBackend) -> object:
    module = nn.Linear(1, 1)
    scheduler = make(sgd := torch.optim.SGD(module.parameters(), lr=0.1))
    return kind("ffn.0", module, sgd, scheduler=scheduler, args_schema=[TensorSpec(1)])  # type: ignore[arg-type]


class Own(ExpertBackend):
    def apply_gradients(self) -> None: ...


class OfLength(nn.Module):
    """Returns something else for long inputs."""

    def __init__(self, of_long: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.of_long = of_long

    def forward(self, x: Tensor) -> object:
        return x if x.shape[1] <= 8 else self.of_long(x)


class Overriding(ExpertBackend):
    def backward(self, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        return inputs


def session(max_length: object = 8, ttl: float = 60.0) -> object:
    return RemoteExpert("block.0", "unix:/nowhere").session(max_length, ttl)  # type: ignore[arg-type]


MISTAKES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: expert("ffn"), ValueError, "not a uid"),
    (lambda: expert("ffn.01"), ValueError, "leading"),
    (lambda: expert(args_schema=()), ValueError, "without inputs"),
    (lambda: expert(optimizer=adam(nn.Linear(1, 1))), ValueError, "another module"),
    (lambda: expert(module=nn.Linear(2, 1)), SchemaError, "does not accept"),
    (lambda: expert(module=nn.Flatten(0), args_schema=[TensorSpec(2)]), SchemaError, "as many rows"),
    *(
        (
            lambda f=f: expert(module=OfLength(f), args_schema=[TensorSpec(None, 2)]),
            SchemaError,
            "the length of its input",
        )
        for f in (lambda x: x.sum(1), lambda x: None, lambda x: x.unbind(1), lambda x: x.double())
    ),
    (lambda: expert(args_schema=["x"]), SchemaError, "TensorSpec"),
    *((lambda o=o: expert(**o), ValueError, "batch sizes") for o in ({"max_batch_size": 0}, {"min_batch_size": 5000})),
    (lambda: expert(timeout=-1.0), ValueError, "timeout is a finite number"),
    (lambda: Overriding("ffn.0", nn.Linear(1, 1)), TypeError, "overrides backward.*override apply_gradients"),
    (lambda: expert(clip_grad_norm=0.0), ValueError, "a norm above 0"),
    (lambda: expert(keep_activations=True), ValueError, "a number of rows"),
    (lambda: ExpertServer([expert(), expert()]), ValueError, "two backends are called 'ffn.0'"),
    (lambda: expert(gradient_reduction="max"), ValueError, "gradient_reduction"),
    (
        lambda: expert(module=(m := nn.Linear(1, 1)), optimizer=torch.optim.LBFGS(m.parameters())),
        ValueError,
        r"ffn\.0: LBFGS\.step is called without arguments \(.*'closure'\); use another one, or override",
    ),
    (lambda: stepping(torch.optim.lr_scheduler.ReduceLROnPlateau), ValueError, r"ReduceLROnPlateau\.step .*'metrics'"),
    (lambda: expert(module=CausalBlock(), kwargs_schema={"cache": TensorSpec(4)}), ValueError, "an input called cache"),
    (lambda: ExpertServer([]), ValueError, "without experts"),
    (lambda: ExpertServer([expert()], session_bytes=65535), ValueError, "session_bytes is a whole"),
    (lambda: ExpertServer([expert()], session_bytes=1e9), ValueError, "session_bytes is a whole"),  # type: ignore[arg-type]
    (lambda: RemoteExpert("ffn", "unix:/nowhere"), ValueError, "not a uid"),
    (lambda: RemoteExpert("ffn.0", "unix:/nowhere", forward_timeout=0), ValueError, "forward_timeout"),
    *((lambda n=n: session(n), ValueError, "max_length is a whole number") for n in (0, True, 2.5, 1 << 70)),
    *((lambda s=s: session(ttl=s), ValueError, "ttl is a finite number") for s in (0.0, float("inf"))),
    (lambda: mixture(grid_size=()), ValueError, "grid_size"),
    (lambda: mixture(k_min=9), ValueError, "k_min"),
    (lambda: mixture(forward_timeout=0.0), ValueError, "forward_timeout"),
    (lambda: mixture(timeout_after_k_min=-1.0), ValueError, "timeout_after_k_min"),
    (lambda: mixture(uid_prefix="1ffn"), ValueError, "not a prefix"),
    (lambda: mixture(k_min="a"), TypeError, "k_min is a .*number.* got 'a'"),
    (lambda: mixture(backward_timeout="a"), TypeError, "backward_timeout is a .*number.* got 'a'"),
    (lambda: mixture(RemoteSwitchMixtureOfExperts, jitter="a"), TypeError, "jitter is a number in .* got 'a'"),
]


@pytest.mark.parametrize(("make", "error", "says"), MISTAKES)
def test_mistakes_are_explained(make: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


def test_an_override_of_the_update_may_step_as_it_needs() -> None:
    assert stepping(torch.optim.lr_scheduler.ReduceLROnPlateau, Own)


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
    with calling(backend) as expert:
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
        with pytest.raises((ProtocolError, SchemaError), match="gradient|2 rows were sent, but"):
            y.sum().backward()
    assert sum(taken) < 1000


# --- an error over NaN names where it was made: in the module, or in the gradients of its caller


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
