"""Samples through a cache that knows what comes next, as a DataModule: one line in place of a
DataLoader, and no DistributedSampler."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_dlres.core.checks import flag, instance
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.units import parse_bytes
from lightning_dlres.datamodules.class_labels import ClassLabels
from lightning_dlres.datamodules.prefetch_metrics import MetricsLog
from lightning_dlres.datamodules.ranks import data_parallel_ranks
from lightning_dlres.datamodules.splits import (
    LABELLED,
    SPLITS,
    Split,
    SplitSource,
    check_source_arguments,
    has_files,
    has_url,
    is_data_set,
)
from lightning_dlres.datamodules.stores import SplitStores
from lightning_dlres.prefetch.cache.messages import HostConfig
from lightning_dlres.prefetch.cache.options import host_config
from lightning_dlres.prefetch.loading.loader import PrefetchLoader
from lightning_dlres.prefetch.loading.workers import Collate, Decode, Workers
from lightning_dlres.prefetch.order.sequence import ShardSpec, Tail
from lightning_dlres.prefetch.storage.source import source_classes
from lightning_dlres.prefetch.storage.source_options import (
    Extensions,
    StorageOptions,
    parse_extensions,
    parse_storage_options,
)

# What happens to samples that fill no batch of every rank and are not dropped.
Rest = Literal["pad", "uneven"]
# Of the capacity that is given for training, what each of the others has.
_OTHERS = 4
# Arguments that only some kinds of sources have.
_NOT_FOR_ALL_SOURCES: dict[str, Callable[[Any], bool]] = {
    "extensions": has_files,
    "storage_options": has_url,
}


class PrefetchCacheDataModule(LightningDataModule):
    """Feeds training from slow or shared storage (Method C: the order of an epoch is known, so what
    is needed next is asked for in large requests, ahead of need, and waits in a cache that the
    ranks of a host share).

    A split is a folder (every file is a sample), a store (`dlres store put`), a listing, any URL
    that fsspec knows, the addresses of storage nodes (`dlres store serve`) with commas between
    them, or a map-style data set, which is written into a store first.

    Batches go to data-parallel ranks as `DistributedSampler` would deal them, under any strategy;
    the state that is saved with a checkpoint goes on with the very next sample, on any number of
    ranks. The metrics `prefetch/hit_rate`, `prefetch/requests_per_sample`,
    `prefetch/bytes_per_sample`, `prefetch/stall_ms` and `prefetch/cache_bytes` go to the Trainer's
    loggers.

    Args:
        train: what `fit` trains on.
        val: what it validates on, in the order of the data set; a list of several sets gives as
            many loaders, which steps tell apart by their `dataloader_idx`.
        test: for `test`; one set, or a list.
        predict: for `predict`; one set, or a list.
        storage: "auto", "direct", "embedded", "files" or "nodes", see
            `prefetch.options.host_config`; or the addresses of storage nodes that have the training
            samples, instead of `train`.
        batch_size: samples of one batch of a rank; also an attribute, which Lightning's Tuner sets.
        capacity: bytes of a host's cache, for training; each other split has a quarter of it, which
            the sets of a list share.
        prefetch: samples of one request, Method C's k.
        lookahead: bytes asked for ahead of need; None: half of the capacity. 0: the method as it
            was published, which fetches on a miss.
        replicas: on how many storage nodes every sample is.
        nodes: how many embedded storage nodes there are; None: 4.
        pinned: bytes for training samples that are fetched once and stay over all epochs.
        pinned_directory: a directory on a local disk for them; None: in memory.
        threshold: the part of the capacity at which eviction starts.
        drop_last: whether training samples that do not fill a batch of every rank are left out.
        tail: what happens to them else: "pad" adds samples from the epoch's start so that all ranks
            have as many, "uneven" does not. Validation and test pad, prediction is uneven.
        shuffle: whether training samples come in another order in every epoch.
        seed: of these orders; the same on all ranks.
        decode: makes of a `Sample` (key, bytes, seed) what is collated; None: tensors of a data set
            that was put in, else the samples themselves.
        collate: makes a batch of a list; None: torch's `default_collate`.
        num_workers: threads or processes that decode; 0: the training process does.
        worker_type: "thread" or "process".
        pin_memory: whether tensors of a batch are copied into page-locked memory, from which a copy
            to the GPU does not hold up the training process. Without a GPU nothing is.
        timeout: after which a sample that does not come is an error.
        max_inflight_requests: to one storage node, at most.
        read_threads: requests that an embedded node, or a rank without a cache, reads at once.
            None: 4, or 16 without a cache.
        store: directory for map-style data sets, one store in it for each split; a store that is
            there is used if it holds the data set. None: a temporary directory, removed at the end.
        key, server_key: files of keys, for storage nodes that use CURVE.
        follow_links: whether links in a local folder are followed out of it, too; else those that
            lead out of it are left out, and a warning says so.
        labels: "folder": a sample's class is the first folder of its key, as in torchvision's
            ImageFolder, and an item of a batch is a pair of what `decode` returns and the number
            of the class. Classes are the folders of the training samples (of the first split that
            is given, where there are none), in alphabetical order; a list of names gives others.
            Samples of `predict` have none. None: no sample has.
        extensions: endings of file names such as ".jpg", in any case; other files are no samples.
            None: all files are.
        storage_options: arguments of fsspec's file system behind URLs, such as keys and endpoints:
            a mapping of JSON values, or the path of a JSON file with one. No message shows them.

    Raises:
        ConfigError: a bad value.
    """

    def __init__(
        self,
        train: str | Path | list[str] | Dataset[Any] | None = None,
        val: SplitSource = None,
        test: SplitSource = None,
        predict: SplitSource = None,
        storage: str = "auto",
        batch_size: int = 32,
        capacity: str | int = "2GiB",
        prefetch: int = 32,
        lookahead: str | int | None = None,
        replicas: int = 1,
        nodes: int | None = None,
        pinned: str | int = 0,
        pinned_directory: str | Path | None = None,
        threshold: float = 0.75,
        drop_last: bool = False,
        tail: Rest = "pad",
        shuffle: bool = True,
        seed: int = 0,
        decode: Decode | None = None,
        collate: Collate | None = None,
        num_workers: int = 0,
        worker_type: Workers = "thread",
        pin_memory: bool = False,
        timeout: str | float | timedelta = "30s",
        max_inflight_requests: int = 4,
        read_threads: int | None = None,
        store: str | Path | None = None,
        key: str | Path | None = None,
        server_key: str | Path | None = None,
        follow_links: bool = False,
        labels: Literal["folder"] | Sequence[str] | None = None,
        extensions: Extensions = None,
        storage_options: StorageOptions = None,
    ) -> None:
        super().__init__()
        instance("storage", storage, (str,), "a kind of storage, or addresses", "storage='auto'")
        instance("capacity", capacity, (str, int), "a number of bytes", "capacity='2GiB'")
        flag("shuffle", shuffle)
        if store is not None:
            instance("store", store, (str, Path), "the path of a folder", "store=None")
        if storage.startswith("tcp://"):
            if train is not None:
                raise ConfigError(
                    got_expected("train", train, "None beside addresses in storage", "train=None")
                )
            train, storage = storage, "auto"
        given: tuple[SplitSource, ...] = (train, val, test, predict)
        self._splits = {
            name: Split.of(name, value) for name, value in zip(SPLITS, given, strict=True)
        }
        self._source_arguments: dict[str, Any] = {
            "labels": labels,
            "extensions": extensions,
            "storage_options": storage_options,
        }
        self._labels = ClassLabels(labels, self._folders)
        check_source_arguments(list(self._splits.values()), self._source_arguments)
        self._capacity = parse_bytes(capacity, "capacity")
        self._options: dict[str, Any] = {
            "storage": storage,
            "nodes": nodes,
            "replicas": replicas,
            "prefetch": prefetch,
            "lookahead": lookahead,
            "threshold": threshold,
            "max_inflight_requests": max_inflight_requests,
            "read_threads": read_threads,
            "timeout": timeout,
            "key": key,
            "server_key": server_key,
            "follow_links": follow_links,
        }
        self._pinned: dict[str, Any] = {"pinned": pinned, "pinned_directory": pinned_directory}
        self._loading: dict[str, Any] = {
            "batch_size": batch_size,
            "decode": decode,
            "collate": collate,
            "num_workers": num_workers,
            "worker_type": worker_type,
            "pin_memory": pin_memory,
            "seed": seed,
        }
        parse_extensions(extensions)
        parse_storage_options(storage_options)
        flag("drop_last", drop_last)
        flag("pin_memory", pin_memory)
        if tail not in get_args(Rest):
            raise ConfigError(
                f"tail must be {' or '.join(map(repr, get_args(Rest)))}, got {tail!r}. Pass "
                "tail='pad', or drop_last=True to leave the rest out."
            )
        self._tail: Tail = "drop" if drop_last else tail
        self._shuffle = shuffle
        self._stores = SplitStores(None if store is None else Path(store).expanduser())
        self._job = ""
        self._loaders: dict[str, PrefetchLoader] = {}
        self._state: dict[str, Any] | None = None
        # The next pass over each set that is validated, as a checkpoint has it.
        self._passes: dict[str, int] = {}
        self._log = MetricsLog()
        # How many batches were trained on when the last one was handed over.
        self._trained_before: int | None = None
        for split in self._splits.values():
            # Bad values are said now, whatever will be loaded.
            for source in split.sources.values() or [None]:
                known = self._options_probe() if is_data_set(source) else source
                config = self._config(split, known)
                PrefetchLoader("x", config, tail=self._tail, **self._loading)

    @property
    def batch_size(self) -> int:
        """Samples of one batch of a rank."""
        return int(self._loading["batch_size"])

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        ShardSpec(0, 0, 1, batch_size)
        if batch_size != self.batch_size:
            self._loading["batch_size"] = batch_size
            # The Trainer asks for others; what still goes through these may end.
            self._loaders.clear()

    @property
    def classes(self) -> list[str]:
        """Names of the classes in the order of their numbers. They may be asked for before there is
        a Trainer; the source of the training samples is then listed for them.

        Raises:
            ConfigError: Samples have no labels, or lie in no folders.
        """
        return self._labels.names()

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The number of each class by its name."""
        return {name: number for number, name in enumerate(self.classes)}

    def use(self, split: str, source: SplitSource) -> None:
        """Set the source of "train", "val", "test" or "predict", for data modules that find it when
        they are set up."""
        if split not in SPLITS:
            raise ConfigError(got_expected("split", split, " or ".join(SPLITS), "'train'"))
        found = Split.of(split, source)
        # A source of another kind may still come.
        later = dict.fromkeys(_NOT_FOR_ALL_SOURCES)
        check_source_arguments([found], {**self._source_arguments, **later})
        self._splits[split] = found
        self._labels.forget_folders()

    @override
    def setup(self, stage: str) -> None:
        trainer = self._trainer()
        # One name for all ranks, and another one for every job.
        self._job = self._job or str(trainer.strategy.broadcast(uuid.uuid4().hex[:12], 0))
        wanted = {"fit": ("train", "val"), "validate": ("val",)}.get(stage, (stage,))
        labelled = False
        for split in wanted:
            for name, source in self._splits[split].sources.items():
                if is_data_set(source):
                    self._stores.write(trainer, self._job, name, source)
                elif split in LABELLED:
                    labelled = True
        if labelled:
            self._labels.agree(trainer.strategy, trainer.is_global_zero)

    @override
    def teardown(self, stage: str) -> None:
        self._forget()
        self._stores.forget()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._forget()
        self._stores.forget()

    @override
    def train_dataloader(self) -> PrefetchLoader:
        known = self._loaders.get("train")
        if known is not None:
            return known
        trainer = self._trainer()
        shuffle = self._shuffle
        if shuffle and trainer.overfit_batches:  # type: ignore[attr-defined]
            rank_zero_warn("overfit_batches: training samples come in the data set's order now.")
            shuffle = False
        loader = self._loader("train", "train", self._tail, shuffle)
        if self._state is not None and trainer.state.fn == "fit":
            full = len(loader)
            loader.load_state_dict(self._state)
            self._state = None
            if len(loader) != full:
                # It counts batches once. Asked for a loader again, it gets this one and counts the
                # batches of a whole epoch, of which these ranks have another number.
                trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
        return loader

    @override
    def val_dataloader(self) -> PrefetchLoader | list[PrefetchLoader]:
        if not self._splits["val"].sources and self._trainer().state.fn == "fit":
            # Lightning validates on nothing then.
            return []
        return self._eval_loaders("val", "pad")

    @override
    def test_dataloader(self) -> PrefetchLoader | list[PrefetchLoader]:
        return self._eval_loaders("test", "pad")

    @override
    def predict_dataloader(self) -> PrefetchLoader | list[PrefetchLoader]:
        return self._eval_loaders("predict", "uneven")

    @override
    def state_dict(self) -> dict[str, Any]:
        loader = self._loaders.get("train")
        if loader is None:
            return {}
        passes = {
            name: self._loaders[name].next_epoch
            for name in self._splits["val"].sources
            if name in self._loaders
        }
        return {
            "train": loader.state_dict(),
            "val": {**self._passes, **passes},
            "classes": list(self._labels.known),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._labels.check(state_dict.get("classes", []))
        # Restore positions only in fit().
        if self._trainer().state.fn != "fit":
            return
        self._passes = dict(state_dict.get("val", {}))
        self._state = state_dict.get("train")
        loader = self._loaders.get("train")
        if loader is not None and self._state is not None:
            # It was asked for before, as `Trainer.estimated_stepping_batches` does.
            counted = len(loader)
            loader.load_state_dict(self._state)
            self._state = None
            if len(loader) != counted:
                raise ConfigError(
                    "Trainer.estimated_stepping_batches must be asked for after a checkpoint of "
                    f"other ranks is restored, got {counted} batches counted before, {len(loader)} "
                    "after. Ask for it in configure_optimizers, not in setup."
                )

    def _forget(self) -> None:
        for loader in self._loaders.values():
            loader.close()
        self._loaders.clear()
        self._state = None
        self._passes = {}
        self._log = MetricsLog()
        self._trained_before = None

    def _config(self, split: Split, source: Any) -> HostConfig:
        train = split.name == "train"
        share = 1 if train else _OTHERS * max(1, len(split.sources))
        options = {**self._options, **(self._pinned if train else {})}
        capacity = self._capacity if train else max(1, self._capacity // share)
        ahead = options["lookahead"]
        if not train and ahead is not None:
            options["lookahead"] = min(parse_bytes(ahead, "lookahead"), capacity)
        for name, fits in _NOT_FOR_ALL_SOURCES.items():
            # Stores of data sets, and sources that are not known yet, are none of these.
            if any(source is given and fits(given) for given in split.sources.values()):
                options[name] = self._source_arguments[name]
        classes = self._labels.known if split.name in LABELLED else ()
        return host_config(source, capacity=capacity, share=share, classes=classes, **options)

    def _folders(self) -> Sequence[str]:
        """Return the classes of the first split whose samples have labels."""
        for name in LABELLED:
            for source in self._splits[name].sources.values():
                return source_classes(self._config(self._splits[name], source).source)
        raise ConfigError(
            "train, val or test must be given where classes are asked for, got None for all. Pass "
            "labels with a list of the classes' names."
        )

    def _eval_loaders(self, name: str, tail: Tail) -> PrefetchLoader | list[PrefetchLoader]:
        split = self._splits[name]
        loaders = [
            self._loaders.get(of) or self._loader(name, of, tail, False)
            for of in split.sources or [name]
        ]
        return loaders if split.is_list else loaders[0]

    def _loader(self, split: str, of: str, tail: Tail, shuffle: bool) -> PrefetchLoader:
        """Return a new loader.

        Args:
            split: The name of the split.
            of: The name of the loader, by which the split has its source.
            tail: See `ShardSpec`.
            shuffle: See `PrefetchLoader`.
        """
        source = self._stores.paths.get(of) or self._splits[split].sources.get(of)
        if source is None:
            raise ConfigError(
                got_expected(
                    split, None, "a folder, store, URL or data set", f"{split}='data/{split}'"
                )
            )
        trainer = self._trainer()
        ranks, shared = data_parallel_ranks(trainer)
        name = f"{self._job}-{of}" if shared else f"{self._job}-{of}-{trainer.global_rank}"
        self._loaders[of] = PrefetchLoader(
            name,
            self._config(self._splits[split], source),
            ranks=ranks,
            tail=tail,
            shuffle=shuffle,
            epoch=trainer.current_epoch if split == "train" else self._passes.get(of, 0),
            epochs=_epochs(trainer) if split == "train" else 1,
            on_batch=self._report if split == "train" else None,
            count_unfinished=self._unfinished if split == "train" else None,
            # Lightning saves the loader's state by itself, too: both must know.
            is_epoch_cut=self._ended if split == "train" else None,
            **self._loading,
        )
        # Files are listed, or the cache starts, before the first epoch does.
        _ = self._loaders[of].data_set
        return self._loaders[of]

    def _options_probe(self) -> str:
        return "tcp://127.0.0.1:1" if self._options["storage"] == "nodes" else "."

    def _report(self, loader: PrefetchLoader) -> None:
        trainer = self._trainer()
        self._trained_before = _trained(trainer)
        self._log.count_batch(trainer, loader)

    def _unfinished(self) -> int:
        """How many batches are in a training step, or in one that has failed."""
        return int(self._trained_before == _trained(self._trainer()))

    def _ended(self) -> bool:
        """Return whether the Trainer ends the epoch with the last batch, though samples are left:
        under limit_train_batches, or where `on_train_batch_start` has returned -1."""
        progress = self._trainer().fit_loop.epoch_loop.batch_progress
        return bool(progress.is_last_batch) and not self._unfinished()

    def _trainer(self) -> Trainer:
        if self.trainer is None:
            raise ConfigError(
                "PrefetchCacheDataModule is not attached to a Trainer. Pass it to one: "
                "trainer.fit(model, datamodule=...)."
            )
        return self.trainer


def _trained(trainer: Trainer) -> int:
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.processed)  # type: ignore[attr-defined]


def _epochs(trainer: Trainer) -> int | None:
    most = trainer.max_epochs
    return None if most is None or most < 0 else most
