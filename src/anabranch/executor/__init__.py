"""Runs programs of training and evaluation steps. Open ``executor.py`` first.

``steps.py`` describes the steps, ``spec.py`` checks the arguments that parts share, ``running`` runs a step from the
batch to the update, ``engines`` differentiate on the tape or as a graph, ``loaders`` provide batches, ``saving`` saves
checkpoints, ``observing`` reports a run. ``routes.py`` decides which parameters are on servers, ``plan.py`` estimates
the cost of a step. Not a trainer: loops, epochs and logging belong to the user.
"""

from anabranch.executor.executor import Executor
from anabranch.executor.observing.sinks import Sink
from anabranch.executor.observing.watching import (
    MembershipRecord,
    PeerLostRecord,
    RestartRecord,
    SaveRecord,
    StepRecord,
    Subscription,
)
from anabranch.executor.plan import LinkCost, Plan, PlanRow
from anabranch.executor.routes import Route, Routes
from anabranch.executor.statistics import Statistics, TableLoads
from anabranch.executor.steps import EvalStep, TrainStep

__all__ = [
    "EvalStep",
    "Executor",
    "LinkCost",
    "MembershipRecord",
    "PeerLostRecord",
    "Plan",
    "PlanRow",
    "RestartRecord",
    "Route",
    "Routes",
    "SaveRecord",
    "Sink",
    "Statistics",
    "StepRecord",
    "Subscription",
    "TableLoads",
    "TrainStep",
]
