"""One run of a step, from the batch to the values: forward, backward, the window it sums up, the servers, the update.

Not the engines, which only differentiate and update. Open ``runner.py`` first.
"""
