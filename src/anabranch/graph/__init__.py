"""Capturing, inspecting, changing and running a training step as one graph.

Not a tensor engine: the operations are ATen's, and the tracer is torch's ``make_fx``. Open ``capture.py`` for how a
function becomes a ``Graph``, ``step.py`` for how a whole training step does, ``codegen.py`` for how one runs.
"""

from anabranch.graph.capture import capture
from anabranch.graph.gradients import gradients
from anabranch.graph.graph import Graph, Input, Node
from anabranch.graph.lookups import SparseRows
from anabranch.graph.memory import MemoryPlan
from anabranch.graph.step import StepProgram

__all__ = ["Graph", "Input", "MemoryPlan", "Node", "SparseRows", "StepProgram", "capture", "gradients"]
