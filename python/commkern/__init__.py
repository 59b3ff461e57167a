"""Communication kernels for distributed training with PyTorch.

As a DDP hook::

    state = commkern.register(ddp, "quantize:bits=4")

as an all-reduce::

    commkern.all_reduce(tensor, compressor="quantize:bits=8")

and as kernels: ``commkern.kernels`` (compiled), ``commkern.reference`` (their Python
twins).
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from commkern import kernels, reference
from commkern.advice import Advice, advise
from commkern.auto import Auto
from commkern.checkpoint import merge_state_dicts
from commkern.collectives import ReduceState, all_reduce
from commkern.compressors import (
    NVFP4,
    QSGD,
    Cast,
    CodeBook,
    Compressor,
    FixedPoint,
    Float8,
    Identity,
    Microscaling,
    Natural,
    Quantize,
    Rotated,
    Sign,
    Ternary,
    TwoBit,
    compressor,
    compressors,
)
from commkern.errors import (
    BackendError,
    CommkernError,
    LedgerError,
    MismatchError,
    NonFiniteError,
    PayloadError,
    PeerError,
    PeerFailed,
    PeerLost,
    ReplicasDiffer,
)
from commkern.feedback import EF21, ErrorFeedback
from commkern.hooks import compression_hook, register
from commkern.payload import Payload, decode
from commkern.policy import Exempt, small_or_vector
from commkern.state import CompressionState
from commkern.stats import write_stats
from commkern.step_schedule import Exponential, Steps
from commkern.sync import check_sync
from commkern.work import Work

try:
    __version__ = version("commkern")
except PackageNotFoundError:  # used from a source tree that was not installed
    __version__ = "0.0.0"

__all__ = [
    "EF21",
    "NVFP4",
    "QSGD",
    "Advice",
    "Auto",
    "BackendError",
    "Cast",
    "CodeBook",
    "CommkernError",
    "CompressionState",
    "Compressor",
    "ErrorFeedback",
    "Exempt",
    "Exponential",
    "FixedPoint",
    "Float8",
    "Identity",
    "LedgerError",
    "Microscaling",
    "MismatchError",
    "Natural",
    "NonFiniteError",
    "Payload",
    "PayloadError",
    "PeerError",
    "PeerFailed",
    "PeerLost",
    "Quantize",
    "ReduceState",
    "ReplicasDiffer",
    "Rotated",
    "Sign",
    "Steps",
    "Ternary",
    "TwoBit",
    "Work",
    "advise",
    "all_reduce",
    "check_sync",
    "compression_hook",
    "compressor",
    "compressors",
    "decode",
    "kernels",
    "merge_state_dicts",
    "reference",
    "register",
    "small_or_vector",
    "write_stats",
]
