"""Checkpoints of an executor: their content, for any number of workers and stages, and writing them in the background.

Not the files, which ``anabranch.checkpoint`` writes. Open ``saving.py`` first.
"""
