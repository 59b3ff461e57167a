"""Element types and their codes on the wire (``enum class DType`` in csrc/core)."""

from __future__ import annotations

from typing import Final

# Codes never change; a new type takes the next one.
CODES: Final = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}
NAMES: Final = {code: name for name, code in CODES.items()}
NBYTES: Final = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
