"""Looking at what runs: a training run's numbers for TensorBoard and Prometheus, and counts of running services.

Not a log and no dashboard. Open ``metrics.py`` for services, where everything is read from the ``statistics()`` that
servers have anyway, and ``anabranch.executor.observing.sinks`` for how a training run hands its numbers to a ``Sink``.
"""

from anabranch.executor import (
    MembershipRecord,
    PeerLostRecord,
    RestartRecord,
    SaveRecord,
    Sink,
    StepRecord,
    Subscription,
)
from anabranch.observe.metrics import directory_metrics, expert_metrics, parameter_metrics, serve_metrics
from anabranch.observe.prometheus import PrometheusSink
from anabranch.observe.tensorboard import TensorBoardSink

__all__ = [
    "MembershipRecord",
    "PeerLostRecord",
    "PrometheusSink",
    "RestartRecord",
    "SaveRecord",
    "Sink",
    "StepRecord",
    "Subscription",
    "TensorBoardSink",
    "directory_metrics",
    "expert_metrics",
    "parameter_metrics",
    "serve_metrics",
]
