"""Versions of rows: the step at which a worker's copy was read, and how old a copy may be."""

WITH_STATE = -2  # as the known version of a row: it comes in any case, with its optimizer's state
OLDEST = (1 << 15) - 1  # steps; the age of a row is sent in 16 bits
