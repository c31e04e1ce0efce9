"""A sequential model split into stages that run at once, with tensors that jump over stages, and exact gradients.

Not a tensor-parallel or data-parallel library, and it does not split arbitrary graphs: it splits a ``nn.Sequential``,
whose long connections are skips. Open ``pipe.py`` for the users' class, ``stage.py`` for how a stage runs forward and
backward, ``runner.py`` for the loop over actions, ``schedule.py`` and ``orders.py`` for the order of actions,
``skips.py`` for tensors that jump.
"""

from anabranch.pipeline.actions import Action, Kind
from anabranch.pipeline.balance import balance_by_size, balance_by_time
from anabranch.pipeline.drawing import draw, save_picture
from anabranch.pipeline.orders import make_schedule
from anabranch.pipeline.pipe import Pipe, StepResult
from anabranch.pipeline.schedule import Schedule
from anabranch.pipeline.simulator import Interval, Simulation, simulate
from anabranch.pipeline.skips import Namespace, pop, skippable, stash, verify_skippables

__all__ = [
    "Action",
    "Interval",
    "Kind",
    "Namespace",
    "Pipe",
    "Schedule",
    "Simulation",
    "StepResult",
    "balance_by_size",
    "balance_by_time",
    "draw",
    "make_schedule",
    "pop",
    "save_picture",
    "simulate",
    "skippable",
    "stash",
    "verify_skippables",
]
