"""Variables in the environment of a job's processes."""

from __future__ import annotations

LINGER_SECONDS = 25.0
"""Seconds for which a service of a job serves on after its first signal while workers are connected."""

LINGER_VARIABLE = "ANABRANCH_LINGER"
"""The environment variable with these seconds, of an expert process."""

LISTEN_VARIABLE = "ANABRANCH_LISTEN"
"""The environment variable that says where an expert process listens, where its script does not."""

RUN_VARIABLE = "ANABRANCH_RUN"
"""The environment variable that tells a job from others that use the same directory; unset where it has its own."""
