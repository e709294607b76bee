"""Names of the parameters whose gradients the hook synchronises."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.gradsync.execute.session import spec_of
from lightning_dlres.gradsync.plan.units import GradientSpec


class ParameterNames:
    """Map from parameters to their names.

    Attributes:
        specs: Names and sizes of the gradients that a plan covers.
        sparse: Parameters with sparse gradients, which torch's all-reduce averages.
    """

    def __init__(self) -> None:
        self._names: dict[Tensor, str] = {}
        # Parameters whose gradients backward has accumulated since the last mean.
        self._used: set[Tensor] = set()
        self._handles: list[RemovableHandle] = []
        self.specs: list[GradientSpec] = []
        self.sparse: set[Tensor] = set()

    def __repr__(self) -> str:
        """Return a short text that differs if names, sizes or their order differ."""
        text = repr([(spec.name, spec.count) for spec in self.specs])
        return f"{len(self.specs)} names with the checksum {zlib.crc32(text.encode()):08x}"

    def add(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        sparse: Collection[Tensor],
        *,
        is_late: bool,
    ) -> None:
        """Add names; see `GradientSyncState.name_parameters`.

        Args:
            parameters: Names and parameters.
            sparse: Parameters with sparse gradients.
            is_late: True if new parameters come too late, because the plan is made.

        Raises:
            ConfigError: If two parameters have one name, or a new one is late.
        """
        self.sparse |= set(sparse)
        for name, parameter in parameters:
            # A shared parameter, or one of an earlier call, has a name already: skip it.
            if not parameter.requires_grad or parameter in self._names:
                continue
            if is_late or name in self._names.values():
                rule = "those of one module, named before the first step"
                raise ConfigError(got_expected("parameters", name, rule, "a state for each module"))
            self._add(parameter, name)
            if parameter not in self.sparse:
                self.specs.append(spec_of(name, parameter))

    def add_unnamed(self, parameters: Iterable[Tensor]) -> None:
        """Add parameters for which the user gave no names; they get numbers."""
        self.specs += [spec_of(self._of(parameter), parameter) for parameter in parameters]

    def memory_orders(self) -> dict[str, list[int]] | None:
        """Return the dimensions, in the order of memory, of each parameter that is not contiguous;
        None while no parameters are known.

        Codecs see gradients in the order of memory, so residuals are in that order, too.
        """
        if not self.specs:
            return None
        return {
            name: sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
            for parameter, name in self._names.items()
            if not parameter.is_contiguous()
        }

    def of(self, parameters: Iterable[Tensor]) -> Sequence[str]:
        """Return the names of parameters. If no parameter was added before, they get numbers.

        Raises:
            ConfigError: If other parameters were added before, so the plan does not cover these.
        """
        parameters = list(parameters)
        for parameter in parameters if self.specs else ():
            if parameter not in self._names:
                raise ConfigError(
                    "parameters must name all parameters of the module, got no name for one of "
                    f"shape {tuple(parameter.shape)}. Use parameters=module.named_parameters()."
                )
        return [self._of(parameter) for parameter in parameters]

    def known(self, parameters: Iterable[Tensor]) -> set[str]:
        """Return the names of those parameters that have one."""
        return {self._names[parameter] for parameter in parameters if parameter in self._names}

    def unused(self, parameters: Iterable[Tensor], *, is_last: bool) -> set[str]:
        """Return the names of parameters that no backward has used since the last mean.

        Their buckets hold the gradients of earlier backwards, which may not be zero.

        Args:
            parameters: Parameters of a bucket.
            is_last: True for the last bucket of a mean.
        """
        names = {self._of(parameter) for parameter in parameters if parameter not in self._used}
        if is_last:
            self._used.clear()
        return names

    def close(self) -> None:
        """Remove the hooks of the parameters."""
        while self._handles:
            self._handles.pop().remove()

    def _of(self, parameter: Tensor) -> str:
        if parameter not in self._names:
            self._add(parameter, f"parameter {len(self._names)}")
        return self._names[parameter]

    def _add(self, parameter: Tensor, name: str) -> None:
        self._names[parameter] = name
        # Called before DistributedDataParallel takes the gradient.
        handle = parameter.register_post_accumulate_grad_hook(self._used.add)
        self._handles.append(handle)


def sparse_parameters(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module's embeddings with `sparse=True`.

    DistributedDataParallel gives each of them a bucket of its own.
    """
    embeddings = [m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    return [embedding.weight for embedding in embeddings if embedding.sparse]
