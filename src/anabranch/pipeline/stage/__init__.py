"""One stage of a pipeline: which layers it has, and its forward and backward of a microbatch.

Open ``stage.py`` first; ``partition.py`` and ``balance.py`` cut the model, ``skips.py`` has the tensors that skip
stages.
"""
