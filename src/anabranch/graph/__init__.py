"""Capturing, inspecting, changing and running a training step as one graph.

It is not a tensor engine: the operations are ATen's, and the tracer is torch's ``make_fx``. Open ``step.py`` first: a
training step as graphs. ``dynamo`` reads the Python code, ``trace`` makes graphs of its torch calls, ``passes`` rewrite
them, ``run`` runs them, ``view`` shows them.
"""

from anabranch.graph.graph import Graph, Input, Node
from anabranch.graph.passes.gradients import gradients
from anabranch.graph.run.lifetimes import MemoryPlan
from anabranch.graph.step import StepProgram
from anabranch.graph.trace.capture import capture
from anabranch.graph.trace.lookups import SparseRows

__all__ = ["Graph", "Input", "MemoryPlan", "Node", "SparseRows", "StepProgram", "capture", "gradients"]
