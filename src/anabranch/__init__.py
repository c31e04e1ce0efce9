"""Anabranch trains one PyTorch model across devices, processes, parameter servers and unreliable remote experts.

Every boundary the model crosses is differentiable, bounded in time, and gives the answer that the plain PyTorch loop
gives. The packages are floors, imports point down only:

- ``launch``, ``cli``: the processes of a job, and ``anabranch run``.
- ``observe``: a run's numbers for TensorBoard and Prometheus, and counts of services.
- ``executor``: runs training and evaluation steps; start here.
- ``loaders``: batches in one order for any number of workers, and sampled surroundings in a graph of nodes.
- ``graph``: a function or a whole step as a graph that can be differentiated, changed, looked at and run.
- ``collectives``: gradients summed over the workers of a ``torch.distributed`` job.
- ``pipeline``: a model in stages on several devices or ranks, with tensors that jump over stages.
- ``parameter_server``: tables and parameters on servers, read before a step and updated after it.
- ``experts``: modules that train themselves on the remote side of a network, called as if they were here.
- ``tables``: tables in rows that are read and updated by id, in this process.
- ``checkpoint``: crash-safe saving and loading.
- ``transport``: what crosses a boundary.
- ``autodiff``: acting on gradients the moment they are final.
- ``liveness``: the processes of a job, and waits that name who is lost.
- ``tensors``, ``deadline``, ``errors``, ``job``, ``record``: what all of the above speak in.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from anabranch._lazy import lazy_names
from anabranch.held_error import hold_back_errors
from anabranch.job import Job, MakeGrid, Serve, _provide, job  # at once: the function has its module's name
from anabranch.record.process import record_process

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from anabranch import autodiff as autodiff
    from anabranch import checkpoint as checkpoint
    from anabranch import errors as errors
    from anabranch import executor as executor
    from anabranch import experts as experts
    from anabranch import graph as graph
    from anabranch import launch as launch
    from anabranch import loaders, observe, testing
    from anabranch import parameter_server as parameter_server
    from anabranch import pipeline as pipeline
    from anabranch import tables as tables
    from anabranch import tensors as tensors
    from anabranch import transport as transport
    from anabranch.autodiff import (
        Grad,
        GradManager,
        get_grad_managers,
        map_with_parallel_backward,
        run_isolated_backward,
        run_isolated_forward,
    )
    from anabranch.collectives import all_reduce, recv, send
    from anabranch.errors import (
        AnabranchError,
        BoundaryError,
        CaptureError,
        CheckpointError,
        DeadlineExceeded,
        ForkedClient,
        LostUpdate,
        NonFinite,
        NotFound,
        Overloaded,
        PeerLost,
        PipelineError,
        ProtocolError,
        RemoteError,
        RolledBack,
        SchemaError,
        SkipError,
        Unauthorized,
        WorkersDiffer,
    )
    from anabranch.executor import EvalStep, Executor, TrainStep
    from anabranch.experts import (
        Directory,
        DirectoryServer,
        ExpertBackend,
        ExpertServer,
        RedisDirectory,
        RemoteExpert,
        RemoteMixtureOfExperts,
        RemoteSwitchMixtureOfExperts,
        Runtime,
        TaskPool,
    )
    from anabranch.graph import Graph, capture, gradients
    from anabranch.parameter_server import EmbeddingBagCollection, ParameterClient, ParameterServer, RemoteEmbedding
    from anabranch.pipeline import Namespace, Pipe, pop, skippable, stash, verify_skippables
    from anabranch.tables import FTRL, Cache, RowWiseAdagrad
    from anabranch.tensors import KeyedJagged, TensorSpec

__all__ = [
    "AnabranchError",
    "BoundaryError",
    "Cache",
    "CaptureError",
    "CheckpointError",
    "DeadlineExceeded",
    "Directory",
    "DirectoryServer",
    "EmbeddingBagCollection",
    "EvalStep",
    "Executor",
    "ExpertBackend",
    "ExpertServer",
    "FTRL",
    "ForkedClient",
    "Grad",
    "GradManager",
    "Graph",
    "Job",
    "KeyedJagged",
    "LostUpdate",
    "Namespace",
    "NonFinite",
    "NotFound",
    "Overloaded",
    "ParameterClient",
    "ParameterServer",
    "PeerLost",
    "Pipe",
    "PipelineError",
    "ProtocolError",
    "RedisDirectory",
    "RemoteEmbedding",
    "RemoteError",
    "RemoteExpert",
    "RemoteMixtureOfExperts",
    "RemoteSwitchMixtureOfExperts",
    "RolledBack",
    "RowWiseAdagrad",
    "Runtime",
    "SchemaError",
    "SkipError",
    "TaskPool",
    "TensorSpec",
    "TrainStep",
    "Unauthorized",
    "WorkersDiffer",
    "all_reduce",
    "capture",
    "get_grad_managers",
    "gradients",
    "job",
    "loaders",
    "map_with_parallel_backward",
    "observe",
    "pop",
    "recv",
    "run_isolated_backward",
    "run_isolated_forward",
    "send",
    "skippable",
    "stash",
    "testing",
    "verify_skippables",
]


def _job_functions() -> tuple[Serve, MakeGrid]:
    from anabranch.launch.grid import make_grid
    from anabranch.launch.roles import serve

    return serve, make_grid


_provide(_job_functions)

hold_back_errors()
record_process()

# A library is silent by default: a program that wants its messages gives the logger a handler.
logging.getLogger("anabranch").addHandler(logging.NullHandler())

if not TYPE_CHECKING:  # a checker would take every name for one of the package
    __getattr__, __dir__ = lazy_names(
        "anabranch",
        [
            "errors",
            "tensors",
            "autodiff",
            "collectives",
            "graph",
            "tables",
            "parameter_server",
            "experts",
            "pipeline",
            "executor",
        ],
    )
