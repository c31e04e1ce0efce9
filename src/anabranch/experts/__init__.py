"""Experts on the far side of a network: modules that train themselves, called as if they were here.

Not a parameter server: an expert's parameters never leave it. Open ``calls.py`` first, it draws the boundary
operation; ``server.py`` and ``mixture.py`` draw its two ends. ``backend.py`` is one expert, ``task_pool.py`` and
``runtime.py`` batch its requests, ``directory.py`` finds experts by name, ``persistence.py`` restores experts after a
crash.
"""

from anabranch.experts.backend import ExpertBackend, ExpertInfo
from anabranch.experts.directory import Directory, DirectoryLike, DirectoryServer
from anabranch.experts.mixture import MixtureStatistics, RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts
from anabranch.experts.remote_expert import RemoteExpert
from anabranch.experts.runtime import Runtime
from anabranch.experts.schema import Schema
from anabranch.experts.server import ExpertServer, ExpertServerStatistics
from anabranch.experts.serving import make_backends, serve_directory, serve_experts, stopped_by_signals
from anabranch.experts.task_pool import PoolStatistics, Task, TaskPool
from anabranch.experts.uids import expand_uids

__all__ = [
    "Directory",
    "DirectoryLike",
    "DirectoryServer",
    "ExpertBackend",
    "ExpertInfo",
    "ExpertServer",
    "ExpertServerStatistics",
    "MixtureStatistics",
    "PoolStatistics",
    "RemoteExpert",
    "RemoteMixtureOfExperts",
    "RemoteSwitchMixtureOfExperts",
    "Runtime",
    "Schema",
    "Task",
    "TaskPool",
    "expand_uids",
    "make_backends",
    "serve_directory",
    "serve_experts",
    "stopped_by_signals",
]
