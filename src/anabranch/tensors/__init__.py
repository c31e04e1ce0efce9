"""Tensors seen from outside: what one looks like (``TensorSpec``), and how they nest (``structures``).

Not a tensor type: PyTorch is the tensor engine. Open ``spec.py`` for the description of one tensor, ``structures.py``
for nested containers of them and the rows (dim 0) that a batch's tensors share, ``tree_codec.py`` for containers and
values in files and messages, ``jagged.py`` for several ragged features in one flat tensor, ``blocks.py`` for tensors
that are rounded to 8 or 16 bits.
"""

from anabranch.tensors.blocks import from_blocks, in_half, to_blocks
from anabranch.tensors.jagged import Jagged, KeyedJagged, bags_of
from anabranch.tensors.spec import TensorSpec
from anabranch.tensors.structures import (
    Structure,
    as_tensors,
    count_rows,
    flatten,
    is_jagged,
    map_structure,
    named_parts,
    paths,
    unflatten,
)

__all__ = [
    "Jagged",
    "KeyedJagged",
    "Structure",
    "TensorSpec",
    "as_tensors",
    "bags_of",
    "count_rows",
    "flatten",
    "from_blocks",
    "in_half",
    "is_jagged",
    "map_structure",
    "named_parts",
    "paths",
    "to_blocks",
    "unflatten",
]
