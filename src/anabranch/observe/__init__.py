"""Metrics of a running service: counts for Prometheus.

Not a log and no dashboard. Open ``metrics.py``: everything is read from the ``statistics()`` that servers have anyway.
"""

from anabranch.observe.metrics import Metric, expert_metrics, parameter_metrics, serve_metrics

__all__ = ["Metric", "expert_metrics", "parameter_metrics", "serve_metrics"]
