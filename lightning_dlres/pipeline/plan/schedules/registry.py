"""Registry of the pipeline schedules, by the names that users give in options and plan.json."""

from __future__ import annotations

from typing import TypeVar

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.pipeline.plan.schedules.base import Schedule
from lightning_dlres.pipeline.plan.schedules.check import check_schedule
from lightning_dlres.pipeline.plan.schedules.gpipe import GPipe
from lightning_dlres.pipeline.plan.schedules.one_f_one_b import OneForwardOneBackward

AUTO = "auto"
"""Value of the `schedule` option: start with 1F1B, and fall back to GPipe where it is not exact."""

_schedules: dict[str, Schedule] = {}
ScheduleClass = TypeVar("ScheduleClass", bound=type[Schedule])


def register_schedule(cls: ScheduleClass) -> ScheduleClass:
    """Register a schedule under its name; a class decorator.

    Every rank must register the schedule, so use it in a module that every rank imports.

    Raises:
        ConfigError: If the name is taken, or the schedule breaks a rule of `check_schedule`.
    """
    known = _schedules.get(cls.name)
    if cls.name == AUTO or (known is not None and type(known) is not cls):
        raise ConfigError(
            f"schedule name must be unused, got {cls.name!r} for {cls.__qualname__}. Give the "
            "class another name."
        )
    if known is None:
        schedule = cls()
        check_schedule(schedule)
        _schedules[cls.name] = schedule
    return cls


def schedule_named(name: str) -> Schedule:
    """Return the schedule that is registered under a name.

    Raises:
        ConfigError: If no schedule has this name.
    """
    schedule = _schedules.get(name) if isinstance(name, str) else None
    if schedule is None:
        rule = f"one of {', '.join(map(repr, schedule_names()))}"
        raise ConfigError(got_expected("schedule", name, rule, "schedule='1f1b'"))
    return schedule


def schedule_names() -> tuple[str, ...]:
    """Return the names of all registered schedules."""
    return tuple(_schedules)


def initial_schedule(option: str) -> Schedule:
    """Return the schedule that a run starts with: 1F1B for "auto", else the one of this name.

    Raises:
        ConfigError: If no schedule has this name.
    """
    return schedule_named(OneForwardOneBackward.name if option == AUTO else option)


register_schedule(GPipe)
register_schedule(OneForwardOneBackward)
