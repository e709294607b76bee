"""Cache configurations of a data module's splits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_dlres.core.units import parse_bytes
from lightning_dlres.datamodules.splits import Split, has_files, has_url
from lightning_dlres.prefetch.cache.messages import HostConfig
from lightning_dlres.prefetch.cache.options import host_config

# Values of the argument `tail`. `drop_last=True` selects the third tail rule, "drop".
TailRule = Literal["pad", "uneven"]
# A split other than "train" gets 1/_EVAL_DIVISOR of the capacity. The sources of a split divide it.
_EVAL_DIVISOR = 4
# Options that apply only to some kinds of sources, with the function that tests a source.
SOURCE_OPTIONS: dict[str, Callable[[Any], bool]] = {
    "extensions": has_files,
    "storage_options": has_url,
}


@dataclass(frozen=True, kw_only=True)
class SplitConfigs:
    """Options of all splits, from which `config` makes the configuration of each cache.

    Attributes:
        capacity: Size of the cache of the training samples, in bytes.
        options: Arguments of `host_config` for every split.
        train_options: Arguments of `host_config` for the training samples only.
        source_options: Values of `SOURCE_OPTIONS`, by name.
    """

    capacity: int
    options: Mapping[str, Any]
    train_options: Mapping[str, Any]
    source_options: Mapping[str, Any]

    @property
    def placeholder_source(self) -> str:
        """Placeholder source, to check the options before the real source is known."""
        return "tcp://127.0.0.1:1" if self.options["storage"] == "nodes" else "."

    def config(self, split: Split, source: Any, classes: tuple[str, ...]) -> HostConfig:
        """Return the configuration of the cache of one source.

        Args:
            split: Split that the source belongs to.
            source: The source, or the store that was written for it.
            classes: Names of the folders that its samples may be in. (): any folder.

        Raises:
            ConfigError: If an option is out of its range, or does not fit the source.
        """
        is_train = split.name == "train"
        divisor = 1 if is_train else _EVAL_DIVISOR * max(1, len(split.sources))
        options = {**self.options, **(self.train_options if is_train else {})}
        capacity = self.capacity if is_train else max(1, self.capacity // divisor)
        lookahead = options["lookahead"]
        if not is_train and lookahead is not None:
            # The user chose the lookahead for the larger cache of the training samples.
            options["lookahead"] = min(parse_bytes(lookahead, "lookahead"), capacity)
        for name, applies in SOURCE_OPTIONS.items():
            # Test the sources that the user gave. `source` may be the store of a data set, or a
            # placeholder, to which the option does not apply.
            if any(source is given and applies(given) for given in split.sources.values()):
                options[name] = self.source_options[name]
        return host_config(source, capacity=capacity, share=divisor, classes=classes, **options)
