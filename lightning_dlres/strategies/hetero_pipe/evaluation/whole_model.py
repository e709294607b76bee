"""The whole model on every rank, for evaluation that cannot run over the stages.

An example is text generation with a cache of keys and values. The cache is an object that cannot be
sent to another rank, and each layer changes it. All ranks run the user's evaluation on the same
batch. So once each of them holds the whole model, they run it as in plain training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.units import format_bytes
from lightning_dlres.pipeline.execute.partition import ModelLayers, Owners, partition
from lightning_dlres.pipeline.execute.states import fill_remote_tensors
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.strategies.connection import Connection
from lightning_dlres.strategies.hetero_pipe.replay.layer_attributes import LayerAttributes

# Place of evaluation; see the argument of the strategy.
Evaluation = Literal["auto", "stages", "whole"]


class WholeModel:
    """The layers of other stages on this rank, while an evaluation needs them.

    All ranks call its methods at the same place of user code.

    Args:
        layers: Layers of the model.
        owners: Stages that hold each parameter.
        plan: Plan of the run.
        connection: Connection to the other ranks.
        attributes: Attributes of the layers; None for a model that no rank holds whole.
        device: Device of this rank.
        limit: Bytes that the model may take on this rank; None without a limit.

    Attributes:
        is_held: Whether this rank holds the whole model now.
    """

    def __init__(
        self,
        layers: ModelLayers,
        owners: Owners,
        plan: PipelinePlan,
        connection: Connection,
        attributes: LayerAttributes | None,
        *,
        device: torch.device,
        limit: int | None,
    ) -> None:
        self._layers, self._owners, self._plan = layers, owners, plan
        self._connection, self._attributes, self._device = connection, attributes, device
        tensors = {*layers.root.parameters(), *layers.root.buffers()}
        self._bytes = sum(t.numel() * t.element_size() for t in tensors)
        self._free: Callable[[], int] | None = None
        if limit is not None:
            self._free = lambda: limit
        elif device.type == "cuda":
            self._free = lambda: torch.cuda.mem_get_info(device)[0]
        self._told: set[str] = set()
        self.is_held = False

    @property
    def is_possible(self) -> bool:
        """False for a model that was built in parts, which is too large for a rank."""
        return self._attributes is not None

    def hold(self, reason: str) -> bool:
        """Get the layers of other stages, unless they do not fit in the memory of some rank; return
        whether this rank holds the whole model.

        Args:
            reason: Why the evaluation needs it, as a sentence.
        """
        if self.is_held or self._attributes is None:
            return self.is_held
        lacks_memory = self._free is not None and self._free() < self._bytes
        if self._connection.any_rank(lacks_memory):
            return False
        if reason not in self._told:
            self._told.add(reason)
            rank_zero_info(
                f"dlres: each rank holds the whole model ({format_bytes(self._bytes)}) in this "
                f"evaluation. {reason}"
            )
        # From now on nothing is refused, the copies of weights below included.
        self.is_held = True
        # Evaluation may be in inference mode, whose tensors could not be trained later.
        with torch.inference_mode(False), torch.no_grad():
            self._fill()
            self._attributes.lend()
        return True

    def release(self, may_keep: bool = False) -> None:
        """Drop the layers of other stages again.

        Args:
            may_keep: Whether to keep them until the next call where user code keeps a graph with
                their parameters, such as losses for a hook at the end.

        Raises:
            ConfigError: If user code keeps such a graph, and `may_keep` is not set.
        """
        if not self.is_held or self._attributes is None:
            return
        _, stage = self._plan.position(self._connection.rank)
        with torch.inference_mode(False), torch.no_grad():
            failure: ConfigError | None = None
            try:
                partition(self._layers, self._owners, self._plan, stage, self._device)
            except ConfigError as error:
                failure = error
            if self._connection.any_rank(failure is not None):
                if not may_keep:
                    raise ConfigError(
                        "Evaluation on the whole model must not keep results with a graph, got "
                        "some when training went on. Keep loss.detach() in the place of loss."
                    ) from failure
                self._fill()
                return
            self._attributes.take_back()
        self.is_held = False

    def _fill(self) -> None:
        mailbox = self._connection.mailbox
        fill_remote_tensors(self._layers, self._owners, self._plan, mailbox, self._device)
