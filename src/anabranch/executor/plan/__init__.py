"""Plans of training steps: the traffic across each boundary, and the estimated cost. Open ``step_plan.py`` first.

``step_survey.py`` runs a batch without training, ``measuring.py`` makes a ``machine_profile.py`` of the machine and its
links, ``costs.py`` computes a plan from both, ``mode_choice.py`` takes the cheapest of several, and ``planner.py`` lets
the workers do all this together. Not a scheduler: a plan only describes.
"""

from anabranch.executor.plan.mode_choice import ModeChoice, choose
from anabranch.executor.plan.planner import Planner
from anabranch.executor.plan.step_plan import Plan, PlanRow

__all__ = ["ModeChoice", "Plan", "PlanRow", "Planner", "choose"]
