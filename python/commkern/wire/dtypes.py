"""Element types and their codes on the wire (``enum class DType`` in csrc/core)."""

from __future__ import annotations

from typing import Final

# Codes never change; a new type takes the next one.
CODES: Final = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}
NAMES: Final = {code: name for name, code in CODES.items()}
NBYTES: Final = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}


def compute_nbytes(dtype: str) -> int:
    """Bytes of the type that arithmetic on ``dtype`` is done in."""
    return 8 if dtype == "float64" else 4


# Only in descriptors: complex elements travel as pairs of reals.
REAL_PART: Final = {"complex64": "float32", "complex128": "float64"}
DESCRIPTOR_CODES: Final = CODES | {"complex64": 4, "complex128": 5}
DESCRIPTOR_NAMES: Final = {code: name for name, code in DESCRIPTOR_CODES.items()}
