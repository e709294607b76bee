"""Options of a mirror, checked at construction."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path

from lightning_dlres.core.checks import flag, local_path, one_of, whole_number
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.units import parse_bytes

AUTO, MIN = "auto", "min"
AFTER_BACKWARD, LAYERWISE = "after_backward", "layerwise"

_WINDOW_RULE = "a number of bytes above 0, 'auto' or 'min'"


@dataclass(frozen=True, kw_only=True)
class MirrorConfig:
    """Options of a mirror.

    Attributes:
        window: Bytes of parameters on the device at once; "auto" for the smallest window whose
            step is predicted to be as short as with any, and "min" for one layer at a time.
        disk: Local directory for a file that holds the mirror; None: host memory.
        update: "after_backward" or "layerwise".
        profile_steps: Steps that are measured before a plan is made.
        fused: True lets optimizers of torch use their fused kernels for the CPU.

    Raises:
        ConfigError: If an option has a bad value.
    """

    window: int | str = AUTO
    disk: str | Path | None = None
    update: str = AFTER_BACKWARD
    profile_steps: int = 2
    fused: bool = True

    def __post_init__(self) -> None:
        if self.window not in (AUTO, MIN):
            wrong = got_expected("window", self.window, _WINDOW_RULE, '"512MiB"')
            if isinstance(self.window, bool) or not isinstance(self.window, (int, str)):
                raise ConfigError(wrong)
            try:
                is_positive = parse_bytes(self.window, "window") > 0
            except ConfigError:
                raise ConfigError(wrong) from None
            if not is_positive:
                raise ConfigError(got_expected("window", self.window, _WINDOW_RULE, '"min"'))
        one_of("update", self.update, (AFTER_BACKWARD, LAYERWISE), "update='after_backward'")
        whole_number("profile_steps", self.profile_steps, "profile_steps=2")
        flag("fused", self.fused)
        local_path("disk", self.disk, "a local directory", "disk='/local/scratch'")

    def directory(self) -> Path | None:
        """Return the directory of the mirror's file; None for host memory.

        Raises:
            ConfigError: If the directory does not exist.
        """
        if self.disk is None:
            return None
        directory = Path(self.disk)
        if not directory.is_dir():
            raise ConfigError(
                f"disk must be an existing directory, got {str(directory)!r}. Create it, or name "
                "another one."
            )
        return directory

    def limit(self) -> float:
        """Return the limit of the window in bytes; infinite for "auto", until a plan sets one."""
        if self.window == AUTO:
            return inf
        return 0.0 if self.window == MIN else float(parse_bytes(self.window, "window"))
