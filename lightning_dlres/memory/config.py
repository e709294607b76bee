"""Configuration of offloading: the user's arguments, and their meaning on one device."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import torch

from lightning_dlres.core.checks import local_path
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.host.free_memory import available_bytes
from lightning_dlres.core.units import parse_bytes
from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.execute.compression import storage_codec
from lightning_dlres.memory.plan.plan import MemoryPlan

ACTIONS = ("compress", "offload", "reuse", "recompute")
# Without "recompute": a second run gives the same bits only if the forward depends on its inputs
# alone.
DEFAULT_ACTIONS = ("compress", "offload", "reuse")
# Bytes, a share of at most 1.0 or "100%", or the word "min".
Budget = int | float | str

# Share of the host's available memory for offloaded storages, if the user sets no host_budget.
_HOST_SHARE = 0.8


@dataclass(frozen=True, kw_only=True)
class TierConfig:
    """Configuration of a tier that storages may be offloaded to.

    Attributes:
        name: "host" or "disk".
        limit: Bytes that it may hold; infinite: no limit.
        directory: Directory of the tier's memory-mapped file; None: the tier is host memory.
    """

    name: str
    limit: float = inf
    directory: Path | None = None


@dataclass(frozen=True, kw_only=True)
class OffloaderConfig:
    """Configuration of an offloader on one device.

    Attributes:
        device_limit: Bytes that the device may hold in a step; "min": as few as possible.
        saved_limit: Bytes of saved storages on the device; at most 1: a share of what plain
            training saves.
        min_bytes: Storages with fewer bytes are not managed.
        tiers: Tiers for offloaded storages, the preferred one first.
        actions: Actions that a plan may use.
        recompute: Whether a plan may run modules again in backward.
        reuse: Whether a plan may let modules reuse their inputs' memory.
        profile_steps: Number of steps that are measured for a plan.
        exact: Whether a plan lets modules reuse memory or run again only if they then compute the
            same bits as before. This takes one additional step, which compares.
        on_over_budget: "error" to raise a ConfigError if no plan meets the limits; "warn" to follow
            the plan with the smallest possible peak.
    """

    device_limit: float | str = inf
    saved_limit: float = inf
    min_bytes: int = 1 << 16
    tiers: tuple[TierConfig, ...] = (TierConfig(name="host"),)
    actions: tuple[MemoryAction, ...] = tuple(MemoryAction)
    recompute: bool = True
    reuse: bool = True
    profile_steps: int = 2
    exact: bool = True
    on_over_budget: str = "error"


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Arguments of `ActivationOffload` and `MemoryPrecision`, checked at construction.

    Attributes:
        budget: Bytes on the device, a share of its memory, or "min".
        saved_budget: Bytes of saved tensors on the device, or a share of those of plain training.
        host_budget: Bytes of host memory for offloaded tensors; None: a share of what is available.
        disk: Local directory for offloaded tensors.
        disk_budget: Bytes in that directory; None: no limit.
        min_size: Tensors with fewer bytes stay on the device.
        actions: Some of `ACTIONS`.
        profile_steps: Number of steps that are measured for a plan.
        exact: See `OffloaderConfig`.
        on_over_budget: "error" or "warn".
        plan: Plan of an earlier run, or the path of its JSON.

    Raises:
        ConfigError: If an argument has a bad value.
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
        _require_budget("budget", self.budget, '"8GiB", "90%" or "min"', words=("min",))
        if self.saved_budget is not None:
            _require_budget("saved_budget", self.saved_budget, '"2GiB" or "50%"')
        for name in ("host_budget", "disk_budget"):
            value = getattr(self, name)
            if value is not None:
                _require_bytes(name, value, '"16GiB"')
        _require_bytes("min_size", self.min_size, '"64KiB"')
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
        self.load_plan()
        local_path("disk", self.disk, "a local directory", "disk='/local/scratch'")

    def load_plan(self) -> MemoryPlan | None:
        """Return the plan of the `plan` argument; None without one.

        Raises:
            ConfigError: If the argument is not a plan, or its file cannot be read.
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
                "plan must be the path of a file that MemoryPlan.to_json wrote, got "
                f"{str(self.plan)!r} ({error}). Write the file with callback.plan.to_json()."
            ) from error

    def for_device(self, device: torch.device, ranks_on_host: int = 1) -> OffloaderConfig:
        """Return the configuration of an offloader on a device.

        Args:
            device: Device of the model.
            ranks_on_host: Number of ranks that share the host's memory.

        Raises:
            ConfigError: If the directory does not exist, the GPU cannot compress, or the given plan
                uses a tier that is not available.
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
        return OffloaderConfig(
            device_limit=self._device_limit(device, ranks_on_host),
            saved_limit=inf if self.saved_budget is None else _bytes_or_share(self.saved_budget),
            min_bytes=parse_bytes(self.min_size),
            tiers=tiers,
            actions=tuple(actions),
            recompute="recompute" in names,
            reuse="reuse" in names,
            profile_steps=self.profile_steps,
            exact=self.exact,
            on_over_budget=self.on_over_budget,
        )

    def _require_tiers(self, tiers: tuple[TierConfig, ...]) -> None:
        """Raise a ConfigError if the given plan uses a tier that is not among these."""
        plan, available = self.load_plan(), {tier.name for tier in tiers}
        used = {d.tier for d in plan.decisions if d.tier is not None} if plan is not None else set()
        if not used <= available:
            raise ConfigError(
                f"plan must use only the tiers available here ({', '.join(available) or 'none'}), "
                f"got one that uses {', '.join(sorted(used))}. Omit plan to make a new one."
            )

    def _actions_on(self, device: torch.device) -> set[str]:
        names = set(self.actions)
        if device.type != "cuda" or "compress" not in names or storage_codec().runs_on_gpus():
            return names
        if names != set(DEFAULT_ACTIONS):
            raise ConfigError(
                "actions must not contain 'compress' on a GPU without numba-cuda, got "
                f"{list(self.actions)}. Install it: pip install 'lightning-dlres[cuda]'."
            )
        # The default includes "compress", so the user has not asked for it.
        return names - {"compress"}

    def _device_limit(self, device: torch.device, ranks_on_host: int) -> float | str:
        if self.budget == "min":
            return "min"
        limit = _bytes_or_share(self.budget)
        if limit > 1:
            return limit
        if device.type == "cuda":
            return limit * torch.cuda.get_device_properties(device).total_memory
        available = available_bytes()
        return inf if available is None else limit * available / ranks_on_host

    def _tiers(self, device: torch.device, ranks_on_host: int) -> tuple[TierConfig, ...]:
        tiers = []
        if device.type != "cpu":
            limit = inf if self.host_budget is None else float(parse_bytes(self.host_budget))
            available = available_bytes()
            if self.host_budget is None and available is not None:
                limit = _HOST_SHARE * available / ranks_on_host
            tiers.append(TierConfig(name="host", limit=limit))
        # On the CPU the host's memory is the device's memory, so only a file is another tier.
        if self.disk is not None or device.type == "cpu":
            directory = Path(self.disk if self.disk is not None else tempfile.gettempdir())
            if not directory.is_dir():
                raise ConfigError(
                    f"disk must be an existing directory, got {str(directory)!r}. Create it, or "
                    "name another one."
                )
            limit = inf if self.disk_budget is None else float(parse_bytes(self.disk_budget))
            tiers.append(TierConfig(name="disk", limit=limit, directory=directory))
        return tuple(tiers)


def _require_budget(name: str, value: Budget, example: str, words: tuple[str, ...] = ()) -> None:
    if value in words:
        return
    expected = "bytes, or a share up to 1.0 or 100%" + "".join(f", or {word!r}" for word in words)
    try:
        number = _bytes_or_share(value)
    except ConfigError:
        number = 0.0
    if isinstance(value, bool) or not number > 0:
        raise ConfigError(got_expected(name, value, expected, example))


def _require_bytes(name: str, value: int | str, example: str) -> None:
    """Raise a ConfigError if a value is not a number of bytes; a share is not one."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(got_expected(name, value, "a number of bytes", example))
    parse_bytes(value, name)


def _bytes_or_share(value: Budget) -> float:
    """Return bytes (more than 1), or a share (at most 1); 0 for a bad percentage."""
    if isinstance(value, str) and value.strip().endswith("%"):
        with contextlib.suppress(ValueError):
            share = float(value.strip()[:-1]) / 100
            return share if 0 < share <= 1 else 0.0
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value) if "." in value else int(value)
    if isinstance(value, float) and 0 < value <= 1:
        return value
    # The integer 1 means one byte, and must not be taken for a share of 1.0.
    return max(float(parse_bytes(value, "budget")), 1.5) if value else 0.0
