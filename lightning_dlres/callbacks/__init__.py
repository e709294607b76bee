"""Callbacks for any Trainer: one line each, and training does the same with and without them."""

from lightning_dlres.callbacks.activation_offload import ActivationOffload
from lightning_dlres.callbacks.resource_report import ResourceReport

__all__ = ["ActivationOffload", "ResourceReport"]
