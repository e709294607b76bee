"""`dlres fit`, `validate`, `test`, `predict`: LightningCLI with this package's strategies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.cli import LightningCLI
from typing_extensions import override

import lightning_dlres  # noqa: F401 (registers the strategies)
from lightning_dlres.core.errors import ConfigError


class _TrainerCLI(LightningCLI):
    """LightningCLI that raises a `ConfigError` of a constructor as it is.

    jsonargparse puts its text into a long error of its own.
    """

    @override
    def instantiate_classes(self) -> None:
        refusals: list[ConfigError] = []

        def instantiate(class_type: type, *args: Any, **kwargs: Any) -> Any:
            try:
                return class_type(*args, **kwargs)
            except ConfigError as error:
                refusals.append(error)
                raise

        self.parser.add_instantiator(instantiate, object, subclasses=True)
        try:
            super().instantiate_classes()
        except ValueError as error:
            if refusals and str(refusals[-1]) in str(error):
                raise refusals[-1] from error
            raise


def run_trainer(command: str, options: Sequence[str]) -> int:
    """Build Trainer, model and data from the options, and call the Trainer's method `command`."""
    arguments = [command, *options]
    # LightningCLI warns if it gets arguments both here and on the process's command line.
    _TrainerCLI(
        args=None if arguments == sys.argv[1:] else arguments, parser_kwargs={"prog": "dlres"}
    )
    return 0
