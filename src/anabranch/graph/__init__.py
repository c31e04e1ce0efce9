"""Capture, look at, change and run a training step as one graph."""
__all__ = []
