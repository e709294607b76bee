"""Cluster environment of the shared rank processes.

It tells Lightning the rank and the port, and that Lightning starts no processes: those of
`tests.support.rank_pool` are running already. The pool passes ranks and port as arguments and not
as environment variables, so that no job sees the variables of another. A test of these variables
sets them with `set_torchrun_variables`. The pool restores them after the job.
"""

from __future__ import annotations

import os

from lightning.pytorch.plugins.environments import ClusterEnvironment

from tests.support.rank_pool import RankContext


def set_torchrun_variables(context: RankContext) -> None:
    """Set the environment variables of a rank that torchrun has started."""
    os.environ.update(
        RANK=str(context.rank),
        LOCAL_RANK=str(context.rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(context.world_size),
        LOCAL_WORLD_SIZE=str(context.world_size),
        MASTER_ADDR=context.environment.main_address,
        MASTER_PORT=str(context.environment.main_port),
        TORCHELASTIC_RUN_ID="pool",
    )


class PoolEnvironment(ClusterEnvironment):
    """Environment of one rank of a job; pass it as `Trainer(plugins=[context.environment])`."""

    def __init__(self, world_size: int, rank: int, port: int) -> None:
        self._world_size = world_size
        self._rank = rank
        self._port = port

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return self._port

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._world_size

    def set_world_size(self, size: int) -> None:
        """Ignore the value that a strategy derives from the Trainer: the pool sets it."""

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """Ignore the value that a strategy derives from the Trainer: the pool sets it."""

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuse a Trainer with another number of ranks, which would hang in the rendezvous."""
        if num_devices * num_nodes != self._world_size:
            raise ValueError(
                f"devices * num_nodes must be {self._world_size}, got devices={num_devices}, "
                f"num_nodes={num_nodes}. Use Trainer(devices={self._world_size}, num_nodes=1)."
            )
