"""Check of the states that a caller loads, such as those of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.gradsync.execute.saved_states import LOADED

_ENTRY_KEYS = {"gradient", "start", "stop", "part", "codec", "tensors"}


def require_states(states: object) -> None:
    """Raise an error unless the argument `states` has the states of all ranks of one run.

    Raises:
        ConfigError: If it has none, something else, or states of different steps.
    """
    fix = "states=[state_dict of rank 0, state_dict of rank 1]"
    if not isinstance(states, Sequence) or not states:
        rule = "a list of the states of all ranks"
        got = type(states).__name__ if states else states
        raise ConfigError(got_expected("states", got, rule, fix))
    for state in states:
        if not _is_state(state):
            got = f"{type(state).__name__} {list(state) if isinstance(state, Mapping) else ''}"
            raise ConfigError(got_expected("states", got.strip(), "results of state_dict", fix))
    steps = sorted({state["step"] for state in states})
    if len(steps) > 1:
        raise ConfigError(got_expected("states", f"steps {steps}", "those of one step", fix))
    if LOADED in states[0]:
        require_states(states[0][LOADED])


def _is_state(state: Any) -> bool:
    if not isinstance(state, Mapping):
        return False
    units = state.get("units", [])
    return (
        isinstance(state.get("step"), int)
        and isinstance(state.get("algorithm"), str)
        and isinstance(units, Sequence)
        and all(isinstance(entry, Mapping) and entry.keys() >= _ENTRY_KEYS for entry in units)
    )
