"""Runs programs of training and evaluation steps. Open ``executor.py`` first.

``steps.py`` describes what is run, ``engines`` run a training step on the tape or as a graph, ``window.py`` holds what
one optimizer step sums up, ``loaders`` give batches, ``saving.py`` says what a checkpoint holds. ``routes.py`` decides
what lives on servers, ``remote.py`` is this side of them, ``plan`` says what a step will cost. Not a trainer: loops,
epochs and logging are the user's.
"""

from anabranch.executor.callbacks import PeerLostRecord, RestartRecord, SaveRecord, StepRecord, Subscription
from anabranch.executor.executor import Executor
from anabranch.executor.plan import Plan, PlanRow
from anabranch.executor.routes import Route, Routes
from anabranch.executor.sinks import Sink
from anabranch.executor.statistics import Statistics, TableLoads
from anabranch.executor.steps import EvalStep, TrainStep

__all__ = [
    "EvalStep",
    "Executor",
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
