"""User code that reads or changes gradients.

A hook that computes a norm or clips gradients reads those of all parameters. A rank has only the
gradients of its own stage, so such a hook gets the result of one stage, and the user a warning.
`training_step` may read the gradients of earlier batches, but not change what later code uses.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.pipeline.stage.remote_parameters import set_gradient_read_hook
from lightning_dlres.strategies.hetero_pipe.replay.user_state.user_objects import same_tensors

# Beginnings of the names of modules whose functions read gradients for their caller, such as
# `clip_grad_norm_`. The warning names the caller.
_HELPER_MODULES = ("torch.nn.utils", "torch.utils", "lightning.pytorch.utilities")
# Beginnings of the names of modules that may read gradients without a warning, such as optimizers.
_LIBRARIES = ("torch.", "lightning.", "lightning_dlres.")
_CLIPPING_HOOK = "configure_gradient_clipping"
_PACKAGE = "lightning_dlres."


class GradientsOfEarlierBatches:
    """The gradients of earlier batches, as `training_step` sees them.

    They are dropped when a step begins, if Lightning would zero them before any other code could
    use them; `gradient_zeroing` says why. Once `training_step` reads one, they are kept.

    It may change them only if they are zeroed next. Otherwise only the rank that runs the code
    would have the change, and it would change them in every run.

    Args:
        module: The LightningModule.

    Attributes:
        are_zeroed: Returns True if they are zeroed next, before other code could use them.
        give_back: Called before a read or change, to put them in the place of the sums of this
            step; None if they are in their place.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.are_zeroed: Callable[[], bool] = lambda: False
        self.give_back: Callable[[], None] | None = None
        self._are_read = self._were_dropped = self._has_trained = False
        # By id(parameter): gradients that this run may have changed, and their elements before.
        self._seen: dict[int, tuple[nn.Parameter, Tensor | None, Tensor | None]] = {}
        # The id of each parameter of the module; None before the first access in this run.
        self._own: set[int] | None = None

    def begin_step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Drop the gradients of these parameters, if no code will use them."""
        drops = self.are_zeroed() and not self._are_read
        if drops:
            for parameter in parameters:
                parameter.grad = None
        self._were_dropped = drops and self._has_trained
        self._has_trained = True

    def before_access(self, tensor: Tensor, operation: str, value: Tensor | None) -> None:
        """Prepare for an access to a tensor's `.grad` in `training_step`.

        Args:
            tensor: The tensor.
            operation: "__get__", "__set__" or "__delete__".
            value: The new gradient; None for the other operations.

        Raises:
            UnsupportedStepError: If it replaces a gradient that later code may use.
        """
        if self.give_back is not None:
            self.give_back()
        if self._own is None:
            self._own = set(map(id, self._module.parameters()))
        if not isinstance(tensor, nn.Parameter) or id(tensor) not in self._own:
            return
        is_read = operation == "__get__"
        if is_read and not self._are_read:
            self._note_read()
        if self.are_zeroed():
            return
        if is_read:
            self._watch(tensor)
        elif tensor.grad is not value:
            raise self._error(tensor)

    def before_backward(self) -> None:
        """Prepare for a backward in `training_step`, which may add to any gradient."""
        if self.give_back is not None:
            self.give_back()
        if not self.are_zeroed():
            for parameter in self._module.parameters():
                if parameter.requires_grad:
                    self._watch(parameter)

    def refuse_changes(self) -> None:
        """Check that the gradients which may have changed since the last call are unchanged.

        Raises:
            UnsupportedStepError: If one has changed.
        """
        seen, self._seen, self._own = self._seen, {}, None
        for parameter, gradient, before in seen.values():
            is_same = parameter.grad is gradient
            if gradient is not None and before is not None:
                is_same = is_same and same_tensors(gradient, before)
            if not is_same:
                raise self._error(parameter)

    def _watch(self, parameter: nn.Parameter) -> None:
        """Note a gradient as it is."""
        if id(parameter) not in self._seen:
            gradient = parameter.grad
            before = None if gradient is None else gradient.clone()
            self._seen[id(parameter)] = (parameter, gradient, before)

    def _note_read(self) -> None:
        """Keep gradients from the next step on, if user code reads one, and not a library."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and str(frame.f_globals.get("__name__")).startswith(_PACKAGE):
            frame = frame.f_back
        place = _place_in_user_code(frame)
        if place is None:
            return
        self._are_read = True
        if self._were_dropped:
            warnings.warn(
                f"dlres: {place} reads a gradient of the step before within training_step. This "
                "step has dropped it, so the result is None. It is kept from the next step on.",
                stacklevel=2,
            )

    def _error(self, parameter: nn.Parameter) -> UnsupportedStepError:
        names = {id(p): name for name, p in self._module.named_parameters()}
        return UnsupportedStepError(
            "training_step must not change gradients that are accumulated, got another gradient of "
            f"{names[id(parameter)]!r}. Change gradients in on_after_backward or "
            "on_before_optimizer_step."
        )


@contextmanager
def gradient_read_warning(
    module: LightningModule, optimizers: Sequence[Optimizer], warn: Callable[[str], None]
) -> Iterator[None]:
    """Context manager that warns once if user code reads the gradient of another stage's parameter.

    Reads are watched until `configure_gradient_clipping` has run, and again after each optimizer
    step. In between the optimizer itself may read these gradients: it skips parameters without one.

    Args:
        module: The LightningModule, whose hook for clipping is wrapped.
        optimizers: The optimizers.
        warn: Shows a warning to the user.
    """

    def on_read() -> None:
        # Frame 0 is this function. Frame 1 is the descriptor that `set_gradient_read_hook`
        # installs.
        place = _place_in_user_code(sys._getframe(2))
        if place is None:
            return
        undo.close()
        warn(
            f"dlres: {place} reads gradients of parameters that other stages hold, which are None "
            "on this rank. A norm that this code computes or logs is the norm of one stage, and "
            "clip_grad_norm_ clips each stage by its own norm. Clip with "
            "Trainer(gradient_clip_val=...)."
        )

    def clip(*args: Any, **kwargs: Any) -> Any:
        result = original_clip(*args, **kwargs)
        # The optimizer runs next. Its class may be the user's, but its reads are harmless.
        set_gradient_read_hook(None)
        return result

    instance_hook, original_clip = (
        vars(module).get(_CLIPPING_HOOK),
        getattr(module, _CLIPPING_HOOK),
    )
    with ExitStack() as undo:
        vars(module)[_CLIPPING_HOOK] = clip
        undo.callback(_restore_clipping_hook, module, instance_hook)
        for optimizer in optimizers:
            handle = optimizer.register_step_post_hook(lambda *_: set_gradient_read_hook(on_read))
            undo.callback(handle.remove)
        undo.callback(set_gradient_read_hook, None)
        set_gradient_read_hook(on_read)
        yield


def _restore_clipping_hook(module: LightningModule, instance_hook: Any) -> None:
    vars(module).pop(_CLIPPING_HOOK, None)
    if instance_hook is not None:
        vars(module)[_CLIPPING_HOOK] = instance_hook


def _place_in_user_code(frame: FrameType | None) -> str | None:
    """Return "file:line" of the user code that reads a gradient; None if a library reads it for
    purposes of its own.

    Args:
        frame: Frame that reads the gradient. Frames of `_HELPER_MODULES` are skipped.
    """
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(_HELPER_MODULES):
            if name.startswith(_LIBRARIES):
                return None
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None
