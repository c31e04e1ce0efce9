"""Compiles the kernels of servers, clients and sums of workers, so that no first job and no test waits for them.

Called by `tools/install.py` and `make` with a dtype and with parts: `tables`, `others` (vocabularies, routing, sums)
and `caches`. Two processes may compile two parts at once: one waits for what the other compiles. Numba keeps what it
made beside the sources, or in the user's cache where nothing can be written there. Whatever is missing is compiled when
it is needed.
"""

from __future__ import annotations

import sys
from itertools import product

import torch

from anabranch.collectives.shared_memory import NUMBERS, load_kernels
from anabranch.parameter_server import ParameterClient
from anabranch.parameter_server.client.cache_group import compile_cache_kernels
from anabranch.parameter_server.client.remote_weight import distinct_ids
from anabranch.tables.cache import Cache
from anabranch.tables.optimizers.row_optimizers import Family, RowOptimizer
from anabranch.tables.table import Table
from anabranch.tables.table_spec import Constant, TableSpec
from anabranch.tables.warming import compile_kernels

RULES = (
    RowOptimizer(Family.SGD, lr=0.1),
    RowOptimizer(Family.SGD, lr=0.1, momentum=0.9),
    RowOptimizer(Family.ADAGRAD, lr=0.1),
    RowOptimizer(Family.ROW_WISE_ADAGRAD, lr=0.1),
    RowOptimizer(Family.ADAM, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8),
)

if __name__ == "__main__":
    dtype, parts = getattr(torch, sys.argv[1]), sys.argv[2:]
    if "others" in parts:
        for kind in {dtype, torch.float64} & NUMBERS.keys():  # evaluations are summed in float64
            load_kernels(kind)
        distinct_ids({"t": torch.arange(4)}, {"t": 4})
        dynamic = TableSpec("t", None, 2, dtype, Constant(0.0), capacity=2)
        Table(dynamic, RULES[0]).pull(torch.arange(4), training=True)
        with ParameterClient() as client:
            client.init("t", (4, 2), kind="rows")
            client.pull_many({"t": torch.arange(4)}, known={"t": torch.full((4,), -1)})
    if "tables" in parts:
        compile_kernels(dtype)
    for rule, bound in product(RULES, (0, 1)) if "caches" in parts else ():
        compile_cache_kernels(Cache(push_bound=bound), rule, dtype)
