"""Element types and their codes on the wire (``enum class DType`` in csrc/core)."""

from __future__ import annotations

# Codes never change; a new type takes the next one.
CODES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}
NAMES = {code: name for name, code in CODES.items()}
NBYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}


def dtype_code(name: str) -> int:
    """The wire code of a dtype name; ValueError for a name that has none."""
    try:
        return CODES[name]
    except KeyError:
        raise ValueError(f"dtype {name!r} is none of {', '.join(CODES)}") from None
