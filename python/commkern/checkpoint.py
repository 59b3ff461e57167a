"""Saving and loading the hook's state: tensors and plain values, keyed by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from commkern import auto
from commkern.delayed import check_pending, load_pending, saved_pending
from commkern.gather import mean_over_ranks
from commkern.groups import GroupWorker
from commkern.inputs import checked_bool, checked_int, checked_number, checked_seed
from commkern.residuals import ResidualStore
from commkern.units import Reading

if TYPE_CHECKING:
    from commkern.reducer import Reducer
    from commkern.state import CompressionState

FORMAT = 2
_ANY_RANK = -1
HELD_BACK = "held_back"
_SETTINGS = ("compressor", "feedback", "seed")
_HEADER = ("rank", "world_size", "step", "loss_scale", "learning_rate", *_SETTINGS)


def state_dict(state: CompressionState) -> dict[str, Any]:
    """What `CompressionState.state_dict` returns."""
    reducer = state.reducer
    place = {"rank": reducer.worker.rank, "world_size": reducer.worker.world_size}
    return _header(state) | place | _values(reducer)


def full_state_dict(state: CompressionState) -> dict[str, Any]:
    """The mean of all ranks' values, the same on every rank."""
    reducer = state.reducer
    worker, values = reducer.worker, _values(reducer)
    for key, named in values.items():
        means = mean_over_ranks(worker, reducer.step, list(named.values()))
        values[key] = {
            name: mean.to(mine.dtype, copy=True)
            for (name, mine), mean in zip(named.items(), means, strict=True)
        }
    place = {"rank": _ANY_RANK, "world_size": worker.world_size}
    header = _header(state)
    return header | auto.of_all_ranks(header) | place | values


def merge_state_dicts(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What `CompressionState.full_state_dict` would have returned, from the
    `state_dict` of every rank, in any order: for a run on another number of ranks.

    Needs no process group. Raises ValueError naming the ranks that are missing or come
    twice, and what differs between them.
    """
    by_rank = _by_rank(states)
    first = by_rank[0]
    for rank, other in enumerate(by_rank):
        for key in first.keys() - {"rank", auto.SAMPLES}:
            if not isinstance(first[key], dict) and other.get(key) != first[key]:
                raise ValueError(
                    f"{key} is {first[key]!r} on rank 0 and {other.get(key)!r} on rank "
                    f"{rank}: these are not of one checkpoint"
                )
    merged = {k: dict(v) if isinstance(v, dict) else v for k, v in first.items()}
    for key in (key for key, value in merged.items() if isinstance(value, dict)):
        for name, value in merged[key].items():
            try:
                ranks = [other[key][name] for other in by_rank]
            except (KeyError, TypeError):
                raise ValueError(
                    f"{key} of {name!r} is not there on all ranks"
                ) from None
            for other in ranks:
                _check_tensor(f"{key} of {name!r}", value, other)
            doubles = [other.double() for other in ranks]
            merged[key][name] = torch.stack(doubles).mean(0).to(value.dtype)
    return merged | auto.of_all_ranks(merged) | {"rank": _ANY_RANK}


def _by_rank(states: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if isinstance(states, (Mapping, str)) or not isinstance(states, Iterable):
        raise TypeError(
            "states must be a list of the state_dict of each rank, got "
            f"{type(states).__name__}"
        )
    listed = list(states)
    if not listed:
        raise ValueError("states of all ranks are needed, got none")
    for saved in listed:
        _check_header(saved)
        _check_named("residuals", saved.get("residuals"))
    world_size = listed[0]["world_size"]
    got = sorted(saved["rank"] for saved in listed)
    if got != list(range(world_size)):
        missing = sorted(set(range(world_size)) - set(got))
        raise ValueError(
            f"one state of each of the {world_size} ranks is needed: got ranks {got}, "
            f"missing are {missing}"
        )
    return sorted(listed, key=lambda saved: int(saved["rank"]))


def _values(reducer: Reducer) -> dict[str, dict[str, torch.Tensor]]:
    reducer.wait()
    values = {
        key: {name: store[name].clone() for name in store.names()}
        for key, store in reducer.stores.named().items()
    }
    return values | saved_pending(reducer.delay)


def _header(state: CompressionState) -> dict[str, Any]:
    state.wait()  # a step on its way may have other units
    units = state.reducer.units.current._asdict()
    header = {"format": FORMAT, "step": state.step} | units | _settings(state)
    held_back = {HELD_BACK: state.reducer.stores.held_back}
    return header | held_back | auto.saved(state.compressor)


def _settings(state: CompressionState) -> dict[str, Any]:
    return {
        "compressor": str(state.compressor),
        "feedback": str(state.feedback),
        "seed": state.reducer.seed,
    }


# --- loading --------------------------------------------------------------------------


def load_state_dict(
    state: CompressionState, saved: dict[str, Any], *, strict: bool, reset: bool
) -> None:
    """What `CompressionState.load_state_dict` does; nothing changes if it raises."""
    checked_bool("strict", strict)
    checked_bool("reset", reset)
    reducer = state.reducer
    _check_header(saved)
    values: dict[str, dict[str, torch.Tensor]] = {}
    if reset:
        _warn_of_reset(saved)
    else:
        _check_place(reducer.worker, saved)
        _check_settings(state, saved, strict=strict)
        for key, store in _stores_that_fit(reducer, saved).items():
            _check_store(key, store, saved.get(key), strict=strict)
            values[key] = saved[key]
        check_pending(reducer.delay, saved, strict=strict)
    reducer.wait()
    if isinstance(state.compressor, auto.AutoChoice):
        state.compressor.load({} if reset else saved, saved["step"])
    reducer.begin_step()
    reducer.step = saved["step"]
    reducer.units.current = Reading(saved["loss_scale"] or 1.0, saved["learning_rate"])
    for key, store in reducer.stores.named().items():
        store.replace(values.get(key, {}))
    residuals = values.get("residuals", {})
    reducer.stores.held_back = saved.get(HELD_BACK, residuals) if residuals else ()
    load_pending(reducer.delay, {} if reset else saved, raises=reducer.raises)
    if "ledger_given" not in values:
        reducer.stores.restart_ledger()


def _stores_that_fit(
    reducer: Reducer, saved: Mapping[str, Any]
) -> dict[str, ResidualStore]:
    """The stores to load: a ledger that was not kept starts anew, and residuals of a
    feedback that accumulates mean something else than those of one that does not."""
    stores = reducer.stores
    if ("estimates" in saved) != (stores.estimates is not None):
        return {}
    named = stores.named().items()
    return {k: s for k, s in named if k in saved or not k.startswith("ledger")}


def _warn_of_reset(saved: Mapping[str, Any]) -> None:
    named = {k: list(v) for k, v in saved.items() if isinstance(v, dict) and v}
    dropped = "; ".join(
        f"{key} of {len(names)} parameters ({', '.join(map(str, names[:3]))}"
        f"{', ...' if len(names) > 3 else ''})"
        for key, names in named.items()
    )
    warnings.warn(
        f"reset=True: going on at step {saved['step']} with zero residuals; dropped "
        f"from the saved state: {dropped or 'nothing'}",
        stacklevel=4,
    )


def _check_header(saved: Any) -> None:
    if not isinstance(saved, Mapping):
        raise TypeError(f"expected a state_dict, got {type(saved).__name__}")
    _same("format", FORMAT, saved.get("format"))
    missing = [key for key in _HEADER if key not in saved]
    if missing:
        raise ValueError(f"the saved state lacks {missing}")
    held_back = saved.get(HELD_BACK, [])
    if not isinstance(held_back, list) or not {str}.issuperset(map(type, held_back)):
        raise TypeError(
            f"{HELD_BACK} of the saved state must be a list of names, got {held_back!r}"
        )
    least = {"step": 0, "rank": _ANY_RANK, "world_size": 1}
    for key, low in least.items():
        checked_int(f"{key} of the saved state", saved[key], low, 2**63)
    for key in ("loss_scale", "learning_rate"):
        what, unit = f"{key} of the saved state", saved[key]
        if unit is not None and checked_number(what, unit) < 0:
            raise ValueError(f"{what} must be None or 0 or more, got {unit!r}")
    checked_seed(saved["seed"], "seed of the saved state")
    for key in ("compressor", "feedback"):
        if not isinstance(saved[key], str):
            raise TypeError(
                f"{key} of the saved state must be a string, got {saved[key]!r}"
            )


def _check_place(worker: GroupWorker, saved: Mapping[str, Any]) -> None:
    here = (worker.rank, worker.world_size)
    there = (saved["rank"], saved["world_size"])
    if there[0] != _ANY_RANK and here != there:
        raise ValueError(
            f"this is rank {here[0]} of {here[1]}, the state is that of rank "
            f"{there[0]} of {there[1]}. On another number of ranks load "
            "full_state_dict(), or commkern.merge_state_dicts() of all ranks' states, "
            "or start with zero residuals: load_state_dict(..., reset=True). With "
            "torch.distributed.checkpoint save and load state.per_rank()"
        )


def _check_settings(
    state: CompressionState, saved: Mapping[str, Any], *, strict: bool
) -> None:
    for key, mine in _settings(state).items():
        if strict:
            _same(key, mine, saved[key])


def _check_named(key: str, saved: Any) -> None:
    if not isinstance(saved, Mapping):
        raise TypeError(f"{key} of the saved state must be a dict, got {saved!r}")


def _check_store(key: str, store: ResidualStore, saved: Any, *, strict: bool) -> None:
    _check_named(key, saved)
    known = set(store.names())
    missing, unexpected = (
        sorted(known - set(saved)),
        sorted(set(saved) - known, key=str),
    )
    if strict and (missing or unexpected):
        raise ValueError(
            f"{key}: parameters differ: missing in the saved state {missing}, "
            f"unexpected {unexpected}"
        )
    for name in known & set(saved):
        _check_tensor(f"{key} of {name!r}", store[name], saved[name])


def _check_tensor(what: str, mine: torch.Tensor, saved: Any) -> None:
    if not isinstance(saved, torch.Tensor):
        raise TypeError(f"{what}: expected a tensor, got {type(saved).__name__}")
    _same(f"dtype of {what}", mine.dtype, saved.dtype)
    _same(f"elements of {what}", mine.numel(), saved.numel())
    bad = int((~torch.isfinite(saved)).sum())
    if bad:
        raise ValueError(
            f"{what}: all values must be finite, {bad} of {saved.numel()} are not"
        )


def _same(what: str, expected: object, got: object) -> None:
    if type(expected) is not type(got) or expected != got:
        raise ValueError(f"{what}: this state has {expected!r}, the saved one {got!r}")
