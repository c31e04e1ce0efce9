"""Experts on the other side of a network: modules that train themselves, called as if they were local.

This is not a parameter server: an expert's parameters never leave it. Open ``client/calls.py`` first: it draws the
boundary operation. ``client`` and ``server`` are its two ends, ``directory.py`` finds experts by name, and
``schema.py`` and ``wire.py`` are shared by both ends.
"""

from anabranch.experts.client.expert_call import CallStatistics
from anabranch.experts.client.mixture.remote_mixture import RemoteMixtureOfExperts
from anabranch.experts.client.mixture.switch_mixture import RemoteSwitchMixtureOfExperts
from anabranch.experts.client.remote_expert import RemoteExpert
from anabranch.experts.client.session import InferenceSession
from anabranch.experts.directory import Directory, DirectoryLike, DirectoryServer
from anabranch.experts.schema import Schema
from anabranch.experts.server.backend import ExpertBackend, ExpertInfo
from anabranch.experts.server.batching.runtime import Runtime
from anabranch.experts.server.batching.task_pool import PoolStatistics, Task, TaskPool
from anabranch.experts.server.expert_group import ExpertGroup, make_experts
from anabranch.experts.server.expert_server import ExpertServer, ExpertServerStatistics
from anabranch.experts.server.fleet_file import read_fleet
from anabranch.experts.server.sessions.open_sessions import SessionLimits
from anabranch.experts.uid_patterns import draw_uids, expand_uids
from anabranch.transport.redis_directory import RedisDirectory

__all__ = [
    "CallStatistics",
    "Directory",
    "DirectoryLike",
    "DirectoryServer",
    "ExpertBackend",
    "ExpertGroup",
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
    "SessionLimits",
    "Task",
    "TaskPool",
    "draw_uids",
    "expand_uids",
    "make_experts",
    "read_fleet",
]
