"""Warning about user code that reads the gradients of all parameters.

Examples are hooks that compute norms or clip gradients. A rank has only the gradients of its own
stage, so such a hook gets the result of one stage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from lightning_dlres.pipeline.stage.remote_parameters import set_gradient_read_hook

# Beginnings of the names of modules whose functions read gradients for their caller, such as
# `clip_grad_norm_`. The warning names the caller.
_HELPER_MODULES = ("torch.nn.utils", "torch.utils", "lightning.pytorch.utilities")
# Beginnings of the names of modules that may read gradients without a warning, such as optimizers.
_LIBRARIES = ("torch.", "lightning.", "lightning_dlres.")
_CLIPPING_HOOK = "configure_gradient_clipping"


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
