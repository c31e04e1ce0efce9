"""A sequential model split into stages that run concurrently, with skip connections between stages and exact gradients.

It is not a tensor-parallel or data-parallel library. It cuts a ``nn.Sequential`` between its layers, whose long
connections are skips; ``split`` makes one from other models. Open ``pipe.py`` for the users' class, then
``engine.py``, the loop over a rank's actions. ``schedule`` orders the actions, ``stage`` runs one stage forward
and backward, ``links`` carry tensors between stages, ``parts`` makes layers of a model that is not a sequence.
"""

from anabranch.pipeline.drawing import draw, save_picture
from anabranch.pipeline.microbatch import NoChunk
from anabranch.pipeline.parts.split import split
from anabranch.pipeline.pipe import Pipe, StepResult
from anabranch.pipeline.schedule import Action, Interval, Kind, Schedule, Simulation, make_schedule, simulate
from anabranch.pipeline.stage.balance import balance_by_size, balance_by_time
from anabranch.pipeline.stage.skips import Namespace, isolate, pop, skippable, stash, verify_skippables
from anabranch.pipeline.stage.stage import is_recomputing

__all__ = [
    "Action",
    "Interval",
    "Kind",
    "Namespace",
    "NoChunk",
    "Pipe",
    "Schedule",
    "Simulation",
    "StepResult",
    "balance_by_size",
    "balance_by_time",
    "draw",
    "is_recomputing",
    "isolate",
    "make_schedule",
    "pop",
    "save_picture",
    "simulate",
    "skippable",
    "split",
    "stash",
    "verify_skippables",
]
