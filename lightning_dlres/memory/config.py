"""What a user says about memory, checked at construction, and what it means on a device."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import torch

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.host.free_memory import available_bytes
from lightning_dlres.core.units import parse_bytes
from lightning_dlres.kernels import zvc
from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.plan.plan import MemoryPlan
from lightning_dlres.memory.settings import Settings, TierSettings

ACTIONS = ("compress", "offload", "reuse", "recompute")
# To run a module again is exact only if its forward depends on its inputs alone.
DEFAULT_ACTIONS = ("compress", "offload", "reuse")
Budget = int | float | str


@dataclass(frozen=True)
class MemoryOptions:
    """The arguments of `ActivationOffload` and `MemoryPrecision`; see there.

    Raises:
        ConfigError: an argument is of no use; the message says what was expected.
    """

    budget: Budget = 0.9
    saved_budget: Budget | None = None
    host_budget: int | str | None = None
    disk: str | Path | None = None
    disk_budget: int | str | None = None
    min_size: int | str = "64KiB"
    actions: Sequence[str] = DEFAULT_ACTIONS
    profile_steps: int = 2
    exact: bool = True
    on_over_budget: str = "error"
    plan: MemoryPlan | str | Path | None = None

    def __post_init__(self) -> None:
        _amount("budget", self.budget, '"8GiB", "90%" or "min"', also=("min",))
        if self.saved_budget is not None:
            _amount("saved_budget", self.saved_budget, '"2GiB" or "50%"')
        for name in ("host_budget", "disk_budget"):
            value = getattr(self, name)
            if value is not None:
                _whole(name, value, '"16GiB"')
        _whole("min_size", self.min_size, '"64KiB"')
        if not isinstance(self.actions, (list, tuple, set, frozenset)) or any(
            action not in ACTIONS for action in self.actions
        ):
            expected = f"a list of some of {', '.join(map(repr, ACTIONS))}"
            raise ConfigError(got_expected("actions", self.actions, expected, "['offload']"))
        if type(self.profile_steps) is not int or self.profile_steps < 1:
            expected = "a number of steps, at least 1"
            raise ConfigError(got_expected("profile_steps", self.profile_steps, expected, "2"))
        if not isinstance(self.exact, bool):
            raise ConfigError(got_expected("exact", self.exact, "True or False", "True"))
        if self.on_over_budget not in ("error", "warn"):
            expected = "'error' or 'warn'"
            raise ConfigError(
                got_expected("on_over_budget", self.on_over_budget, expected, "'warn'")
            )
        self.given()
        if self.disk is not None and (
            not isinstance(self.disk, (str, Path)) or not str(self.disk) or "://" in str(self.disk)
        ):
            raise ConfigError(
                got_expected("disk", self.disk, "a local directory", "'/local/scratch'")
            )

    def given(self) -> MemoryPlan | None:
        """Return the plan that was given, if one was.

        Raises:
            ConfigError: it is none, or cannot be read.
        """
        if self.plan is None or isinstance(self.plan, MemoryPlan):
            return self.plan
        if not isinstance(self.plan, (str, Path)):
            expected = "a MemoryPlan, or the path of one written with to_json"
            raise ConfigError(got_expected("plan", self.plan, expected, "callback.plan"))
        try:
            return MemoryPlan.from_json(Path(self.plan).read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"plan must be the path of a file that MemoryPlan.to_json wrote, got "
                f"{str(self.plan)!r}: {error}"
            ) from error

    def on(self, device: torch.device, ranks_on_host: int = 1) -> Settings:
        """Return what this means on a device.

        Args:
            device: where the model is.
            ranks_on_host: which share the host's memory, and the device if that is the CPU.

        Raises:
            ConfigError: the directory is not there, or the GPU cannot compress.
        """
        names = self._actions_on(device)
        actions = [MemoryAction.KEEP]
        if "compress" in names:
            actions.append(MemoryAction.COMPRESS)
        tiers = self._tiers(device, ranks_on_host) if "offload" in names else ()
        self._require_tiers(tiers)
        if tiers:
            actions.append(MemoryAction.OFFLOAD)
            if "compress" in names:
                actions.append(MemoryAction.BOTH)
        return Settings(
            device_limit=self._device_limit(device, ranks_on_host),
            saved_limit=inf if self.saved_budget is None else _number(self.saved_budget),
            min_bytes=parse_bytes(self.min_size),
            tiers=tiers,
            actions=tuple(actions),
            recompute="recompute" in names,
            reuse="reuse" in names,
            profile_steps=self.profile_steps,
            exact=self.exact,
            on_over_budget=self.on_over_budget,
        )

    def _require_tiers(self, tiers: tuple[TierSettings, ...]) -> None:
        plan, known = self.given(), {tier.name for tier in tiers}
        wanted = (
            {d.tier for d in plan.decisions if d.tier is not None} if plan is not None else set()
        )
        if not wanted <= known:
            raise ConfigError(
                f"plan must move data only where they may go here ({', '.join(known) or 'nowhere'})"
                f", got one that moves them to {', '.join(sorted(wanted))}. Leave it out, so that "
                "one is made."
            )

    def _actions_on(self, device: torch.device) -> set[str]:
        names = set(self.actions)
        if device.type != "cuda" or "compress" not in names or zvc.runs_on_gpus():
            return names
        if names != set(DEFAULT_ACTIONS):
            raise ConfigError(
                "actions must be without 'compress' on a GPU without numba-cuda, got "
                f"{list(self.actions)}. Install it: pip install 'lightning-dlres[cuda]'."
            )
        # Nobody has asked for it.
        return names - {"compress"}

    def _device_limit(self, device: torch.device, ranks_on_host: int) -> float | str:
        if self.budget == "min":
            return "min"
        limit = _number(self.budget)
        if limit > 1:
            return limit
        if device.type == "cuda":
            return limit * torch.cuda.get_device_properties(device).total_memory
        available = available_bytes()
        return inf if available is None else limit * available / ranks_on_host

    def _tiers(self, device: torch.device, ranks_on_host: int) -> tuple[TierSettings, ...]:
        found = []
        if device.type != "cpu":
            host = inf if self.host_budget is None else float(parse_bytes(self.host_budget))
            available = available_bytes()
            if self.host_budget is None and available is not None:
                host = 0.8 * available / ranks_on_host
            found.append(TierSettings("host", host))
        # On the CPU, what is on the host is on the device: only a file is somewhere else.
        if self.disk is not None or device.type == "cpu":
            directory = Path(self.disk if self.disk is not None else tempfile.gettempdir())
            if not directory.is_dir():
                raise ConfigError(
                    f"disk: got {str(directory)!r}, expected a directory that is there. Make it, "
                    "or name another one."
                )
            limit = inf if self.disk_budget is None else float(parse_bytes(self.disk_budget))
            found.append(TierSettings("disk", limit, directory))
        return tuple(found)


def _amount(name: str, value: Budget, try_: str, also: tuple[str, ...] = ()) -> None:
    if value in also:
        return
    expected = "bytes, or a share up to 1.0 or 100%" + "".join(f", or {word!r}" for word in also)
    try:
        number = _number(value)
    except ConfigError:
        number = 0.0
    if isinstance(value, bool) or not number > 0:
        raise ConfigError(got_expected(name, value, expected, try_))


def _whole(name: str, value: int | str, try_: str) -> None:
    """Refuse what is no number of bytes; a share would be one of 0 or 1."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(got_expected(name, value, "a number of bytes", try_))
    parse_bytes(value, name)


def _number(value: Budget) -> float:
    """Return bytes, or a share if that is at most 1; 0 for a percentage that is none."""
    if isinstance(value, str) and value.strip().endswith("%"):
        with contextlib.suppress(ValueError):
            share = float(value.strip()[:-1]) / 100
            return share if 0 < share <= 1 else 0.0
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value) if "." in value else int(value)
    if isinstance(value, float) and 0 < value <= 1:
        return value
    # One byte is no share.
    return max(float(parse_bytes(value, "budget")), 1.5) if value else 0.0
