"""Whether somebody writes into gradients while the hook reduces them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from commkern.arrays import as_bytes
from commkern.errors import CommkernError
from commkern.inputs import real_view
from commkern.wire.crc import crc32c

_Sums = tuple[int | None, int | None]  # of a piece of the bucket, and of .grad


class InputGuard:
    """Watches a bucket and the ``.grad`` of its parameters, while a copy is reduced.

    ``sizes`` are the elements of each parameter, in reals, by name.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        sizes: Mapping[str, int],
        parameters: Iterable[torch.Tensor],
    ) -> None:
        self.copy = buffer.clone()
        self._buffer = buffer
        self._sizes = sizes
        self._parameters = list(parameters)
        self._before = self._sums()

    def settle(self) -> None:
        """Write the reduced copy into the bucket.

        CommkernError, naming the parameters, where anything else was written before.
        """
        before, now = self._before, self._sums()
        changed = [name for name in now if now[name] != before[name]]
        if changed:
            raise CommkernError(
                f"gradients were written to while the hook reduced them: "
                f"{', '.join(changed)}. Leave .grad alone until backward() has ended; "
                "what register_post_accumulate_grad_hook does to its own parameter is "
                "in time"
            )
        self._buffer.copy_(self.copy)

    def _sums(self) -> dict[str, _Sums]:
        flat = real_view(self._buffer).reshape(-1)
        pieces = torch.split(flat, list(self._sizes.values()))
        rows = zip(self._sizes, pieces, self._parameters, strict=True)
        return {name: (_sum(piece), _sum(p.grad)) for name, piece, p in rows}


def _sum(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else crc32c(as_bytes(real_view(tensor).contiguous()))
