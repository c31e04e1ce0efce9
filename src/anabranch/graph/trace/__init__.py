"""Torch calls become graphs of ATen operations; ``make_fx.py`` holds what depends on PyTorch's tracer."""
