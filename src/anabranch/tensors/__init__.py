"""Tensors seen from outside: what one looks like (``TensorSpec``), and how they nest (``structures``).

Not a tensor type: PyTorch is the tensor engine. Open ``spec.py`` for the description of one tensor, ``structures.py``
for nested containers of them, ``tree_codec.py`` for containers and values in files and messages, ``rows.py`` for the
rows (dim 0) that a batch's tensors share, ``jagged.py`` for several ragged features in one flat tensor, ``packing.py``
for many tensors in one message, and ``blocks.py`` for tensors that are rounded to 8 bits.
"""

from anabranch.tensors.blocks import from_blocks, to_blocks
from anabranch.tensors.jagged import Jagged, KeyedJagged, bags_of
from anabranch.tensors.packing import Compression, check_compression
from anabranch.tensors.rows import as_tensors, count_rows, is_jagged
from anabranch.tensors.spec import TensorSpec
from anabranch.tensors.structures import Structure, flatten, map_structure, named_parts, paths, unflatten

__all__ = [
    "Compression",
    "Jagged",
    "KeyedJagged",
    "Structure",
    "TensorSpec",
    "as_tensors",
    "bags_of",
    "check_compression",
    "count_rows",
    "flatten",
    "from_blocks",
    "is_jagged",
    "map_structure",
    "named_parts",
    "paths",
    "to_blocks",
    "unflatten",
]
