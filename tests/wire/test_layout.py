"""csrc/core/wire.h and commkern.wire state the same layout, and torch is not needed."""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path

from commkern.wire import dtypes, message, preamble

HEADER = Path(__file__).parents[2] / "csrc" / "core" / "wire.h"
SIZES = {"uint8_t": 1, "uint16_t": 2, "uint32_t": 4, "uint64_t": 8}
LAYOUTS = {
    "Preamble": preamble._LAYOUT,
    "MessageHeader": message._HEADER,
    "Section": message._SECTION,
    "Descriptor": message._DESCRIPTOR,
}


def python_offsets(layout: struct.Struct) -> list[int]:
    codes = re.findall(r"\d*[a-zA-Z]", layout.format.lstrip("<"))
    return [struct.calcsize("<" + "".join(codes[:n])) for n in range(len(codes))]


def cpp_offsets(name: str) -> list[int]:
    asserted = re.findall(rf"offsetof\({name}, \w+\) == (\d+)", HEADER.read_text())
    return [int(offset) for offset in asserted]


def constant(name: str) -> int:
    found = re.search(rf"\b{name} = (\w+);", HEADER.read_text())
    assert found, name
    return int(found[1], 0)


def test_offsets_and_sizes_agree() -> None:
    for name, layout in LAYOUTS.items():
        # "3s" counts as one field here and as one array there.
        assert cpp_offsets(name) == python_offsets(layout), name
        size = re.search(rf"sizeof\({name}\) == (\d+)", HEADER.read_text())
        assert size, name
        assert int(size[1]) == layout.size, name


def test_declared_fields_have_the_asserted_offsets() -> None:
    for name in LAYOUTS:
        body = re.search(rf"struct {name} {{(.*?)\n}};", HEADER.read_text(), re.DOTALL)
        assert body, name
        offset, offsets = 0, []
        for kind, count in re.findall(r"(u?int\d+_t) \w+(?:\[(\d+)\])?;", body[1]):
            offsets.append(offset)
            offset += SIZES[kind] * int(count or 1)
        assert offsets == cpp_offsets(name), name


def test_constants_agree() -> None:
    magics = constant("kPreambleMagic"), constant("kMessageMagic")
    assert struct.pack("<II", *magics) == preamble.MAGIC + message.MAGIC
    assert constant("kVersion") == preamble.VERSION == message.VERSION
    assert constant("kPreambleTag") == preamble.PREAMBLE_TAG
    assert constant("kBodyTagBase") == preamble.BODY_TAG
    assert (constant("kKindData"), constant("kKindError")) == (0, preamble.ERROR)
    assert constant("kFlagCrc") == message.FLAG_CRC
    assert constant("kFlagDescriptor") == message.FLAG_DESCRIPTOR
    assert constant("kFlagNonFinite") == message.FLAG_NONFINITE


def test_dtype_codes_agree() -> None:
    types = HEADER.with_name("types.h").read_text()
    listed = re.search(r"enum class DType : int32_t {(.*?)}", types)
    assert listed
    codes = dict(re.findall(r"k(\w+) = (\d+)", listed[1]))
    assert {name.lower(): int(code) for name, code in codes.items()} == dtypes.CODES


def test_wire_modules_do_not_import_torch() -> None:
    modules = [m for n, m in sys.modules.items() if n.startswith("commkern.wire")]
    assert len(modules) >= 6
    assert not [m.__name__ for m in modules if hasattr(m, "torch")]
