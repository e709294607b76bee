"""The cluster that the shared rank processes form, told to Lightning.

Lightning asks a cluster environment who it is and whether to start processes itself. The ranks of
`tests.support.rank_pool` exist already. Their numbers and port come from the pool rather than from
environment variables, so that one job's state cannot be taken for another's. A test of these
variables sets them with `as_under_torchrun`, and the pool takes them back after the job.
"""

from __future__ import annotations

import os

from lightning.pytorch.plugins.environments import ClusterEnvironment

from tests.support.rank_pool import RankContext


def as_under_torchrun(context: RankContext) -> None:
    """Make a rank look to Lightning like one that torchrun has started."""
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
    """One rank of a job on this machine; pass it as `Trainer(plugins=[context.environment])`."""

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
        """The pool decides: what a strategy derives from the Trainer's arguments is ignored."""

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """The pool decides: what a strategy derives from the Trainer's arguments is ignored."""

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuse at construction what would otherwise hang in the rendezvous."""
        if num_devices * num_nodes != self._world_size:
            raise ValueError(
                f"got devices={num_devices}, num_nodes={num_nodes}, expected {self._world_size} "
                f"ranks in all, try Trainer(devices={self._world_size}, num_nodes=1)"
            )
