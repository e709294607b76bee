"""Names of the parameters whose gradients the hook synchronises."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence

from torch import Tensor, nn

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.gradsync.execute.session import spec_of
from lightning_dlres.gradsync.plan.units import GradientSpec


class ParameterNames:
    """Names of parameters, which are known by identity.

    Attributes:
        specs: Names and sizes of the gradients that a plan may have.
        sparse: Parameters with sparse gradients, which torch's all-reduce averages.
    """

    def __init__(self) -> None:
        self._names: dict[Tensor, str] = {}
        self.specs: list[GradientSpec] = []
        self.sparse: set[Tensor] = set()

    def __repr__(self) -> str:
        """Return a short text, which is another one if names, sizes or their order differ."""
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
            is_late: True if the plan is made, and has no room for more parameters.

        Raises:
            ConfigError: If two parameters have one name, or a new one is late.
        """
        self.sparse |= set(sparse)
        for name, parameter in parameters:
            # A parameter that is shared comes once, and so does one that has a name already.
            if not parameter.requires_grad or parameter in self._names:
                continue
            if is_late or name in self._names.values():
                rule = "those of one module, named before the first step"
                raise ConfigError(got_expected("parameters", name, rule, "a state for each module"))
            self._names[parameter] = name
            if parameter not in self.sparse:
                self.specs.append(spec_of(name, parameter))

    def learn(self, parameters: Iterable[Tensor]) -> None:
        """Add parameters without names."""
        self.specs += [spec_of(self._of(parameter), parameter) for parameter in parameters]

    def of(self, parameters: Iterable[Tensor]) -> Sequence[str]:
        """Return the names of parameters; they get numbers if none has a name.

        Raises:
            ConfigError: If other parameters have names, so a plan has no room for these.
        """
        parameters = list(parameters)
        for parameter in parameters if self.specs else ():
            if parameter not in self._names:
                got = f"none of shape {tuple(parameter.shape)}"
                fix = "parameters=module.named_parameters()"
                raise ConfigError(got_expected("parameters", got, "all of the module's", fix))
        return [self._of(parameter) for parameter in parameters]

    def _of(self, parameter: Tensor) -> str:
        return self._names.setdefault(parameter, f"parameter {len(self._names)}")
