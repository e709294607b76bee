"""What is known of a model and of the devices that shall train it (Method E, E1, E5): plain data,
from which everything is planned and simulated.

All sizes and times are those of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from lightning_dlres.core.checks import instance, whole_number
from lightning_dlres.pipeline.profile.cluster import Cluster

_LAYER_SIZES = (
    "parameter_bytes",
    "gradient_bytes",
    "input_bytes",
    "output_bytes",
    "gradient_output_bytes",
    "saved_bytes",
    "workspace_bytes",
    "update_bytes",
)


class LayerProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One layer, under one micro-batch.

    Attributes:
        name: as in the state dict.
        parameter_bytes: parameters that no other layer uses.
        gradient_bytes: those of them that are trained.
        shared: parameters that other layers use, too: bytes by name.
        input_bytes: tensors that enter.
        output_bytes: tensors that leave: what crosses a cut below this layer.
        gradient_output_bytes: gradients that come back over that cut.
        saved_bytes: what the layer keeps for its backward beside its inputs and outputs.
        workspace_bytes: what forward or backward needs for a moment beyond what is kept.
        update_bytes: what an optimizer that takes one parameter after the other needs for a moment.
        forward, backward: seconds on each kind of device; empty where they were not measured.
    """

    name: str
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    shared: dict[str, int] = msgspec.field(default_factory=dict)
    input_bytes: int = 0
    output_bytes: int = 0
    gradient_output_bytes: int = 0
    saved_bytes: int = 0
    workspace_bytes: int = 0
    update_bytes: int = 0
    forward: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        instance("name", self.name, (str,), "the name of a layer", "name='layer'")
        for size in _LAYER_SIZES:
            whole_number(size, getattr(self, size), f"{size}=0", least=0)

    @property
    def all_parameter_bytes(self) -> int:
        """Bytes of every parameter that the layer uses."""
        return self.parameter_bytes + sum(self.shared.values())


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What a step does beside the layers.

    Attributes:
        loss: seconds of the loss of one micro-batch, forward and backward, on each kind.
        loss_bytes: what the loss of one micro-batch needs for a moment, with a copy of the output.
        message: seconds that one message takes from a stage's computing, on each kind.
        run_overhead_seconds: extra seconds, forward and backward, of a layer that is a run of its
            own, on each kind. Layers' own times are those within a longer run.
        update: seconds that the optimizer takes for every byte of a gradient, on each kind.
        state_bytes_per_parameter_byte: size of the optimizer's state.
        update_bytes_per_byte: what an optimizer that takes all parameters at once needs for a
            moment, for every byte of a gradient.
        gradient_copies: 2 where the gradients of the step before are still held while those of a
            step are computed (accumulation over batches), else 1.
    """

    loss: tuple[float, ...] = ()
    loss_bytes: int = 0
    message: tuple[float, ...] = ()
    run_overhead_seconds: tuple[float, ...] = ()
    update: tuple[float, ...] = ()
    state_bytes_per_parameter_byte: float = 0.0
    update_bytes_per_byte: float = 0.0
    gradient_copies: int = 1


@dataclass(frozen=True)
class RunProfile:
    """What was measured: everything that a planner needs.

    Attributes:
        layers, step, cluster: see there.
        microbatches: into how many the batch is cut.
        host_memory: bytes that the ranks of a host may hold together, by host; for ranks on the CPU
            without a limit of their own.
    """

    layers: tuple[LayerProfile, ...]
    step: StepCosts
    cluster: Cluster
    microbatches: int
    host_memory: dict[str, int] = field(default_factory=dict)
