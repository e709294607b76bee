"""Callbacks for any Trainer. Training computes the same results with and without them."""

from lightning_dlres.callbacks.activation_offload import ActivationOffload
from lightning_dlres.callbacks.parameter_mirror import ParameterMirror
from lightning_dlres.callbacks.resource_report import ResourceReport

__all__ = ["ActivationOffload", "ParameterMirror", "ResourceReport"]
