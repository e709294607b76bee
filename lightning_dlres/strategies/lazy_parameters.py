"""Refusal of a LightningModule with lazy modules, such as `nn.LazyLinear`, that have seen no batch.

On a single device Lightning trains them: their first call makes the parameters. Several ranks must
agree on sizes and initial values before the first step.
"""

from __future__ import annotations

from itertools import chain

from lightning.pytorch import LightningModule
from torch.nn.parameter import is_lazy

from lightning_dlres.core.errors import ConfigError


def refuse_lazy_parameters(module: LightningModule) -> None:
    """Raise if a parameter or buffer has no shape yet.

    Raises:
        ConfigError: If one has none.
    """
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            owner = type(module.get_submodule(name.rpartition(".")[0])).__name__
            raise ConfigError(
                f"the parameters of {type(module).__name__} must have their shapes before training,"
                f" got {name!r} of a {owner} without one. Call the model on a sample in its "
                "__init__ or in configure_model."
            )
