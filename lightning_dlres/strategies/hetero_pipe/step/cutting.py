"""Cutting of the pipelined module, or of the training step, on the first samples."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_dlres._compat import compiled_names
from lightning_dlres.core import rng
from lightning_dlres.core.errors import ConfigError, DlresError, UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree, map_tensors
from lightning_dlres.pipeline.capture.captured import CapturedModule
from lightning_dlres.pipeline.capture.tracing.coupling import (
    coupling,
    may_mix_at_end,
    mixed_end,
)
from lightning_dlres.pipeline.execute.runtime import SKIPPED
from lightning_dlres.pipeline.profile.config import ProfileSamples
from lightning_dlres.pipeline.stage.layer_errors import explaining_single_samples
from lightning_dlres.pipeline.stage.microbatch import samples_in
from lightning_dlres.strategies.hetero_pipe.calls.needs_cut import NeedsCutStepError
from lightning_dlres.strategies.hetero_pipe.step.forward_replacement import original_forward
from lightning_dlres.strategies.hetero_pipe.step.step_context import Pipelined, StepContext
from lightning_dlres.strategies.hetero_pipe.step.user_step import (
    LightningStep,
    opened_between_layers,
)


class SkippedSamplesError(DlresError):
    """Error of samples for which `training_step` returns None before the module's call."""


def cut_on_samples(context: StepContext, samples: ProfileSamples) -> Pipelined:
    """Return the context's pipelined module cut into layers, if it has none of its own.

    Args:
        context: Context of the user's steps.
        samples: The first samples.

    Raises:
        UnsupportedStepError: If the code cannot be cut. The user's code may raise anything else.
    """
    pipelined, step = context.pipelined, partial(opened_between_layers, context)
    context.rewind_random_state = rng.rewinder(context.device)
    inputs: Tree = (context.trial_args(samples.batches[0]), {})
    if not pipelined.is_step:
        inputs = samples.inputs[0]
    _refuse_compiled(context)
    inputs = _at_home(context, inputs)
    with explaining_single_samples(samples_in(inputs) == 1):
        cut = pipelined.captured_on(
            context.module, inputs, step, is_whole=samples.microbatches == 1
        )
    if pipelined.is_step and samples.microbatches > 1 and cut.captured is not None:
        batch = _at_home(context, (context.trial_args(samples.whole_batch), {}))
        reason = coupling(cut.captured, batch)
        if reason:
            raise UnsupportedStepError(
                f"{type(context.module).__name__}.training_step must treat each sample alone "
                f"between its submodules, where it runs on micro-batches, but {reason}. Move the "
                "code before the first call or after the last one, or use microbatches=1."
            )
    elif samples.microbatches > 1 and cut.captured is not None:
        _refuse_mixed_end(context, cut.module, cut.captured, samples)
    return cut


def bytes_with_whole_batches(context: StepContext, samples: ProfileSamples) -> int:
    """Return the parameter bytes of the layers that there are with one micro-batch per batch.

    Args:
        context: Context of the user's steps.
        samples: The first samples. 0 is returned if they are the only micro-batch, and if there are
            not several layers.
    """
    if samples.microbatches == 1:
        return 0
    try:
        batch = samples.whole_batch
        inputs = [] if context.pipelined.is_step else [module_inputs(context, batch)]
        whole = replace(samples, microbatches=1, batches=[batch], inputs=inputs)
        layers = cut_on_samples(context, whole).layers
        return sum(layers.parameter_bytes()) if len(layers.modules) > 1 else 0
    except Exception:
        # The user's code may raise anything.
        return 0


def _refuse_mixed_end(
    context: StepContext, module: nn.Module, captured: CapturedModule, samples: ProfileSamples
) -> None:
    """Raise if a module's code after its last layer does not fit what micro-batches went through.

    A model without values is not looked at.
    """
    if any(p.is_meta for p in module.parameters()) or not may_mix_at_end(captured):
        return
    inputs = _at_home(context, module_inputs(context, samples.whole_batch))
    with original_forward([module], "forward"):
        reason = mixed_end(captured, inputs)
    if reason:
        raise UnsupportedStepError(
            f"The forward of {type(module).__name__} must treat each sample alone up to its last "
            "submodule, where it runs on micro-batches, or not mix samples after it, but "
            f"{reason}. Move that code to training_step, or use microbatches=1."
        )


def _refuse_compiled(context: StepContext) -> None:
    """Raise if the code that is to be cut calls a compiled module, which hides its code."""
    pipelined = context.pipelined
    scope, path = (context.module, "") if pipelined.is_step else (pipelined.module, pipelined.path)
    # A LightningModule that was compiled as a whole is cut like another one.
    names = [".".join(filter(None, (path, name))) for name in compiled_names(scope)]
    compiled = [name for name in names if name]
    if compiled:
        raise UnsupportedStepError(
            f"{type(context.module).__name__}.{compiled[0]} must not be compiled where the code "
            "around it is cut, got a module that torch.compile has compiled. Leave it uncompiled, "
            "or put compiled layers into one nn.Sequential, which is cut between them."
        )


def _at_home(context: StepContext, tree: Tree) -> Tree:
    """Return a tree on the device of the pipelined module."""
    homes = {p.device for p in context.pipelined.module.parameters() if not p.is_meta}
    if len(homes) != 1:
        return tree
    home = homes.pop()
    return map_tensors(lambda tensor: tensor.to(home), tree)


def with_inputs(context: StepContext, samples: ProfileSamples) -> ProfileSamples:
    """Return samples with the inputs of the first layer, after a step has been cut."""
    if samples.inputs:
        return samples
    rewind_random_state = rng.rewinder(context.device)
    try:
        return replace(samples, inputs=[module_inputs(context, b) for b in samples.batches])
    finally:
        rewind_random_state()


def module_inputs(context: StepContext, batch: Any) -> Tree:
    """Return the inputs of the pipelined module for a batch.

    Raises:
        SkippedSamplesError: If `training_step` skips the batch.
        NeedsCutStepError: If the inputs are no data.
    """
    step = LightningStep(context, context.trial_args(batch), keeps_batch=True, is_trial=True)
    try:
        # The code before the call may run a backward of its own.
        with torch.enable_grad():
            inputs = step.module_inputs()
    except ConfigError as error:
        # Layers of transformers take a cache, which the code of the model around them makes.
        raise NeedsCutStepError.instead_of(error) from None
    if inputs is SKIPPED:
        raise SkippedSamplesError("training_step returned None for the first samples")
    return map_tensors(lambda t: t if t.grad_fn is None else t.detach(), inputs)
