"""Steps of validation, test and prediction, and calls of the pipelined module outside of steps.

All ranks run the user's code, and calls of the pipelined module go through the pipeline. If that is
not possible, each rank gets the whole model for the rest of the evaluation (see `whole_model`). All
ranks come to this decision by themselves, from the same calls. So it takes nothing but what they
all see: the arguments of a call, and the use of a layer's weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_dlres.core.errors import ConfigError, UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree, flatten
from lightning_dlres.pipeline.capture.block_calls import has_collectors
from lightning_dlres.pipeline.stage.microbatch import microbatch_sizes, samples_in
from lightning_dlres.strategies.hetero_pipe.evaluation.whole_model import Evaluation, WholeModel
from lightning_dlres.strategies.hetero_pipe.step.parameter_guard import (
    VALUE_FREE_OPERATIONS,
    PipelinedWeightGuard,
)
from lightning_dlres.strategies.hetero_pipe.step.pipelined_module import PipelinedModule
from lightning_dlres.strategies.hetero_pipe.step.step_context import StepContext

# Forms of arguments that are kept, the newest ones. A text among them may differ in every call.
_MAX_FORMS = 64
# Place of user code, for errors.
_CALL = "at a call of the pipelined module in evaluation"


class Forward(Protocol):
    """Runs the pipelined module, or one layer, over the stages; see `StepRunner.forward`."""

    def __call__(
        self, inputs: Tree, layer: int | None = None, fingerprint: int | None = None
    ) -> Tree: ...


class Evaluator:
    """Runner of what is no training step, on one rank.

    Args:
        context: Context of the user's steps.
        whole: The whole model on this rank.
        evaluation: Place of evaluation, as chosen by the user.
        any_rank: Returns on all ranks whether a flag is set on any.
        meet: Waits until all ranks are at the same place of user code, which it gets by name; an
            error if they are not.
        microbatches: Micro-batches of a batch.
    """

    def __init__(
        self,
        context: StepContext,
        whole: WholeModel,
        evaluation: Evaluation,
        any_rank: Callable[[bool], bool],
        meet: Callable[[str], None],
        microbatches: int,
    ) -> None:
        self._context, self.whole, self._evaluation = context, whole, evaluation
        self._any_rank, self._meet, self._microbatches = any_rank, meet, microbatches
        self._guard: _EvaluationGuard | None = None
        # Forms of arguments for which the captured module was found able to run, or not.
        self._forms: dict[object, bool] = {}
        self._has_warned = False
        # True while layers or a trial run within the user's step.
        self.is_own_code = False

    def run(
        self, hook: Callable[..., Any], args: tuple[Any, ...], forward: Forward, fingerprint: int
    ) -> Any:
        """Run a validation, test or predict step; called by all ranks.

        Args:
            hook: Bound method of the LightningModule, such as `validation_step`.
            args: Arguments of the hook.
            forward: Runs the pipelined module over the stages.
            fingerprint: Digest of the batch.
        """
        context, whole = self._context, self.whole
        if self._evaluation == "whole" and not whole.hold("evaluation='whole' asks for it."):
            raise ConfigError(
                "evaluation must be 'stages' for a model that does not fit in the memory of each "
                "rank, or whose last run has failed, got 'whole'. Use 'stages', raise "
                "memory_limit, or load a checkpoint into a new model."
            )
        # Torch leaves this way of its own where a guard watches operations.
        self._hold_for_padding()
        try:
            return self._run(hook, args, forward, fingerprint)
        finally:
            # Hooks at the end of an evaluation, such as one that sets averaged weights back, find
            # the weights as they were at its start.
            if _is_last_batch(context.module.trainer):
                whole.release(may_keep=True)

    def _run(
        self, hook: Callable[..., Any], args: tuple[Any, ...], forward: Forward, fingerprint: int
    ) -> Any:
        context = self._context
        if self.whole.is_held:
            with context.precision():
                return hook(*args)

        def answer(inputs: Tree, layer: int | None = None) -> Tree:
            return self.answer(inputs, layer, forward=forward, fingerprint=fingerprint)

        intercepted = context.pipelined.intercepted(answer, self.runs_here)
        self._guard = _EvaluationGuard(self)
        try:
            with context.precision(), self._guard, intercepted:
                return hook(*args)
        finally:
            self._guard = None

    def answer(
        self,
        inputs: Tree,
        layer: int | None = None,
        *,
        forward: Forward,
        fingerprint: int | None = None,
    ) -> Tree:
        """Return the output of a call of the pipelined module, or of a layer; called by all ranks.

        Args:
            inputs: Inputs of the call, the same on all ranks.
            layer: Layer that is called; None for the pipelined module.
            forward: Runs the call over the stages.
            fingerprint: Digest of the batch; None outside of a step.
        """
        if self.runs_here(inputs):
            return self._context.pipelined.run_here(inputs, layer)
        with self._own_code():
            return forward(inputs, layer, fingerprint)

    def runs_here(self, inputs: Any) -> bool:
        """Return whether each rank runs a call itself, and get the whole model for it if needed.

        Raises:
            UnsupportedStepError: If the call needs the whole model, which a rank cannot hold, and
                would else give other results without a word.
        """
        if self.whole.is_held:
            return True
        if self._collects():
            if self._meet_and_hold(_CALL, "Hooks of transformers collect what the layers return."):
                return True
            raise UnsupportedStepError(
                "Evaluation over stages must not collect hidden states of layers, got hooks that "
                "do. Call the model with output_hidden_states=False, or use evaluation='whole'."
            )
        # A step has asked at its beginning.
        if self._guard is None and self._hold_for_padding(inputs):
            return True
        with self._own_code():
            reason = self._reason_against(inputs)
        return reason is not None and self._meet_and_hold(_CALL, reason)

    @contextmanager
    def _own_code(self) -> Iterator[None]:
        before, self.is_own_code = self.is_own_code, True
        try:
            yield
        finally:
            self.is_own_code = before
            if self._guard is not None:
                self._guard.note_tensors()

    def before_use(self) -> None:
        """Get the whole model before evaluation uses a layer's weight itself, where possible."""
        self._meet_and_hold(
            "at the use of a layer's weight in evaluation",
            "Evaluation uses a weight of a layer outside of the pipelined module.",
        )

    def _meet_and_hold(self, place: str, reason: str) -> bool:
        """Get the whole model at a place of user code that ranks may reach alone by mistake."""
        if self._evaluation != "stages" and self.whole.is_possible:
            self._meet(place)
        return self._hold(reason)

    def _hold_for_padding(self, inputs: Any = None) -> bool:
        """Get the whole model if torch treats padding in a way of its own in evaluation.

        Args:
            inputs: Inputs of a call of the pipelined module outside of steps; None for a step.

        Raises:
            UnsupportedStepError: If an encoder has begun on batches with padding without it.
        """
        encoders = list(filter(_zeroes_padding, self._context.module.modules()))
        if not encoders:
            return False
        if inputs is not None and any(map(self._is_around, encoders)):
            if _has_padding(inputs):
                raise UnsupportedStepError(
                    "nn.TransformerEncoder must not be called with padding outside of "
                    "validation_step, test_step and predict_step, got such a call. Make it with "
                    "enable_nested_tensor=False."
                )
            return False
        reason = "nn.TransformerEncoder sets padded positions to 0 in evaluation."
        if self._hold(reason) if inputs is None else self._meet_and_hold(_CALL, reason):
            return True
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"{reason} This evaluation over stages does not. If batches have padding, make the "
                "encoder with enable_nested_tensor=False, for which both are alike."
            )
        return False

    def _is_around(self, encoder: nn.Module) -> bool:
        pipelined = self._context.pipelined
        return isinstance(pipelined, PipelinedModule) and (
            encoder is not pipelined.module and pipelined.module in set(encoder.modules())
        )

    def _hold(self, reason: str) -> bool:
        return self._evaluation != "stages" and self.whole.hold(reason)

    def _collects(self) -> bool:
        """Return whether layers have hooks whose states the code around them would miss."""
        pipelined = self._context.pipelined
        # The code of a captured module runs on every stage, and collects there.
        if isinstance(pipelined, PipelinedModule) and pipelined.captured is not None:
            return False
        return any(map(has_collectors, pipelined.layers.modules))

    def _reason_against(self, inputs: Any) -> str | None:
        """Return why a call cannot run over the stages, as a sentence; None if it can."""
        try:
            flatten(inputs)
        except ConfigError as error:
            sentence, _, _ = str(error).partition(". ")
            return f"{sentence.rstrip('.')}."
        captured = self._context.pipelined.captured
        if captured is None or captured.is_step:
            return None
        samples = samples_in(inputs) or 1
        sizes = microbatch_sizes(samples, self._microbatches)
        form = captured.form(inputs, sizes)
        if form not in self._forms:
            # Tensors of a stage decide on it, so the ranks must agree.
            self._meet(_CALL)
            self._forms[form] = not self._any_rank(not captured.accepts(inputs, sizes))
            if len(self._forms) > _MAX_FORMS:
                self._forms.pop(next(iter(self._forms)))
        if self._forms[form]:
            return None
        return f"The forward of {type(captured.module).__name__} cannot be cut for its arguments."


class _EvaluationGuard(PipelinedWeightGuard):
    """Guard that gets the whole model before user code uses a tensor of a layer, on all ranks.

    Args:
        evaluator: Evaluator of the step.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        context = evaluator._context
        super().__init__(context.layer_tensors, context.module)
        self._evaluator = evaluator
        self._layers = context.pipelined.layers
        # By their ids. Tensors that layers have replaced stay, since user code may hold them.
        self._of_layers: dict[int, Tensor] = {}
        self.note_tensors()
        # A remote buffer is another tensor than the one that takes its place.
        self._buffers = {
            id(buffer): (module, name)
            for layer in context.pipelined.layers.modules
            for module in layer.modules()
            for name, buffer in module.named_buffers(recurse=False)
        }

    def note_tensors(self) -> None:
        """Take in the tensors of the layers, after layers may have replaced buffers."""
        outside = {
            id(t)
            for _, module in self._layers.non_pipelined_modules()
            for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        }
        for layer in self._layers.modules:
            for tensor in (*layer.parameters(), *layer.buffers()):
                if id(tensor) not in outside:
                    self._of_layers[id(tensor)] = tensor

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        whole, kwargs = self._evaluator.whole, kwargs or {}
        if not self._evaluator.is_own_code and not whole.is_held:
            name = getattr(function, "__name__", "?")
            operands = (*args, *kwargs.values())
            if name not in VALUE_FREE_OPERATIONS and self._uses_layers(operands):
                self._evaluator.before_use()
                if whole.is_held:
                    args = tuple(map(self._present, args))
                    kwargs = {key: self._present(value) for key, value in kwargs.items()}
        if whole.is_held:
            return function(*args, **kwargs)
        return super().__torch_function__(function, types, args, kwargs)

    def _present(self, value: Any) -> Any:
        """Return an operand with the present buffers in the place of remote ones."""
        if isinstance(value, Tensor) and id(value) in self._buffers:
            module, name = self._buffers[id(value)]
            return getattr(module, name, value)
        if type(value) in (list, tuple):
            return type(value)(map(self._present, value))
        return value

    def _uses_layers(self, operands: Iterable[Any]) -> bool:
        return any(
            id(value) in self._of_layers
            if isinstance(value, Tensor)
            else isinstance(value, list | tuple) and self._uses_layers(value)
            for value in operands
        )


def _is_last_batch(trainer: Trainer) -> bool:
    """Return whether the step that runs now is the last of the evaluation."""
    loops: dict[RunningStage | None, Any] = {
        RunningStage.SANITY_CHECKING: trainer.fit_loop.epoch_loop.val_loop,
        RunningStage.VALIDATING: trainer.validate_loop,
        RunningStage.TESTING: trainer.test_loop,
        RunningStage.PREDICTING: trainer.predict_loop,
    }
    is_in_fit = trainer.state.fn == TrainerFn.FITTING
    loop = loops.get(RunningStage.SANITY_CHECKING if is_in_fit else trainer.state.stage)
    return loop is not None and bool(loop.batch_progress.is_last_batch)


def _zeroes_padding(module: nn.Module) -> bool:
    """Return whether a module may compute with nested tensors, which leave padding out."""
    return (
        isinstance(module, nn.TransformerEncoder)
        and not module.training
        and not torch.is_grad_enabled()
        and bool(getattr(module, "use_nested_tensor", False))
    )


def _has_padding(inputs: Any) -> bool:
    """Return whether an encoder has given padding to its first layer.

    A rank that holds its layers has put the samples into a nested tensor, without padding.
    """
    values = [inputs]
    for value in values:
        if isinstance(value, Tensor):
            if value.is_nested:
                return True
        elif isinstance(value, Mapping):
            if isinstance(value.get("src_key_padding_mask"), Tensor):
                return True
            values += value.values()
        elif isinstance(value, list | tuple):
            values += value
    return False
