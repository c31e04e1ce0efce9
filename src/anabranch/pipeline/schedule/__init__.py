"""The order of a pipeline's actions as plain data: created, checked, simulated and drawn without running a model.

Open ``schedule.py`` first; ``orders.py`` has the well-known schedules.
"""
