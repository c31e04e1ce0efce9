"""Experts on the other side of a network: modules that train themselves, called as if they were local.

This is not a parameter server: an expert's parameters never leave it. Open ``client/calls.py`` first: it draws the
boundary operation. ``client`` and ``server`` are its two ends, ``directory.py`` finds experts by name, and
``wire.py`` is shared by both ends.
"""

from anabranch.experts.client.calls import CallStatistics
from anabranch.experts.client.mixture import RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts
from anabranch.experts.client.remote_expert import InferenceSession, RemoteExpert
from anabranch.experts.directory import Directory, DirectoryLike, DirectoryServer
from anabranch.experts.server.backend import ExpertBackend
from anabranch.experts.server.expert_server import ExpertServer, ExpertServerStatistics
from anabranch.experts.server.layers import expand_uids
from anabranch.experts.server.scheduler import PoolStatistics, Runtime, Task, TaskPool
from anabranch.experts.wire import ExpertInfo, Schema
from anabranch.transport.redis_directory import RedisDirectory

__all__ = [
    "CallStatistics",
    "Directory",
    "DirectoryLike",
    "DirectoryServer",
    "ExpertBackend",
    "ExpertInfo",
    "ExpertServer",
    "ExpertServerStatistics",
    "InferenceSession",
    "PoolStatistics",
    "RedisDirectory",
    "RemoteExpert",
    "RemoteMixtureOfExperts",
    "RemoteSwitchMixtureOfExperts",
    "Runtime",
    "Schema",
    "Task",
    "TaskPool",
    "expand_uids",
]
