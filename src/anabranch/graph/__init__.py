"""Capturing, inspecting, changing and running a training step as one graph.

It is not a tensor engine: the operations are ATen's, and the tracer is torch's ``make_fx``. From the top: ``step`` is a
training step as graphs (open ``program.py`` first), ``capture`` any function; ``dynamo`` reads the Python code,
``trace`` makes graphs of its torch calls, ``run`` runs them, ``passes`` rewrite them, ``view`` shows them.
"""

from anabranch.graph.capture import capture
from anabranch.graph.gradients import gradients
from anabranch.graph.graph import Graph, Node
from anabranch.graph.operation_graph import Input
from anabranch.graph.run.memory import MemoryPlan
from anabranch.graph.step.lookups import SparseRows
from anabranch.graph.step.program import StepProgram

__all__ = ["Graph", "Input", "MemoryPlan", "Node", "SparseRows", "StepProgram", "capture", "gradients"]
