"""The plans of a module's buckets, by parameter and by what is in force in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from commkern.compose import Settings
from commkern.compressors import Identity
from commkern.dtypes import dtype_name
from commkern.groups import GroupWorker
from commkern.inputs import real_numel
from commkern.layout import Member, effective
from commkern.plan import Plan
from commkern.policy import Policy
from commkern.stores import Stores
from commkern.watch import Watch

_PLANS_KEPT = 256
_IDENTITY = Identity()
_Layout = tuple[str, ...]  # the names of a bucket's parameters


class BucketPlans:
    """Builds the plan of a bucket when it first comes; ``names`` maps the id of a
    parameter to its name."""

    def __init__(
        self,
        names: Mapping[int, str],
        policy: Policy,
        stores: Stores,
        settings: Settings,
        watch: Watch,
    ) -> None:
        self._names = names
        self._policy = policy
        self._stores = stores
        self._settings = settings
        self._watch = watch
        self._plans: dict[Any, Plan] = {}
        self._plain: dict[Any, _Layout] = {}
        self._sizes: dict[tuple[int, ...], dict[str, int]] = {}
        self._seen: set[_Layout] = set()
        self._seen_before: set[_Layout] = set()

    def clear(self) -> None:
        """Forget every plan."""
        self._plans.clear()
        self._plain.clear()

    def open_step(self) -> None:
        """No bucket of the step has come yet."""
        self._seen = set()

    def close_step(self) -> bool:
        """Whether DDP had other buckets in this step than in the one before."""
        rebuilt = self._seen != self._seen_before
        self._seen_before = self._seen
        return rebuilt

    def sizes(
        self, parameters: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> dict[str, int]:
        """Elements of each parameter of a bucket, in reals, by name.

        Not those of ``bucket.gradients()``, which counts a complex element as one.
        """
        ids = tuple(map(id, parameters))
        sizes = self._sizes.get(ids)
        if sizes is None:
            sizes = {self.name(p): real_numel(p) for p in parameters}
            self._sizes[ids] = sizes
        held, wanted = real_numel(buffer), sum(sizes.values())
        if wanted != held:
            raise TypeError(
                f"the parameters of this bucket hold {wanted} real numbers, DDP's "
                f"buffer {held} of dtype {buffer.dtype}: this version of torch cannot "
                "reduce complex parameters"
            )
        return sizes

    def plan(
        self,
        worker: GroupWorker,
        sizes: Mapping[str, int],
        dtype: torch.dtype,
        step: int,
    ) -> tuple[Plan, bool]:
        """The plan of a bucket in a step, and whether it is new."""
        layout = tuple(sizes)
        self._seen.add(layout)
        kind = layout, dtype, self._policy.phase(step)
        if kind not in self._plain:
            self.reserve(sizes)
            self._plain[kind] = self._sent_plain(sizes, dtype_name(dtype), step)
        owing = self._owing(self._plain[kind])
        key = *kind, owing
        if key in self._plans:
            return self._plans[key], False
        members = self._members(sizes, step, owing)
        made = worker.plan(members, dtype_name(dtype), self._settings)
        if len(self._plans) >= _PLANS_KEPT:
            self.clear()
        self._plans[key] = made
        self._watch.plan_built(made, members, step)
        return made, True

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Room in the stores for the parameters that have none yet and need some."""
        self._stores.reserve(sizes, self._policy.codes)

    def _sent_plain(self, sizes: Mapping[str, int], dtype: str, step: int) -> _Layout:
        """The parameters with a residual that have no use for it in such a step."""
        sent = (effective(member, dtype) for member in self._members(sizes, step))
        plain = (member.name for member in sent if member.residual is None)
        return tuple(name for name in plain if name in self._stores.residuals)

    def _owing(self, plain: _Layout) -> _Layout:
        """Those of ``plain`` that have yet to send what was held back before."""
        if not plain or self._policy.tries:
            return ()
        return tuple(name for name in plain if self._stores.holds(name))

    def _members(
        self, sizes: Mapping[str, int], step: int, owing: _Layout = ()
    ) -> list[Member]:
        members, offset = [], 0
        for name, size in sizes.items():
            members.append(self._member(name, size, offset, step, name in owing))
            offset += size
        return members

    def _member(
        self, name: str, size: int, offset: int, step: int, owes: bool
    ) -> Member:
        coder, residuals = self._policy.compressor(name, step), self._stores.residuals
        if name not in residuals:
            return Member(name, size, offset, coder)
        place, row = residuals.offset(name), residuals.row(name)
        if owes:
            return Member(name, size, offset, _IDENTITY, place, row, flush=True)
        flushes = self._policy.flushes(step, warm_up=self._stores.estimates is not None)
        return Member(name, size, offset, coder, place, row, flushes)

    def name(self, parameter: torch.Tensor) -> str:
        """The name of a parameter; ValueError for one of another module."""
        try:
            return self._names[id(parameter)]
        except KeyError:
            raise ValueError(
                f"DDP reduces a parameter of shape {tuple(parameter.shape)} that is "
                "not in the module that this state was made for"
            ) from None
