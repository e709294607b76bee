"""Messages between a pool of ranks and the process of each rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """Message to a rank: call a function.

    Attributes:
        module: Module of the function.
        qualname: Qualified name of the function.
        rank: Attribute of the `RankContext`, as are the next three.
        arguments: Further arguments, pickled apart, so that an error of unpickling them in the rank
            is a failure of the job.
    """

    module: str
    qualname: str
    rank: int
    world_size: int
    port: int
    tmp: str
    arguments: bytes


@dataclass(frozen=True)
class Clean:
    """Message to a rank: all ranks of the job have reported, so drop the job's state."""


@dataclass(frozen=True)
class Ready:
    """Answer of a rank that has started, or has dropped a job's state."""


@dataclass(frozen=True)
class Spent:
    """Answer of a rank in the place of `Ready`, if threads of the job still run.

    One may wait for a dead peer, for example. Another process must take the place of this one, or
    later tests find the threads.
    """


@dataclass(frozen=True)
class Returned:
    """Answer of a rank with the function's result, pickled."""

    value: bytes


@dataclass(frozen=True)
class Raised:
    """Answer of a rank in which the function, or the cleaning after it, raised."""

    error_type: str
    message: str
    traceback: str
