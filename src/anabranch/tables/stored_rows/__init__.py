"""Operations of ``RowTable`` on the rows in its storage, one per file; the storage itself is ``row_storage.py``.

Open ``layout.py`` first: the layout of weights and states in a row. ``first_values.py`` initialises rows,
``gradient_merge.py`` adds up the gradients of each, ``step_on_rows.py`` updates them, ``missed_steps.py`` brings them
up to date, and ``block.py`` is their saved form.
"""

from anabranch.tables.stored_rows.block import RowBlock
from anabranch.tables.stored_rows.first_values import FirstValues
from anabranch.tables.stored_rows.gradient_merge import GradientMerge
from anabranch.tables.stored_rows.layout import RowLayout
from anabranch.tables.stored_rows.missed_steps import MissedSteps

__all__ = ["FirstValues", "GradientMerge", "MissedSteps", "RowBlock", "RowLayout"]
