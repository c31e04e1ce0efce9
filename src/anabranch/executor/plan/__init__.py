"""Plans of training steps: the traffic across each boundary, and the estimated time. Open ``step_plan.py`` first.

``survey.py`` runs a batch without training and answers what the model asks of other processes, and
``planner.py`` computes a plan from it, from where the parameters live, and from the measured speed of the links.
"""

from anabranch.executor.plan.planner import plan_step
from anabranch.executor.plan.step_plan import LinkCost, ModeCost, Plan, PlanRow

__all__ = ["LinkCost", "ModeCost", "Plan", "PlanRow", "plan_step"]
