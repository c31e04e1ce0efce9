"""What is saved comes back as it was: tensors of every kind, and state to the last bit."""

from __future__ import annotations

import json
import math
import struct
import threading
from collections import Counter, OrderedDict, deque
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anabranch import checkpoint
from anabranch.checkpoint import state as checkpoint_state
from anabranch.errors import CheckpointError
from anabranch.record.spans import Span, heard, on_fault_point
from anabranch.tensors.dtypes import SAFETENSORS_NAMES

DTYPES = list(SAFETENSORS_NAMES)


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert bits(found[name]) == bits(tensor)


def random(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Random bits: NaNs and denormals included."""
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


tensors = st.builds(random, st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4).map(tuple))
names = st.text(max_size=20).filter(lambda name: name != "__metadata__")
groups = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True)


@settings(deadline=None, max_examples=25)
@given(st.dictionaries(groups, st.dictionaries(names, tensors, max_size=5), max_size=3))
def test_tensors_of_every_dtype_and_shape_come_back(
    tmp_path_factory: pytest.TempPathFactory, given_groups: dict[str, dict[str, Tensor]]
) -> None:
    directory = tmp_path_factory.mktemp("checkpoint")
    checkpoint.write(directory, given_groups, None, step=1)
    found = checkpoint.read(directory)
    assert found.groups == tuple(given_groups)
    for group, expected in given_groups.items():
        assert_same(found.tensors(group), expected)


def test_any_strides_storage_and_gradient_flag_are_written_as_values(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    parameter = torch.nn.Parameter(torch.randn(3))
    given_tensors = {
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "expanded": base[:1].expand(3, 6),
        "tied.a": parameter,
        "tied.b": parameter,
        "view": base[2],
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch._neg_view(torch.randn(3)),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        "empty, no strides": torch.empty_strided((0, 2), (0, 0)),
        "empty, from numpy": torch.from_numpy(np.empty(0)),
    }
    checkpoint.write(tmp_path, {"model": given_tensors}, None, step=0)
    found = checkpoint.read(tmp_path).tensors("model")
    for name, tensor in given_tensors.items():
        assert torch.equal(found[name], tensor.detach().resolve_conj().resolve_neg()), name
        assert not found[name].requires_grad
    found["tied.a"].zero_()
    assert torch.equal(found["tied.b"], parameter)


def test_files_are_plain_safetensors_with_every_tensor_aligned_to_its_itemsize(tmp_path: Path) -> None:
    given_tensors = {
        "b": torch.randn(3), "flag": torch.tensor([True]), "half": torch.zeros(3).half(), "a": torch.arange(5),
        "e": torch.empty(0, 2), "wide": torch.zeros(1).double(),
    }  # fmt: skip
    checkpoint.write(tmp_path, {"model": given_tensors}, None, step=0)
    [file] = tmp_path.glob("*.safetensors")
    assert file.name == "model-00000001.safetensors"
    found = safetensors.torch.load_file(file)
    assert_same({name: found[name] for name in given_tensors}, given_tensors)
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert all(header[name]["data_offsets"][0] % each.dtype.itemsize == 0 for name, each in given_tensors.items())


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.builds(checkpoint.TensorName, st.text())
    | st.builds(checkpoint_state.Custom, st.text(), st.integers())
    | st.sampled_from([np.float64(0.1), np.float32("inf"), np.int8(-3), np.bool_(True), np.longdouble(1) / 3])
    | st.sampled_from([Path("a/b"), Path("/")])
)
keys = scalars.filter(lambda key: key == key) | st.tuples(st.integers(), st.text())
states = st.recursive(
    scalars,
    lambda children: (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=4).map(tuple)
        | st.lists(children, max_size=4).map(lambda items: deque(items, 5))
        | st.sets(keys, max_size=3)
        | st.frozensets(keys, max_size=3)
        | st.sampled_from([np.arange(3.0), np.ones((2, 0)), np.array(2, ">i2"), np.ones((2, 3), "F"), np.zeros(1, "?")])
        | st.dictionaries(keys, children, max_size=4)
        | st.dictionaries(st.text(), children, max_size=4)
        | st.dictionaries(st.text(), children, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, st.integers(), max_size=4).map(Counter)
        | st.dictionaries(st.sampled_from(["$int", "$dict", "$", "a"]), children, max_size=3)
    ),
    max_leaves=12,
)


def same(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b) and b.flags.writeable
    if isinstance(a, deque) and isinstance(b, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, list | tuple | deque) and isinstance(b, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return len(a) == len(b) and all(same(p, q) for p, q in zip(a.items(), b.items(), strict=True))
    return a == b


@settings(deadline=None, max_examples=60)
@given(states)
def test_state_is_restored_with_every_type_key_order_and_bit(value: object) -> None:
    text = json.dumps(checkpoint_state.encode(value), allow_nan=False)
    assert same(checkpoint_state.decode(json.loads(text)), value)


def test_split_names_tensors_by_path_and_distinguishes_equal_paths() -> None:
    one, two = torch.ones(1), torch.zeros(1)
    state, found = checkpoint.split({"a.b": one, "a": {"b": two}, "n": [None, (one,)]})
    assert list(found) == ["a.b", "a.b#2", "n.1.0"]
    joined = checkpoint.join(state, found)
    assert isinstance(joined, dict)
    assert joined["a"]["b"] is two
    assert joined["n"][1] == (one,)
    assert checkpoint.split(one) == (checkpoint.TensorName("tensor"), {"tensor": one})


class Number(int):
    pass


def cycle() -> list[object]:
    items: list[object] = []
    items.append(items)
    return items


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {3j}]}, r"the state at a\.1\.0 is a builtins\.complex"),
        ({"a": np.array([None])}, r"the state at a is an array of object"),
        ({"lr": torch.tensor(1.0)}, r"the state at lr is a torch\.Tensor.*put tensors into a group"),
        ({"n": Number(3)}, r"the state at n is a .*Number"),
        ({"size": torch.Size([1])}, r"the state at size is a torch\.Size"),
        ({("k", range(2)): 1}, r"range"),
        (object(), r"the state at the top is a builtins\.object"),
        (cycle(), r"nested deeper than 100"),
    ],
)
def test_state_that_would_not_come_back_is_refused_naming_its_path(tmp_path: Path, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checkpoint.write(tmp_path / "new", {}, value, step=0)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ({"../x": {}}, ValueError, r"'\.\./x'"),
        ({"m": {"w": torch.ones(2, 2).to_sparse()}}, ValueError, r"tensor 'w' of group 'm' is sparse_coo"),
        ({"m": {"w": torch.ones(2, device="meta")}}, ValueError, r"tensor 'w' of group 'm' is meta"),
        ({"m": {"w": torch.ones(2, dtype=torch.complex128)}}, ValueError, r"'w' of group 'm' is torch\.complex128"),
        ({"m": {"__metadata__": torch.ones(2)}}, ValueError, r"__metadata__"),
        ({"m": {"w": 3}}, TypeError, r"got 'w': int"),
        ({"m": {3: torch.ones(2)}}, TypeError, r"got 3: Tensor"),
    ],
)
def test_groups_that_cannot_be_kept_are_refused_before_anything_is_touched(
    tmp_path: Path, groups: dict[str, dict[str, Tensor]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        checkpoint.write(tmp_path / "new", groups, None, step=0)
    for options in ({"step": -1}, {"step": 0, "keep": 0}):
        with pytest.raises(ValueError, match="step >= 0, and its directory keeps >= 1"):
            checkpoint.write(tmp_path / "new", {}, None, **options)
    assert not (tmp_path / "new").exists()


def save(directory: Path, step: int, **options: int) -> Path:
    return checkpoint.write(
        directory, {"model": {"w": torch.full((2,), float(step))}}, {"step": step}, step=step, **options
    )


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_generations_stay_and_older_files_go(tmp_path: Path, keep: int) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"not ours")
    (tmp_path / "notes.txt").write_text("not ours")
    for step in range(5):
        save(tmp_path, step, keep=keep)
    kept = [f"{number:08d}" for number in range(6 - keep, 6)]
    ours = {f"model-{number}.safetensors" for number in kept} | {f"manifest-{number}.json" for number in kept}
    assert {path.name for path in tmp_path.iterdir()} == ours | {
        ".lock",
        "model-00001-of-00002.safetensors",
        "notes.txt",
    }


def test_going_back_to_an_earlier_step_makes_that_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 9)
    save(tmp_path, 4)
    assert checkpoint.read(tmp_path).step == 4
    assert checkpoint.read(tmp_path, generation=1).step == 9
    found = checkpoint.read_newest(tmp_path)
    assert found is not None
    assert found.step == 4


def test_read_newest_takes_the_highest_step_of_the_directories_under_a_path(tmp_path: Path) -> None:
    assert checkpoint.read_newest(tmp_path / "nowhere") is None
    assert checkpoint.read_newest(tmp_path) is None
    for step in (3, 12, 7):
        save(tmp_path / "run" / f"step-{step}", step)
    found = checkpoint.read_newest(tmp_path)
    assert found is not None
    assert (found.step, found.path) == (12, tmp_path / "run" / "step-12")
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        checkpoint.read(tmp_path)
    with pytest.raises(CheckpointError, match="there is no such directory"):
        checkpoint.read(tmp_path / "nowhere")


def test_an_unknown_group_is_named_with_the_known_ones(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"has the groups \['model'\], not 'optimizer'"):
        checkpoint.read(tmp_path).tensors("optimizer")


def test_a_second_writer_is_refused_because_the_directory_is_claimed(tmp_path: Path) -> None:
    inside, outcome = threading.Event(), []

    def second(name: str) -> None:
        if name == "checkpoint.claimed" and not inside.is_set():
            inside.set()
            with pytest.raises(CheckpointError, match="another process or thread is saving to") as caught:
                save(tmp_path, 2)
            outcome.append(caught.value)

    with on_fault_point(second):
        save(tmp_path, 1)
    assert outcome
    assert checkpoint.read(tmp_path).step == 1
    save(tmp_path, 3)


def test_a_save_is_reported_with_its_size(tmp_path: Path) -> None:
    seen: list[Span] = []
    with heard(seen.append):
        save(tmp_path, 1)
    [(name, *_, facts, _)] = seen
    assert name == "checkpoint.written"
    written = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert facts is not None
    assert facts["bytes"] == written


def test_fit_lists_every_difference_with_both_shapes_and_dtypes() -> None:
    expected = {"same": torch.ones(2), "gone": torch.ones(1, 2), "shape": torch.ones(2, 3), "dtype": torch.ones(2)}
    found = {"same": torch.ones(2), "new": torch.ones(4), "shape": torch.ones(3, 2), "dtype": torch.ones(2).half()}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.fit(expected, found, "optimizer")
    assert str(caught.value).splitlines() == [
        "the checkpoint belongs to another optimizer:",
        "  missing: gone (1, 2) float32",
        "  unexpected: new (4,) float32",
        "  differs: shape is (3, 2) float32 in the checkpoint, (2, 3) float32 here",
        "  differs: dtype is (2,) float16 in the checkpoint, (2,) float32 here",
    ]
    checkpoint.fit(expected, {name: tensor.clone() for name, tensor in expected.items()})
