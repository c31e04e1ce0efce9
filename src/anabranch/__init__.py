"""Anabranch trains one PyTorch model across devices, processes, parameter servers and unreliable remote experts.

Every boundary the model crosses is differentiable, bounded in time, and gives the answer that the plain PyTorch loop
gives. The packages are floors, imports point down only:

- ``launch``, ``cli``: the processes of a job, and ``anabranch run``.
- ``executor``: runs training and evaluation steps; start here.
- ``graph``: a function or a whole step as a graph that can be differentiated, changed, looked at and run.
- ``collectives``: gradients summed over the workers of a ``torch.distributed`` job.
- ``pipeline``: a model in stages on several devices or ranks, with tensors that jump over stages.
- ``parameter_server``: tables larger than a worker, read and updated by id.
- ``experts``: modules that train themselves on the far side of a network, called as if they were here.
- ``checkpoint``: crash-safe saving and loading.
- ``transport``: what crosses a boundary.
- ``autodiff``: acting on gradients the moment they are final.
- ``tensors``, ``deadline``, ``errors``, ``job``, ``events``: what all of the above speak in.
"""

from anabranch import (
    launch,  # noqa: F401  provides what ab.job() can do
    testing,
)
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
    NonFinite,
    NotFound,
    Overloaded,
    PeerLost,
    PipelineError,
    ProtocolError,
    RemoteError,
    SchemaError,
    SkipError,
    Unauthorized,
)
from anabranch.executor import EvalStep, Executor, TrainStep
from anabranch.experts import (
    Directory,
    DirectoryServer,
    ExpertBackend,
    ExpertServer,
    RemoteExpert,
    RemoteMixtureOfExperts,
    RemoteSwitchMixtureOfExperts,
    Runtime,
    TaskPool,
)
from anabranch.graph import Graph, capture, gradients
from anabranch.job import Job, job
from anabranch.parameter_server import Cache, ParameterClient, ParameterServer, RemoteEmbedding, RowWiseAdagrad
from anabranch.pipeline import Namespace, Pipe, pop, skippable, stash, verify_skippables
from anabranch.tensors import TensorSpec

__all__ = [
    "AnabranchError",
    "BoundaryError",
    "Cache",
    "CaptureError",
    "CheckpointError",
    "DeadlineExceeded",
    "Directory",
    "DirectoryServer",
    "EvalStep",
    "Executor",
    "ExpertBackend",
    "ExpertServer",
    "Grad",
    "GradManager",
    "Graph",
    "Job",
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
    "RemoteEmbedding",
    "RemoteError",
    "RemoteExpert",
    "RemoteMixtureOfExperts",
    "RemoteSwitchMixtureOfExperts",
    "RowWiseAdagrad",
    "Runtime",
    "SchemaError",
    "SkipError",
    "TaskPool",
    "TensorSpec",
    "TrainStep",
    "Unauthorized",
    "all_reduce",
    "capture",
    "get_grad_managers",
    "gradients",
    "job",
    "map_with_parallel_backward",
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
