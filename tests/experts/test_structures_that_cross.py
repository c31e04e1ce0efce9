"""Leading dimensions and containers: experts and mixtures take and return the structures of the local module."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from expert_modules import Feedforward, adam, calling, served
from torch import Tensor, nn

import anabranch as ab
from anabranch.errors import ProtocolError, SchemaError
from anabranch.experts import (
    Directory,
    ExpertBackend,
    RemoteExpert,
    RemoteMixtureOfExperts,
    RemoteSwitchMixtureOfExperts,
    Schema,
)
from anabranch.tensors import TensorSpec
from anabranch.transport import pack
from covering import slow_except

F64 = torch.float64
SPEC = TensorSpec(4, dtype=F64)


def double(module: nn.Module) -> nn.Module:
    return module.double()


@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 3, 5), (0, 3), (2, 0, 5), (1, 1)])
@pytest.mark.parametrize("keep", [0, 100])
def test_outputs_gradients_and_updates_are_those_of_the_module_here(shape: tuple[int, ...], keep: int) -> None:
    here = double(Feedforward())
    there = copy.deepcopy(here)
    mine = adam(here)
    with calling(ExpertBackend("ffn.0", there, adam(there), args_schema=[SPEC], keep_activations=keep)) as expert:
        for _ in range(2):
            x = torch.randn(*shape, 4, dtype=F64)
            near, far = x.clone().requires_grad_(), x.clone().requires_grad_()
            expected, answer = here(near), expert(far)
            assert answer.shape == expected.shape
            assert torch.allclose(answer, expected, rtol=1e-12)
            weights = torch.randn_like(expected)
            (expected * weights).sum().backward()
            (answer * weights).sum().backward()
            assert torch.allclose(far.grad, near.grad, rtol=1e-12)
            if x.numel():
                mine.step()
            mine.zero_grad()
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-11)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 5), (6,)])
def test_a_mixture_chooses_experts_for_each_position_of_a_sequence(shape: tuple[int, ...]) -> None:
    directory = Directory()
    modules = [double(Feedforward()) for _ in range(3)]
    backends = [ExpertBackend(f"f.{i}", copy.deepcopy(m), args_schema=[SPEC]) for i, m in enumerate(modules)]
    with served(*backends, directory=directory):
        mixture = RemoteMixtureOfExperts(4, [3], directory, "f", k_best=2).double()
        x = torch.randn(*shape, 4, dtype=F64)
        near, far = x.clone().requires_grad_(), x.clone().requires_grad_()
        answer = mixture(far)
        best, chosen = mixture.gate(near).topk(2, dim=-1)
        every = torch.stack([module(near) for module in modules], dim=-2)
        picked = every.gather(-2, chosen[..., None].expand(*chosen.shape, 4))
        expected = (best.softmax(dim=-1)[..., None] * picked).sum(-2)
        assert torch.allclose(answer, expected, rtol=1e-12)
        answer.square().sum().backward()
        of_gate = mixture.gate.weight.grad.clone()
        mixture.zero_grad()
        expected.square().sum().backward()
        assert torch.allclose(far.grad, near.grad, rtol=1e-11)
        assert torch.allclose(of_gate, mixture.gate.weight.grad, rtol=1e-11)
        switch = RemoteSwitchMixtureOfExperts(4, [3], directory, "f").double().eval()
        output, loss = switch(x)
        probability, index = switch.gate(x).softmax(dim=-1).max(dim=-1)
        known = probability[..., None] * every.gather(-2, index[..., None, None].expand(*index.shape, 1, 4))[..., 0, :]
        assert torch.allclose(output, known, rtol=1e-12)
        assert loss.shape == ()


class Pair(NamedTuple):
    first: Tensor
    rest: object


@dataclass
class Output(OrderedDict[str, object]):
    """As Hugging Face's ModelOutput: a dataclass whose fields that are not ``None`` are items, too."""

    hidden: Tensor | None = None
    logits: Tensor | None = None
    more: object = None

    def __post_init__(self) -> None:
        for name in ("hidden", "logits", "more"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


class Custom(Mapping[str, object]):
    def __init__(self, items: Mapping[str, object]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> object:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Wraps(nn.Module):
    """Returns what ``made`` makes of two tensors."""

    def __init__(self, made: type) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.made = made

    def forward(self, given: object) -> object:
        a = given[0] if isinstance(given, tuple) else given["z"]  # type: ignore[index]
        b = given[1] if isinstance(given, tuple) else given["a"]  # type: ignore[index]
        return make(self.made, self.linear(a), b * 2.0)


def make(made: type, first: object, second: object) -> object:
    if made.__name__ == "Pair":
        return Pair(first, [second, None])  # type: ignore[arg-type]
    if made.__name__ == "Output":
        return Output(hidden=first, more=(second, {"z": first, "a": second}))  # type: ignore[arg-type]
    if made.__name__ == "defaultdict":
        return defaultdict(None, z=first, a=second)
    return made({"z": first, "a": second}) if made.__name__ != "tuple" else (first, second)


def leaves(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [leaf for part in value.values() for leaf in leaves(part)]
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, (tuple, list)) else []


KINDS = [dict, OrderedDict, defaultdict, UserDict, Output, Custom, Pair, tuple]


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("made", KINDS, ids=lambda made: made.__name__)
@pytest.mark.parametrize("given", [dict, OrderedDict, UserDict, tuple, Pair], ids=lambda made: made.__name__)
def test_containers_come_back_as_they_are_and_are_taken(made: type, given: type) -> None:
    here = Wraps(made)
    there = copy.deepcopy(here)
    spec = TensorSpec(4)
    declared = (spec, spec) if given in (tuple, Pair) else {"z": spec, "a": spec}
    backend = ExpertBackend("w.0", there, adam(there), args_schema=[declared])
    with served(backend) as server:
        a, b = (torch.randn(2, 3, 4) for _ in range(2))
        near, far = ([tensor.clone().requires_grad_() for tensor in (a, b)] for _ in range(2))
        expected = here(Pair(*near) if given is Pair else make(given, *near))
        answer = RemoteExpert("w.0", server.endpoint)(Pair(*far) if given is Pair else make(given, *far))
        assert type(answer) is type(expected)
        if isinstance(expected, Mapping):
            assert list(answer) == list(expected)  # type: ignore[call-overload]
        if isinstance(answer, Output):
            assert answer.logits is None
            assert answer.hidden is answer["hidden"]
        if isinstance(answer, Pair):
            assert isinstance(answer.rest, list)
            assert answer.rest[1] is None
        for known, came in zip(leaves(expected), leaves(answer), strict=True):
            assert torch.allclose(known, came)
        sum((leaf.square().sum() for leaf in leaves(answer)), torch.zeros(())).backward()
        sum((leaf.square().sum() for leaf in leaves(expected)), torch.zeros(())).backward()
        for one, other in zip(near, far, strict=True):
            assert torch.allclose(one.grad, other.grad)  # type: ignore[arg-type]


class Called(nn.Module):
    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self.linear, self.expert = nn.Linear(4, 4), RemoteExpert("w.0", endpoint)

    def forward(self, x: Tensor) -> object:
        return self.expert({"z": self.linear(x), "a": x})


@pytest.mark.parametrize("made", slow_except(KINDS, Custom), ids=lambda made: made.__name__)
def test_containers_come_back_in_a_graph_as_on_the_tape(made: type) -> None:
    def loss(model: Called, x: Tensor) -> Tensor:
        answer = model(x)
        assert type(answer) is made
        return sum((leaf.square().sum() for leaf in leaves(answer)), torch.zeros(()))

    there = Wraps(made)
    backend = ExpertBackend("w.0", there, adam(there), args_schema=[{"z": TensorSpec(4), "a": TensorSpec(4)}])
    with served(backend) as server:
        model = Called(server.endpoint)
        step = ab.TrainStep(model, loss, torch.optim.SGD(model.linear.parameters(), lr=0.1))
        with ab.Executor(step, engine="graph") as executor:  # which compares its first batch with the tape
            executor.run(batch=torch.ones(3, 4))
            assert executor.engine() == "graph"


def test_a_class_that_is_not_imported_here_becomes_a_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Schema((), {}, Output(hidden=SPEC, more=Pair(SPEC, OrderedDict(b=SPEC, a=SPEC))))  # type: ignore[arg-type]
    packed = schema.packed
    same = Schema.unpack(packed)
    assert type(same.outputs) is Output
    assert same.hash == schema.hash
    monkeypatch.delitem(sys.modules, __name__)
    unpacked = Schema.unpack(packed)
    assert unpacked.hash == schema.hash  # so that its calls are served
    plain = unpacked.outputs
    assert type(plain) is dict
    assert plain["more"]._fields == ("first", "rest")
    assert type(plain["more"].rest) is OrderedDict
    assert list(plain["more"].rest) == ["b", "a"]
    assert __name__ not in sys.modules  # nothing is imported because a peer names it


@pytest.mark.parametrize(
    "node",
    [
        {"$named": ["os", "system", ["a b"], [None]]},
        {"$named": ["os", "system", ["_x", "class"], [None, None]]},
        {"$mapping": ["os", "system", ["a", "a"], [None, None]]},
        {"$mapping": ["os", "system", ["a"], [None, None]]},
        {"$mapping": ["os", "system", ["a"]]},
        {"$named": ["collections", "OrderedDict", ["1"], [None]]},
        {"$spec": [[2], 99, True, None, False]},
        {"$spec": [[-2], 1, True, None, False]},
        {"$tensor": 0},
        {1: None},
        {"$named": [1, 2, [3], [None]]},
        {"$mapping": ["os", 4, ["a"], [None]]},
        7,
    ],
)
def test_a_peer_cannot_name_a_class_that_is_not_a_container(node: object) -> None:
    with pytest.raises(ProtocolError):
        Schema.unpack(pack([{"$tuple": []}, {}, node, 1]))
    # A function, or a class of another kind, is not made.
    plain = {"$mapping": ["os", "system", [], []]}
    assert type(Schema.unpack(pack([{"$tuple": []}, {}, plain, 1])).outputs) is dict


@pytest.mark.parametrize("outputs", [{"\x1b[2J": None}, {"a": [{"\x9b2J": []}]}, {"two\N{NO-BREAK SPACE}words": None}])
def test_a_key_that_messages_cannot_show_is_refused_where_it_is_served_and_of_a_peer(outputs: Any) -> None:
    """Errors show the keys of a schema, and a peer chooses them."""
    with pytest.raises(SchemaError, match=r"a key of a mapping holds characters that are not printable: .*\\x"):
        Schema((), {}, outputs)
    with pytest.raises(ProtocolError, match="a key of a mapping holds characters that are not printable"):
        Schema.unpack(pack([{"$tuple": []}, {}, outputs, 1]))


def test_a_schema_nested_without_end_is_refused() -> None:
    lists = b"\x91" * 20_000 + b"\xc0"  # in MessagePack: a list of a list of ... of None
    with pytest.raises(ProtocolError):
        Schema.unpack(b"\x94\x81\xa6$tuple" + lists + b"\x80\xc0\x01")


class Odd(Mapping[str, object]):
    """Cannot be made of its items."""

    def __init__(self, first: object, second: object) -> None:
        self._items = {"a": first, "b": second}

    def __getitem__(self, key: str) -> object:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return 2


class ReturnsOdd(nn.Module):
    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> object:
        return {"odd": Odd(x, x), "keys": {1: x}, "set": {"a", "b"}}[self.value]  # type: ignore[index]


@pytest.mark.parametrize(
    ("value", "says"), [("odd", "Odd cannot be rebuilt"), ("keys", "string keys"), ("set", "returned set")]
)
def test_unsupported_outputs_are_refused_at_the_server(value: str, says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        ExpertBackend("odd.0", ReturnsOdd(value), args_schema=[TensorSpec(4)])
