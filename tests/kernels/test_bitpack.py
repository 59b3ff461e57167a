"""Dense codes of 1 to 8 bits against a loop over single bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commkern.reference.bitpack import pack, packed_nbytes, unpack

ANY = settings(deadline=None, derandomize=True)


def bit_loop(codes: list[int], bits: int) -> bytes:
    out = bytearray(-(-len(codes) * bits // 8))
    for j, code in enumerate(codes):
        for bit in range(bits):
            position = j * bits + bit
            out[position // 8] |= (code >> bit & 1) << position % 8
    return bytes(out)


@ANY
@given(st.integers(1, 8), st.data())
def test_round_trip(bits: int, data: st.DataObject) -> None:
    code = st.integers(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    codes = data.draw(st.lists(code, max_size=70))
    packed = pack(np.array(codes, dtype=np.int64), bits)
    assert packed.tobytes() == bit_loop(codes, bits)
    assert packed.size == packed_nbytes(len(codes), bits)
    assert unpack(packed, len(codes), bits).tolist() == codes


@ANY
@given(st.integers(1, 8), st.binary(max_size=70))
def test_compiled_packing(bits: int, codes: bytes) -> None:
    from commkern import _core

    packed = _core.pack_codes(codes, bits)
    assert packed == bit_loop(list(codes), bits)
    mask = (1 << bits) - 1
    unpacked = _core.unpack_codes(packed, bits, len(codes))
    assert unpacked == bytes(code & mask for code in codes)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"1\.\.8, got 9"):
        pack(np.zeros(1, np.int64), 9)
    with pytest.raises(ValueError, match="need 5 bytes, got 4"):
        unpack(np.zeros(4, np.uint8), 5, 8)
