"""The tree codec beyond what checkpoints ask of it: tensors by number, and tags of a user's own."""

from __future__ import annotations

import json
from collections import OrderedDict
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor

from anabranch.tensors.tree_codec import Path, decode, encode, map_leaves


def test_tensors_are_written_by_their_number() -> None:
    tree = {"rows": (torch.ones(2), None), "more": [torch.zeros(1)]}
    tensors: list[Tensor] = []
    text = json.dumps(encode(tree, tensors=tensors))
    assert text == '{"rows": {"$tuple": [{"$tensor": 0}, null]}, "more": [{"$tensor": 1}]}'
    found = decode(json.loads(text), tensors=tensors)
    assert found["rows"][0] is tree["rows"][0]
    assert found["more"][0] is tree["more"][0]
    with pytest.raises(ValueError, match=r"a '\$tensor' that cannot be read"):
        decode(json.loads(text), tensors=tensors[:1])
    with pytest.raises(ValueError, match=r"the state at rows\.0 is a torch\.Tensor"):
        encode(tree)


class Colour(Enum):
    RED = 1


class Items(list[object]):
    pass


def own(value: Any, path: Path) -> object:
    if isinstance(value, Colour):
        return {"$colour": (value.name, b"x")}
    if isinstance(value, Items):
        return list(value)
    raise ValueError(f"{value!r} at {path}")


def test_a_user_adds_tags_and_stand_ins() -> None:
    text = json.dumps(encode({1: Items([Colour.RED, 2])}, own))
    found = decode(json.loads(text), {"$colour": lambda content: (Colour[content[0]], content[1])})
    assert found == {1: [(Colour.RED, b"x"), 2]}
    with pytest.raises(ValueError, match=r"the key '\$colour', which this version does not know"):
        decode(json.loads(text))
    with pytest.raises(ValueError, match=r"at \('a', 0\)"):
        encode({"a": (object(),)}, own)


@pytest.mark.parametrize("tag", ["$tuple", "$set", "$list", "$deque", "$dict", "$ordered"])
def test_a_container_is_never_made_of_a_text(tag: str) -> None:
    with pytest.raises(ValueError, match="expected a list, got str"):
        decode({tag: "ab"})


def test_leaves_are_replaced_in_keys_and_values() -> None:
    tree = OrderedDict({(1, "a"): [2, {3}]})
    assert map_leaves(lambda leaf, path: (leaf, len(path)), tree) == OrderedDict(
        {((1, 1), ("a", 1)): [(2, 2), {(3, 3)}]}
    )
