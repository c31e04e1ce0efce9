"""Optimizers of tables: a rule for one row, equal to torch's optimizer bit for bit.

Open ``row_optimizers.py`` first: it translates a torch optimizer into constants and the state of a row.
"""
