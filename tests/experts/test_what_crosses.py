"""What crosses: leading dimensions, containers and sequences of any length, as with the module here."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from expert_modules import Feedforward, Slow, adam, all_waiting, calling, expert_of, served, sgd, twins
from torch import Tensor, nn

import anabranch as ab
from anabranch.deadline import Deadline
from anabranch.errors import ProtocolError, SchemaError
from anabranch.experts import (
    Directory,
    ExpertBackend,
    RemoteExpert,
    RemoteMixtureOfExperts,
    RemoteSwitchMixtureOfExperts,
    Schema,
    Task,
    TaskPool,
)
from anabranch.tensors import TensorSpec
from anabranch.transport import pack
from covering import slow_except

F64 = torch.float64
SPEC = TensorSpec(4, dtype=F64)


@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 3, 5), (2, 0, 5), (1, 1)])
@pytest.mark.parametrize("keep", [0, 100])
def test_outputs_gradients_and_updates_are_those_of_the_module_here(shape: tuple[int, ...], keep: int) -> None:
    here = Feedforward().double()
    there = copy.deepcopy(here)
    mine = adam(here)
    with calling(expert_of(there, optimizer=adam(there), keep_activations=keep)) as expert:
        for _ in range(2):
            near, far = twins(*shape, 4, dtype=F64)
            expected, answer = here(near), expert(far)
            assert answer.shape == expected.shape
            assert torch.allclose(answer, expected, rtol=1e-12)
            weights = torch.randn_like(expected)
            (expected * weights).sum().backward()
            (answer * weights).sum().backward()
            assert torch.allclose(far.grad, near.grad, rtol=1e-12)
            if near.numel():
                mine.step()
            mine.zero_grad()
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-11)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 5), (6,)])
def test_a_mixture_chooses_experts_for_each_position_of_a_sequence(shape: tuple[int, ...]) -> None:
    directory = Directory()
    modules = [Feedforward().double() for _ in range(3)]
    with served(*(expert_of(copy.deepcopy(m), uid=f"f.{i}") for i, m in enumerate(modules)), directory=directory):
        mixture = RemoteMixtureOfExperts(4, [3], directory, "f", k_best=2).double()
        near, far = twins(*shape, 4, dtype=F64)
        switch = RemoteSwitchMixtureOfExperts(4, [3], directory, "f").double().eval()
        output, loss = switch(near)
        answer = mixture(far)
        best, chosen = mixture.gate(near).topk(2, dim=-1)
        every = torch.stack([module(near) for module in modules], dim=-2)
        expected = (best.softmax(dim=-1)[..., None] * every.gather(-2, chosen[..., None].expand(*chosen.shape, 4))).sum(
            -2
        )
        assert torch.allclose(answer, expected, rtol=1e-12)
        probability, index = switch.gate(near).softmax(dim=-1).max(dim=-1)
        known = probability[..., None] * every.gather(-2, index[..., None, None].expand(*index.shape, 1, 4))[..., 0, :]
        assert torch.allclose(output, known, rtol=1e-12)
        assert loss.shape == ()
        answer.square().sum().backward()
        of_gate = mixture.gate.weight.grad.clone()
        mixture.zero_grad()
        expected.square().sum().backward()
        assert torch.allclose(far.grad, near.grad, rtol=1e-11)
        assert torch.allclose(of_gate, mixture.gate.weight.grad, rtol=1e-11)


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


class Odd(Custom):
    """Cannot be made of its items."""

    def __init__(self, first: object, second: object) -> None:
        super().__init__({"a": first, "b": second})


class Wraps(nn.Module):
    """Returns what ``made`` makes of two tensors."""

    def __init__(self, made: type) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.made = made

    def forward(self, both: Any) -> object:
        a, b = (both[0], both[1]) if isinstance(both, tuple) else (both["z"], both["a"])
        return make(self.made, self.linear(a), b * 2.0)


def make(made: type, first: object, second: object) -> object:
    if made.__name__ == "Pair":
        return Pair(first, [second, None])  # type: ignore[arg-type]
    if made.__name__ == "Output":
        return Output(hidden=first, more=(second, {"z": first, "a": second}))  # type: ignore[arg-type]
    return made({"z": first, "a": second}) if made.__name__ != "tuple" else (first, second)


def leaves(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [leaf for part in value.values() for leaf in leaves(part)]
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, (tuple, list)) else []


def total(value: object) -> Tensor:
    return sum((leaf.square().sum() for leaf in leaves(value)), torch.zeros(()))


KINDS = [dict, OrderedDict, UserDict, Output, Custom, Pair, tuple]


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("made", KINDS, ids=lambda made: made.__name__)
@pytest.mark.parametrize("taken", [dict, OrderedDict, UserDict, tuple, Pair], ids=lambda made: made.__name__)
def test_containers_come_back_as_they_are_and_are_taken(made: type, taken: type) -> None:
    here = Wraps(made)
    spec = TensorSpec(4)
    declared = (spec, spec) if taken in (tuple, Pair) else {"z": spec, "a": spec}
    with calling(expert_of(copy.deepcopy(here), args_schema=[declared])) as expert:
        near, far = zip(twins(2, 3, 4), twins(2, 3, 4), strict=True)
        expected = here(Pair(*near) if taken is Pair else make(taken, *near))
        answer = expert(Pair(*far) if taken is Pair else make(taken, *far))
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
        total(answer).backward()
        total(expected).backward()
        for one, other in zip(near, far, strict=True):
            assert torch.allclose(one.grad, other.grad)  # type: ignore[arg-type]


class Called(nn.Module):
    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self.linear, self.expert = nn.Linear(4, 4), RemoteExpert("ffn.0", endpoint)

    def forward(self, x: Tensor) -> object:
        return self.expert({"z": self.linear(x), "a": x})


@pytest.mark.parametrize("made", slow_except(KINDS, Custom), ids=lambda made: made.__name__)
def test_containers_come_back_in_a_graph_as_on_the_tape(made: type) -> None:
    def loss(model: Called, x: Tensor) -> Tensor:
        answer = model(x)
        assert type(answer) is made
        return total(answer)

    with served(expert_of(Wraps(made), args_schema=[{"z": TensorSpec(4), "a": TensorSpec(4)}])) as server:
        model = Called(server.endpoint)
        step = ab.TrainStep(model, loss, sgd(model.linear))
        with ab.Executor(step, engine="graph") as executor:  # which compares its first batch with the tape
            executor.run(batch=torch.ones(3, 4))
            assert executor.engine() == "graph"


def test_a_class_that_is_not_imported_here_becomes_a_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Schema((), {}, Output(hidden=SPEC, more=Pair(SPEC, OrderedDict(b=SPEC, a=SPEC))))  # type: ignore[arg-type]
    same = Schema.unpack(schema.packed)
    assert type(same.outputs) is Output
    assert same.hash == schema.hash
    monkeypatch.delitem(sys.modules, __name__)
    unpacked = Schema.unpack(schema.packed)
    assert unpacked.hash == schema.hash  # so that its calls are served
    plain = unpacked.outputs
    assert (type(plain), type(plain["more"])) == (dict, tuple)
    assert type(plain["more"][1]) is OrderedDict
    assert list(plain["more"][1]) == ["b", "a"]
    assert __name__ not in sys.modules  # nothing is imported because a peer names it


@pytest.mark.parametrize(
    "node",
    [
        {"$mapping": ["os", "system", ["a", "a"], [None, None]]},
        {"$mapping": ["os", "system", ["a"], [None, None]]},
        {"$mapping": ["os", "system", ["a"]]},
        {"$spec": [[2], 99, True, None, False]},
        {"$spec": [[-2], 1, True, None, False]},
        {"$tensor": 0},
        {1: None},
        {"$named": [1, 2, [3], [None]]},
        {"$mapping": ["os", 4, ["a"], [None]]},
        {"\x1b[2J": None},  # errors show the keys of a schema, and a peer chooses them
        {"a": [{"\x9b2J": []}]},
        {"two\N{NO-BREAK SPACE}words": None},
        7,
    ],
)
def test_a_peer_sends_no_other_class_than_containers_and_no_key_that_messages_cannot_show(node: Any) -> None:
    with pytest.raises(ProtocolError):
        Schema.unpack(pack([{"$tuple": []}, {}, node, 1]))


def test_a_name_that_is_no_container_s_makes_a_plain_one() -> None:
    for sent, kind in (({"$mapping": ["os", "system", [], []]}, dict), ({"$named": ["os", "system", [], []]}, tuple)):
        assert type(Schema.unpack(pack([{"$tuple": []}, {}, sent, 1])).outputs) is kind
    with pytest.raises(SchemaError, match=r"a key of a mapping holds characters that are not printable: .*\\x"):
        Schema((), {}, {"\x1b[2J": None})
    lists = b"\x91" * 20_000 + b"\xc0"  # in MessagePack: a list of a list of ... of None
    with pytest.raises(ProtocolError):
        Schema.unpack(b"\x94\x81\xa6$tuple" + lists + b"\x80\xc0\x01")


class Returns(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> object:
        return {"odd": Odd(x, x), "keys": {1: x}, "set": {"a", "b"}}[self.kind]


@pytest.mark.parametrize(
    ("kind", "says"), [("odd", "Odd cannot be rebuilt"), ("keys", "string keys"), ("set", "returned set")]
)
def test_unsupported_outputs_are_refused_at_the_server(kind: str, says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        expert_of(Returns(kind))


# --- sequences of any length: grouped by equal lengths, or padded with a mask; what comes back is the module's here


class Attention(nn.Module):
    """Every position sees all others of its row, and none that is padding."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(4, 12, dtype=F64)
        self.padded = padded
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        assert (mask is not None) >= self.padded
        self.seen.append(tuple(x.shape))
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        weights = (q @ k.mT).masked_fill(~mask[:, None, :], float("-inf")).softmax(dim=-1)
        mean = (x * mask[..., None]).sum(1) / mask.sum(1)[:, None]
        return {"mean": mean, "y": weights @ v, "weights": weights}


PADDED = pytest.mark.parametrize("padded", [False, True])


def attention(padded: bool, **options: Any) -> tuple[Attention, ExpertBackend]:
    module = Attention(padded)
    schema = [TensorSpec(None, 4, dtype=F64, pad=padded)]
    return module, expert_of(module, uid="a.0", args_schema=schema, **options)


@pytest.mark.parametrize("keep", [0, 100])
@PADDED
def test_requests_of_different_lengths_get_the_results_of_the_local_module(padded: bool, keep: int) -> None:
    there, backend = attention(padded, keep_activations=keep)
    here, slow = Attention(False), Slow()
    # Unlike lengths are batches, and so updates, of their own, between which the module here does not move.
    backend.optimizer = sgd(there, 0.1 if padded else 0.0)
    assert backend.get_info()["outputs_schema"] == {
        "mean": TensorSpec(4, dtype=F64),
        "y": TensorSpec(None, 4, dtype=F64),
        "weights": TensorSpec(None, None, dtype=F64),
    }
    pairs = [twins(index + 1, length, 4, dtype=F64) for index, length in enumerate([5, 3, 5, 4, 3])]
    there.seen.clear()
    answers: list[dict[str, Tensor]] = [{}] * len(pairs)
    with served(backend, expert_of(slow, 1, "slow.0")) as server:

        def ask(index: int) -> None:
            answers[index] = RemoteExpert("a.0", server.endpoint)(pairs[index][1])  # type: ignore[assignment]

        all_waiting(
            [lambda index=index: ask(index) for index in range(5)],  # type: ignore[misc]
            server, slow, backend.forward_pool,
        )  # fmt: skip
        expected = [here(near) for near, _ in pairs]
        assert sorted(there.seen) == ([(15, 5, 4)] if padded else [(4, 4, 4), (4, 5, 4), (7, 3, 4)])
        all_waiting([total(answer).backward for answer in answers], server, slow, backend.backward_pool)
    for answer, known, (near, far) in zip(answers, expected, pairs, strict=True):
        assert list(answer) == list(known)
        for name, tensor in known.items():
            assert answer[name].shape == tensor.shape
            assert torch.allclose(answer[name], tensor, rtol=1e-12, atol=1e-13), name
        total(known).backward()
        assert torch.allclose(near.grad, far.grad, rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]
    assert backend.updates == (1 if padded else 3)
    if padded:  # one update with the sum of the gradients
        sgd(here).step()
        for a, b in zip(here.parameters(), there.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_a_padded_batch_is_at_most_half_padding() -> None:
    pool, batches = TaskPool(lambda x: [x]), []
    for length in (2, 3, 60, 50, 1):
        pool.submit(Task([torch.ones(2, length)], 2, Deadline.after(600.0), length=length))
    while batch := pool.take_batch():
        batches.append([task.length for task in batch])
    assert batches == [[2, 3, 1], [60, 50]]


@PADDED
@pytest.mark.parametrize("shape", [(0, 5, 4), (2, 3, 5, 4), (2, 1, 4), (0, 3, 5, 4), (7, 40, 4)])
def test_any_number_of_rows_lengths_and_leading_dimensions(shape: tuple[int, ...], padded: bool) -> None:
    _, backend = attention(padded, max_batch_size=6, optimizer=None)
    with calling(backend) as expert:
        near, far = twins(*shape, dtype=F64)
        answer, expected = expert(far), Attention(False)(near.flatten(0, -3))
        assert isinstance(answer, dict)
        for name, tensor in expected.items():
            known = tensor.reshape(*shape[:-2], *tensor.shape[1:])
            assert answer[name].shape == known.shape
            assert torch.allclose(answer[name], known, rtol=1e-12)
        answer["y"].square().sum().backward()
        expected["y"].square().sum().backward()
        assert torch.allclose(far.grad, near.grad, rtol=1e-12, atol=1e-13)  # type: ignore[arg-type]


class Half(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x[:, ::2]


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return (x + y) * mask[..., None]


def test_mismatches_are_refused_by_name_and_affect_no_other_caller() -> None:
    two, free = TensorSpec(None, 4, pad=True), TensorSpec(None, 4)
    with calling(expert_of(Two(), args_schema=[two, two])) as expert:
        with pytest.raises(SchemaError, match=r"args\.1 has length 3, args\.0 2; they share one mask"):
            expert(torch.ones(1, 2, 4), torch.ones(1, 3, 4))
        with pytest.raises(SchemaError, match=r"args\.0: expected \(rows, any, 4\) float32, got \(1, 2, 5\)"):
            expert(torch.ones(1, 2, 5), torch.ones(1, 2, 4))
        assert torch.equal(expert(torch.ones(1, 2, 4), torch.ones(1, 2, 4)), torch.full((1, 2, 4), 2.0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="input called mask"):
        expert_of(Two(), args_schema=[two, two], kwargs_schema={"mask": TensorSpec(None)})
    with pytest.raises(ValueError, match="give both pad=True"):
        expert_of(Two(), args_schema=[two, free])
    with pytest.raises(SchemaError, match="mask"):
        expert_of(nn.Identity(), args_schema=[two])
    half = expert_of(Half(), args_schema=[two])
    with calling(half) as expert, pytest.raises(SchemaError, match="as its inputs were padded to"):
        expert(torch.ones(1, 4, 4))
    for shape in ((4,), (None, None)):
        with pytest.raises(ValueError, match="needs one dimension that varies"):
            TensorSpec(*shape, pad=True)
    assert two != free
    assert repr(two) == "TensorSpec(None, 4, dtype=torch.float32, pad=True)"


class HalfAndNone(Half):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


def test_an_output_may_be_of_another_length_than_the_input_or_none() -> None:
    with calling(expert_of(HalfAndNone(), args_schema=[TensorSpec(None, 4)])) as expert:
        for length in (0, 1, 6, 7):
            x = torch.randn(2, length, 4, requires_grad=True)
            answer, none = expert(x)
            assert torch.equal(answer, x[:, ::2])
            assert none is None
            answer.sum().backward()
            assert x.grad is not None
            assert float(x.grad.sum()) == 8 * ((length + 1) // 2)


@PADDED
def test_a_mixture_of_experts_of_sequences(padded: bool) -> None:
    directory = Directory()
    modules = [Attention(padded) for _ in range(2)]
    with torch.no_grad():
        modules[1].qkv.weight.mul_(2.0)
    schema = [TensorSpec(None, 4, dtype=F64, pad=padded)]
    backends = [expert_of(copy.deepcopy(m), uid=f"a.{i}", args_schema=schema) for i, m in enumerate(modules)]
    with served(*backends, directory=directory):
        mixture = RemoteMixtureOfExperts(4, [2], directory, "a", k_best=2).double()
        near, far = twins(5, 3, 4, dtype=F64)
        for module in modules:
            module.padded = False
        answer = mixture(far)
        weights = mixture.gate(near.mean(1)).softmax(dim=1)
        ys = [module(near) for module in modules]
        known = {
            name: sum(weights[:, i].view(-1, *[1] * (y[name].ndim - 1)) * y[name] for i, y in enumerate(ys))
            for name in ("mean", "y", "weights")
        }
        for name, tensor in known.items():
            assert torch.allclose(answer[name], tensor, rtol=1e-12)  # type: ignore[index, arg-type]
        total(answer["y"]).backward()  # type: ignore[index]
        total(known["y"]).backward()
        assert torch.allclose(far.grad, near.grad, rtol=1e-11, atol=1e-13)  # type: ignore[arg-type]
        assert mixture(torch.randn(5, 6, 4, dtype=F64))["y"].shape == (5, 6, 4)  # type: ignore[index]
