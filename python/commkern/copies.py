"""Pickled and deep-copied states: they hold no group, module or optimizer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from commkern.state import CompressionState

_P = ParamSpec("_P")
_S = TypeVar("_S")
# What lives in one process and is given anew to a copy.
_FOLLOWED = ("grad_scaler", "learning_rate")
_PLACE = ("self", "process_group", "module")


def remember_arguments(
    init: Callable[Concatenate[_S, _P], None],
) -> Callable[Concatenate[_S, _P], None]:
    """Decorator of ``__init__``: keeps its arguments as ``self._arguments``.

    Not the module, which holds the state by its hook and would never be freed.
    """
    signature = inspect.signature(init)

    def remembering(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        init(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs).arguments
        kept = {key: value for key, value in bound.items() if key not in _PLACE}
        vars(self)["_arguments"] = kept

    functools.update_wrapper(remembering, init)
    return remembering


def pack(state: CompressionState) -> dict[str, Any]:
    """The settings and what `CompressionState.state_dict` holds."""
    given = vars(state)["_arguments"]
    return {
        "settings": {k: v for k, v in given.items() if k not in _FOLLOWED},
        "follows": [key for key in _FOLLOWED if given.get(key) is not None],
        "saved": state.state_dict(),
    }


def unpack(state: CompressionState, packed: dict[str, Any]) -> None:
    """Make a new state an unbound copy."""
    follows = dict.fromkeys(packed["follows"], ...)
    vars(state).update(
        _reducer=None, _saved=packed["saved"], _arguments=packed["settings"] | follows
    )


def bind(
    state: CompressionState,
    module: torch.nn.Module,
    group: Any,
    followed: dict[str, Any],
) -> None:
    """What `CompressionState.bind` does; nothing changes if it raises."""
    before = dict(vars(state))
    arguments = dict(before["_arguments"])
    for key in _FOLLOWED:
        value = followed[key] if followed[key] is not None else arguments.get(key)
        if value is ...:
            raise ValueError(
                f"the state that was copied followed a {key}, which a copy does not "
                f"hold: got {key}=None, pass it to bind()"
            )
        arguments[key] = value
    saved = state.state_dict()
    try:
        type(state).__init__(state, group, module=module, **arguments)
        state.load_state_dict(saved)
    except BaseException:
        vars(state).clear()
        vars(state).update(before)
        raise
    vars(state).pop("_saved", None)
