"""Optimizers of tables: a rule for one row, equal to torch's optimizer bit for bit.

Open ``row_optimizers.py`` first: it translates a torch optimizer into constants and the state of a row.
"""

from anabranch.tables.optimizers.ftrl import FTRL
from anabranch.tables.optimizers.row_optimizers import Family, RowOptimizer
from anabranch.tables.optimizers.row_wise_adagrad import RowWiseAdagrad
from anabranch.tables.optimizers.torch_state import ParameterState, from_torch, to_torch

__all__ = ["FTRL", "Family", "ParameterState", "RowOptimizer", "RowWiseAdagrad", "from_torch", "to_torch"]
