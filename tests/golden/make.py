"""Golden bytes: what every version 1 of the wire format must write.

``python tests/golden/make.py`` writes the files that are missing; ``--force`` writes
all of them anew, which is right only if the format's version changes too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

import commkern as ck
from commkern.wire import Header, Preamble, Section, hash_text, pack_message, place
from commkern.wire.preamble import error_preamble

HERE = Path(__file__).parent
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
PREAMBLE = Preamble(
    sender=1,
    world_size=4,
    step=1000,
    body_nbytes=4096,
    compressor=hash_text("quantize:bits=8,block_size=128,rounding=nearest"),
    settings=hash_text("op=avg"),
    names=hash_text("weight;bias"),
    shapes=hash_text("1000;10"),
    dtypes=hash_text("float32"),
    round=1,
)


def input_tensor(dtype: torch.dtype) -> torch.Tensor:
    """300 values from integer arithmetic alone: no random generator to depend on."""
    index = torch.arange(300, dtype=torch.int64)
    mixed = (index * 2654435761 + 12345) % 2**32
    values = (mixed.to(torch.float64) / 2**31 - 1) * 2.0 ** ((index % 7) - 3)
    values[10:20] = 0.0
    values[200] = 300.0
    values[290] = torch.inf
    return values.to(dtype).reshape(3, 100)


def cases() -> dict[str, Callable[[], bytes]]:
    """File names and what makes their bytes."""
    made: dict[str, Callable[[], bytes]] = {
        "preamble.bin": PREAMBLE.pack,
        "preamble-error.bin": lambda: error_preamble(PREAMBLE, rank=3, field="shapes"),
        "message-bucket.bin": _bucket,
    }
    for name in ck.compressors():
        for spec in (name, *ck.compressor(name).examples):
            coder = ck.compressor(spec)
            slug = str(coder).translate(str.maketrans(":,=()", "-----"))
            for dtype in DTYPES:
                made[f"payload-{slug}-{dtype}.bin"] = _payload(coder, dtype)
    return made


def _bucket() -> bytes:
    sections = (
        Section(0, 2, hash_text("quantize:bits=8"), 0, 11),
        Section(3, 8, hash_text("identity"), 0, 8),
    )
    touched = tuple(parameter != 4 for parameter in range(11))
    header = place(Header(sections, touched, step=7, crc=True))
    return bytes(pack_message(header, [bytes(range(11)), bytes(range(8))]))


def _payload(coder: ck.Compressor, dtype: str) -> Callable[[], bytes]:
    def make() -> bytes:
        tensor = input_tensor(DTYPES[dtype])
        payload = coder.compress(tensor, seed=2**40 + 5, step=3, name="w", crc=True)
        return payload.data.numpy().tobytes()

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--force", action="store_true", help="write existing files too")
    force = parser.parse_args().force
    for file, make in cases().items():
        if force or not (HERE / file).exists():
            (HERE / file).write_bytes(make())
            print(f"wrote {file}")


if __name__ == "__main__":
    main()
