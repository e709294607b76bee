"""`dlres fit`, `validate`, `test`, `predict`: LightningCLI with this package's strategies."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

import lightning_dlres.datamodules  # noqa: F401 (registers strategies and short names)
from lightning_dlres.core.errors import ConfigError

# Arguments of the data module that may hold secrets, up to the end of the line in an error.
_SECRETS = re.compile(r"(storage_options\W+).*")


class TrainerParser(LightningArgumentParser):
    """Parser whose errors leave out arguments that may hold secrets."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        super().error(_SECRETS.sub(r"\1...", message), ex)


class TrainerCLI(LightningCLI):
    """LightningCLI that raises a `ConfigError` of a constructor as it is.

    jsonargparse puts its text into a long error of its own, together with all arguments. Some of
    them may be secrets.
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

        # It sees no refusal of a model or data module: Lightning has instantiators for these. Such
        # a refusal is the cause of jsonargparse's error. Other refusals need not be: jsonargparse
        # makes one of several errors the cause.
        self.parser.add_instantiator(instantiate, object, subclasses=True)
        try:
            super().instantiate_classes()
        except ValueError as error:
            if refusals and str(refusals[-1]) in str(error):
                refusal: ConfigError | None = refusals[-1]
            else:
                refusal = _config_error_behind(error)
            if refusal is None:
                raise
            raise refusal from error


def _config_error_behind(error: BaseException) -> ConfigError | None:
    """Return the `ConfigError` that has led to an error; None without one."""
    behind = error.__cause__ or error.__context__
    if behind is None or isinstance(behind, ConfigError):
        return behind
    return _config_error_behind(behind)


def run_trainer(command: str, options: Sequence[str]) -> int:
    """Build Trainer, model and data from the options, and call the Trainer's method `command`."""
    arguments = [command, *options]
    # LightningCLI warns if it gets arguments both here and on the process's command line.
    TrainerCLI(
        args=None if arguments == sys.argv[1:] else arguments,
        parser_kwargs={"prog": "dlres"},
        parser_class=TrainerParser,
    )
    return 0
