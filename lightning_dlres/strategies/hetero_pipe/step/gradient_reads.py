"""A warning where user code reads the gradients of all parameters, as norms and clipping in hooks
do: a rank has those of its stage only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from lightning_dlres.pipeline.stage.remote_parameters import set_gradient_read_hook

# They read gradients for the code that calls them.
_TOOLS = ("torch.nn.utils", "torch.utils", "lightning.pytorch.utilities")
_LIBRARIES = ("torch.", "lightning.", "lightning_dlres.")
_CLIPPING = "configure_gradient_clipping"


@contextmanager
def gradient_reads_noticed(
    module: LightningModule, optimizers: Sequence[Optimizer], warn: Callable[[str], None]
) -> Iterator[None]:
    """Context manager that warns once where user code reads the gradient of another stage's
    parameter. The optimizer may do so; it skips parameters without a gradient."""

    def notice() -> None:
        place = _place_in_user_code(sys._getframe(2))
        if place is None:
            return
        undo.close()
        warn(
            f"dlres: {place} reads gradients of parameters that other stages hold, which are None "
            "on this rank. A norm that is computed or logged there is that of one stage, and "
            "clip_grad_norm_ clips each stage by its own. Clip with Trainer(gradient_clip_val=...)."
        )

    def clip(*args: Any, **kwargs: Any) -> Any:
        result = clip_as_before(*args, **kwargs)
        # The last that runs before the optimizer, which may be a class of the user's.
        set_gradient_read_hook(None)
        return result

    own, clip_as_before = vars(module).get(_CLIPPING), getattr(module, _CLIPPING)
    with ExitStack() as undo:
        vars(module)[_CLIPPING] = clip
        undo.callback(_put_back, module, own)
        for optimizer in optimizers:
            handle = optimizer.register_step_post_hook(lambda *_: set_gradient_read_hook(notice))
            undo.callback(handle.remove)
        undo.callback(set_gradient_read_hook, None)
        set_gradient_read_hook(notice)
        yield


def _put_back(module: LightningModule, own: Any) -> None:
    vars(module).pop(_CLIPPING, None)
    if own is not None:
        vars(module)[_CLIPPING] = own


def _place_in_user_code(frame: FrameType | None) -> str | None:
    """Return file and line of user code that reads a gradient; None if a library does, for
    itself."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(_TOOLS):
            if name.startswith(_LIBRARIES):
                return None
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None
