"""Tensors summed, gathered and broadcast over the workers of a ``torch.distributed`` job.

Open ``workers.py`` first: the group, and how every wait in it is bounded and named. ``buckets.py`` averages a step's
gradients over the rows of all workers, by gloo beside backward, on one host in ``shared_memory.py``; ``sparse_rows.py``
does it for tables whose gradients are ``(ids, rows)``; ``differentiable.py`` sums and sends values inside a model. Not
a transport: between hosts gloo and NCCL move the bytes.
"""

from anabranch.collectives.buckets import GradientBuckets
from anabranch.collectives.differentiable import all_reduce, recv, send
from anabranch.collectives.workers import Pending, Workers

__all__ = ["GradientBuckets", "Pending", "Workers", "all_reduce", "recv", "send"]
