"""Profile of a run: the costs of its layers and its step as plain data, input of the planner.

All sizes are in bytes and all times in seconds. Times, and the sizes of tensors that depend on the
input, are for one micro-batch unless stated otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from lightning_dlres.core.checks import instance, whole_number
from lightning_dlres.pipeline.profile.cluster import Cluster

# Fields of `LayerProfile` that must be whole numbers of bytes.
_SIZE_FIELDS = (
    "parameter_bytes",
    "gradient_bytes",
    "input_bytes",
    "output_bytes",
    "gradient_output_bytes",
    "saved_bytes",
    "workspace_bytes",
    "update_bytes",
)


class LayerProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of one layer: sizes of its parameters, and costs of one micro-batch.

    Attributes:
        name: Name of the layer in the state dict.
        parameter_bytes: Parameters that no other layer uses.
        gradient_bytes: Trainable part of `parameter_bytes`.
        shared: Bytes, by name, of parameters that other layers use too.
        input_bytes: Input tensors.
        output_bytes: Output tensors; sent if the next layer is on another stage.
        gradient_output_bytes: Gradients of the outputs; received if the next layer is on another
            stage.
        saved_bytes: Tensors saved for backward, except inputs and outputs.
        workspace_bytes: Temporary memory of forward or backward beyond saved tensors.
        update_bytes: Temporary memory of the optimizer, if it steps one parameter after the other.
        forward: Seconds of forward on each kind of device; empty where not measured.
        backward: Seconds of backward on each kind of device; empty where not measured.
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
        for size in _SIZE_FIELDS:
            whole_number(size, getattr(self, size), f"{size}=0", least=0)

    @property
    def all_parameter_bytes(self) -> int:
        """Bytes of all parameters that the layer uses, shared ones included."""
        return self.parameter_bytes + sum(self.shared.values())


class StepCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of a step besides its layers.

    A tuple has one entry per kind of device, or none if it was not measured.

    Attributes:
        loss: Seconds of the loss of one micro-batch, forward and backward.
        loss_bytes: Temporary memory of the loss of one micro-batch, with a copy of the output.
        message: Compute seconds that a stage loses by sending or receiving one message.
        run_overhead_seconds: Extra seconds, forward and backward, of a layer that has an autograd
            graph of its own. Such a layer is a "run" of one layer, see `stage.stage`. The times in
            `LayerProfile` leave them out, since they are for layers within a longer run.
        update: Seconds of the optimizer per byte of gradient.
        state_bytes_per_parameter_byte: Optimizer state per byte of parameter.
        update_bytes_per_byte: Temporary memory of the optimizer, per byte of gradient, if it steps
            all parameters at once.
        gradient_copies: 2 if the previous step's gradients are still held while new ones are
            computed (accumulation over batches), else 1.
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
    """All measurements of a run: everything that a planner needs.

    Attributes:
        layers: Costs of every layer, in order.
        step: Costs of a step besides the layers.
        cluster: The devices and their links.
        microbatches: Number of micro-batches of a batch.
        host_memory: For each host, the bytes that its ranks may hold together. Only ranks on the
            CPU without a memory limit of their own count.
    """

    layers: tuple[LayerProfile, ...]
    step: StepCosts
    cluster: Cluster
    microbatches: int
    host_memory: dict[str, int] = field(default_factory=dict)
