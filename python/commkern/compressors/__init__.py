"""Compressors: one file each, found by the registry."""

from __future__ import annotations

import importlib
import pkgutil

from commkern.compressors.base import Compressor
from commkern.compressors.registry import compressor, compressor_class, compressors

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

from commkern.compressors.cast import Cast, Identity
from commkern.compressors.codebook import CodeBook
from commkern.compressors.fixed_point import FixedPoint
from commkern.compressors.float8 import Float8
from commkern.compressors.microscaling import Microscaling
from commkern.compressors.natural import Natural
from commkern.compressors.nvfp4 import NVFP4
from commkern.compressors.qsgd import QSGD
from commkern.compressors.quantize import Quantize
from commkern.compressors.rotated import Rotated
from commkern.compressors.sign import Sign
from commkern.compressors.ternary import Ternary
from commkern.compressors.two_bit import TwoBit

__all__ = [
    "NVFP4",
    "QSGD",
    "Cast",
    "CodeBook",
    "Compressor",
    "FixedPoint",
    "Float8",
    "Identity",
    "Microscaling",
    "Natural",
    "Quantize",
    "Rotated",
    "Sign",
    "Ternary",
    "TwoBit",
    "compressor",
    "compressor_class",
    "compressors",
]
