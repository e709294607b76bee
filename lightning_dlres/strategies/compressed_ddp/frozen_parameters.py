"""Parameters that need no gradient when DistributedDataParallel is made, and must not need one
later in the Trainer's fit."""

from __future__ import annotations

from torch import nn

from lightning_dlres.core.errors import UnsupportedStepError


class FrozenParameters:
    """Parameters of a module that need no gradient when this object is made.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._frozen = {n: p for n, p in module.named_parameters() if not p.requires_grad}

    def require_frozen(self) -> None:
        """Raise if a parameter was unfrozen.

        Its gradients would not be synchronised, and the ranks would diverge without an error.

        Raises:
            UnsupportedStepError: If a parameter needs a gradient now.
        """
        unfrozen = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if unfrozen:
            raise UnsupportedStepError(
                f"parameters must keep requires_grad during fit, got {unfrozen[:3]} unfrozen. Call "
                "fit once for each phase, and unfreeze them before it."
            )
