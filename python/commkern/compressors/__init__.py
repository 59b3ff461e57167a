"""Compressors: one file each, found by the registry."""

from __future__ import annotations

import importlib
import pkgutil

from commkern.compressors.base import Compressor
from commkern.compressors.registry import compressor, compressor_class, compressors

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

from commkern.compressors.cast import Cast, Identity
from commkern.compressors.fixed_point import FixedPoint
from commkern.compressors.quantize import Quantize

__all__ = [
    "Cast",
    "Compressor",
    "FixedPoint",
    "Identity",
    "Quantize",
    "compressor",
    "compressor_class",
    "compressors",
]
