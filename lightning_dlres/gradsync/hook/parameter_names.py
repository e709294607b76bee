"""Names of the parameters whose gradients the hook synchronises."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.utils.hooks import RemovableHandle

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.gradsync.execute.session import flat_bounds, spec_of
from lightning_dlres.gradsync.plan.units import GradientSpec


@dataclass(frozen=True)
class BucketLayout:
    """Names and places of the gradients in a bucket, in the order of the bucket.

    Attributes:
        names: Names of the gradients.
        bounds: First element of each gradient in the buffer, and the end of its elements.
        ids: Identities of the parameters.
    """

    names: Sequence[str]
    bounds: Sequence[tuple[int, int]]
    ids: frozenset[int]

    def gradients(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return flat views of the gradients in a bucket's buffer by name; see `flat_bounds`."""
        return {
            name: buffer[start:stop]
            for name, (start, stop) in zip(self.names, self.bounds, strict=True)
        }


class ParameterNames:
    """Map from parameters to their names.

    Attributes:
        specs: Names and sizes of the gradients that a plan covers.
        sparse: Parameters with sparse gradients, which torch's all-reduce averages.
    """

    def __init__(self) -> None:
        # By identity: the hash of a tensor is a function in Python.
        self._names: dict[int, str] = {}
        self._parameters: list[Tensor] = []
        # DistributedDataParallel changes its buckets after the first step only.
        self._layouts: dict[tuple[int, ...], BucketLayout] = {}
        # Parameters whose gradients backward has accumulated since the last mean, by identity.
        self._used: set[int] = set()
        # Parameters with a hook that notes their use.
        self._watched: set[int] = set()
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
            if not parameter.requires_grad or id(parameter) in self._names:
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
            self._names[id(parameter)]: sorted(
                range(parameter.dim()), key=parameter.stride, reverse=True
            )
            for parameter in self._parameters
            if not parameter.is_contiguous()
        }

    def of(self, parameters: Iterable[Tensor]) -> Sequence[str]:
        """Return the names of parameters. If no parameter was added before, they get numbers.

        Raises:
            ConfigError: If other parameters were added before, so the plan does not cover these.
        """
        parameters = list(parameters)
        for parameter in parameters if self.specs else ():
            if id(parameter) not in self._names:
                raise ConfigError(
                    "parameters must name all parameters of the module, got no name for one of "
                    f"shape {tuple(parameter.shape)}. Use parameters=module.named_parameters()."
                )
        return [self._of(parameter) for parameter in parameters]

    def known(self, parameters: Iterable[Tensor]) -> set[str]:
        """Return the names of those parameters that have one."""
        ids = {id(parameter) for parameter in parameters}
        return {name for one, name in self._names.items() if one in ids}

    def layout_of(self, bucket: GradBucket) -> BucketLayout:
        """Return the layout of a bucket.

        Raises:
            ConfigError: As for `of`.
        """
        parameters = bucket.parameters()
        ids = tuple(map(id, parameters))
        layout = self._layouts.get(ids)
        if layout is None:
            layout = BucketLayout(self.of(parameters), flat_bounds(bucket), frozenset(ids))
            self._layouts[ids] = layout
        return layout

    def unused(self, layout: BucketLayout) -> set[str]:
        """Return the names of a bucket's parameters that no backward has used since the last mean.

        Their buckets hold the gradients of earlier backwards, which may not be zero.
        """
        ids = layout.ids - self._used
        return {self._names[one] for one in ids & self._watched} if ids else set()

    def end_mean(self) -> None:
        """Begin anew: later backwards use parameters for the next mean."""
        self._used.clear()

    def close(self) -> None:
        """Remove the hooks of the parameters."""
        while self._handles:
            self._handles.pop().remove()

    def _of(self, parameter: Tensor) -> str:
        if id(parameter) not in self._names:
            self._add(parameter, f"parameter {len(self._names)}")
        return self._names[id(parameter)]

    def _add(self, parameter: Tensor, name: str) -> None:
        self._names[id(parameter)] = name
        self._parameters.append(parameter)
        if not parameter.requires_grad:
            # Frozen after DistributedDataParallel was made. It counts as used.
            return
        self._watched.add(id(parameter))
        used = self._used
        # Called before DistributedDataParallel takes the gradient.
        handle = parameter.register_post_accumulate_grad_hook(lambda p: used.add(id(p)))
        self._handles.append(handle)


def sparse_parameters(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module's embeddings with `sparse=True`.

    DistributedDataParallel gives each of them a bucket of its own.
    """
    embeddings = [m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    return [embedding.weight for embedding in embeddings if embedding.sparse]
