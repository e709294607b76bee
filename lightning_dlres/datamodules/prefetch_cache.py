"""Data module over a prefetch cache, in place of a DataLoader and a DistributedSampler."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_dlres.core.checks import flag, instance, local_path
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.units import parse_bytes
from lightning_dlres.datamodules.class_labels import ClassLabels
from lightning_dlres.datamodules.prefetch_metrics import MetricsLog
from lightning_dlres.datamodules.ranks import attached, data_parallel_ranks
from lightning_dlres.datamodules.split_configs import SOURCE_OPTIONS, SplitConfigs, TailRule
from lightning_dlres.datamodules.splits import (
    LABELLED,
    SPLITS,
    Split,
    SplitSource,
    check_source_arguments,
    is_data_set,
)
from lightning_dlres.datamodules.stores import SplitStores, require_set_up
from lightning_dlres.datamodules.training_progress import (
    TrainingProgress,
    keep_order,
    num_epochs,
    resume_of_same_length,
    rewind,
)
from lightning_dlres.prefetch.cache.messages import HostConfig
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


class PrefetchCacheDataModule(LightningDataModule):
    """Data module that feeds training from slow or shared storage.

    The order of an epoch is known before it starts. So the next samples are requested ahead of
    need, many in one request, and wait in a cache that the ranks of a host share.

    A split is a folder (every file is a sample), a store (`dlres store put`), a listing, any URL
    that fsspec knows, addresses of storage nodes (`dlres store serve`) with commas between them, or
    a map-style data set, which is written into a store first.

    Batches go to data-parallel ranks as with `DistributedSampler`, under any strategy. A checkpoint
    holds the position in the epoch; training resumes with the very next sample, on any number of
    ranks. The Trainer's loggers get `prefetch/hit_rate`, `prefetch/requests_per_sample`,
    `prefetch/bytes_per_sample`, `prefetch/stall_ms` and `prefetch/cache_bytes`.

    Args:
        train: Training samples.
        val: Validation samples, in the order of the data set. A list of several sets gives as many
            loaders, which steps tell apart by their `dataloader_idx`.
        test: Samples for `test`; one set, or a list.
        predict: Samples for `predict`; one set, or a list.
        storage: Name of a backend, see `prefetch.cache.options.host_config`; or the addresses of
            storage nodes that have the training samples, instead of `train`.
        batch_size: Samples in one batch of a rank; also an attribute, which the Tuner sets.
        capacity: Bytes of a host's cache for training. Each other split has a quarter of it, which
            the sets of a list share.
        prefetch: Maximum number of samples in one request to a storage node.
        lookahead: Bytes that are requested ahead of need. None: half of the capacity. 0: only a
            miss requests samples: the missing one, and the next `prefetch` - 1 of its node.
        replicas: Number of storage nodes that have each sample.
        nodes: Number of embedded storage nodes. None: 4.
        pinned: Bytes for training samples that are fetched once and stay for all epochs.
        pinned_directory: Directory on a local disk for pinned samples. None: they are in memory.
        threshold: Used part of the capacity at which eviction starts, in (0, 1].
        drop_last: True: training samples that do not fill a batch of every rank are left out.
        tail: Rule for these samples if `drop_last` is False. "pad": samples from the epoch's start
            are added until all ranks have the same number. "uneven": some ranks have one sample
            less. Validation and test pad, prediction is uneven.
        shuffle: True: training samples come in another order in every epoch.
        seed: Seed of these orders and of `Sample.seed`, the same on all ranks.
        decode: Function that turns a `Sample` (key, bytes, seed) into an item. None: items of a
            map-style data set are decoded, and other samples stay of the class `Sample`.
        collate: Function that turns a list of items into a batch. None: torch's `default_collate`;
            a batch of samples that are not decoded is the list itself.
        num_workers: Number of threads or processes that decode. 0: the training process decodes.
        worker_type: "thread" or "process".
        pin_memory: True: if there is a GPU, tensors of a batch are copied into page-locked memory,
            so that the copy to the GPU does not block the training process.
        timeout: Time after which a sample that has not arrived is an error. Numbers are seconds.
        max_inflight_requests: Maximum number of requests ahead of need in flight to one node.
        read_threads: Number of requests that are read at the same time by an embedded node, a cache
            that reads files itself, or a rank without a cache. None: 16 without a cache, else 4.
        store: Directory for map-style data sets, with one store for each split. A store that exists
            is used if it holds the data set. None: a temporary directory, removed at the end.
        key: File with this process's key pair, for storage nodes that use CURVE.
        server_key: File with the public key of these nodes.
        follow_links: True: links in a local folder are followed even if they lead out of it.
            False: such links are left out, with a warning.
        labels: "folder": a sample's class is the first folder of its key, as in torchvision's
            ImageFolder, and an item becomes a pair of the result of `decode` and the index of the
            class. Classes are the folders of the training samples (or of the first split that is
            given), in alphabetical order. A list of names: these classes, in this order. None:
            samples have no labels. Samples of `predict` never have any.
        extensions: Endings of file names such as ".jpg", in lower or upper case. Files with other
            endings are no samples. None: all files are samples.
        storage_options: Arguments of fsspec's file system behind URLs, such as keys and endpoints:
            a mapping of JSON values, or the path of a JSON file with one. No message shows them.

    Raises:
        ConfigError: If an argument is out of its range, or does not fit a source.
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
        tail: TailRule = "pad",
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
        instance("storage", storage, (str,), "a storage, or addresses", "storage='auto'")
        instance("capacity", capacity, (str, int), "a number of bytes", "capacity='2GiB'")
        flag("shuffle", shuffle)
        local_path("store", store, "the path of a local folder", "store=None")
        if storage.startswith("tcp://"):
            if train is not None:
                raise ConfigError(
                    f"train must be None if storage has addresses, got {train!r}. Pass the "
                    "addresses as train, and leave out storage."
                )
            train, storage = storage, "auto"
        sources: tuple[SplitSource, ...] = (train, val, test, predict)
        self._splits = {
            name: Split.of(name, value) for name, value in zip(SPLITS, sources, strict=True)
        }
        self._source_arguments: dict[str, Any] = {
            "labels": labels,
            "extensions": extensions,
            "storage_options": storage_options,
        }
        self._labels = ClassLabels(labels, self._folders)
        check_source_arguments(list(self._splits.values()), self._source_arguments)
        self._configs = SplitConfigs(
            capacity=parse_bytes(capacity, "capacity"),
            options={
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
            },
            train_options={"pinned": pinned, "pinned_directory": pinned_directory},
            source_options={"extensions": extensions, "storage_options": storage_options},
        )
        # Arguments of every `PrefetchLoader`.
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
        if tail not in get_args(TailRule):
            raise ConfigError(
                f"tail must be {' or '.join(map(repr, get_args(TailRule)))}, got {tail!r}. Pass "
                "tail='pad', or drop_last=True to leave the rest out."
            )
        self._tail: Tail = "drop" if drop_last else tail
        self._shuffle = shuffle
        self._stores = SplitStores(None if store is None else Path(store).expanduser())
        # Part of the caches' names, the same on all ranks and different for every job.
        self._job = ""
        # Loaders by the name of their source: "train", "val", or "val-0" in a list.
        self._loaders: dict[str, PrefetchLoader] = {}
        self._generation = 0
        # States of the training loader: in a checkpoint, when made, and at the end of training.
        self._train_state: dict[str, Any] | None = None
        self._train_start: dict[str, Any] | None = None
        self._ended: dict[str, Any] | None = None
        # Number of the next pass over each validation set, from a checkpoint.
        self._next_passes: dict[str, int] = {}
        self._metrics_log = MetricsLog()
        for split in self._splits.values():
            # Check all arguments now, and not when the split is used.
            for source in split.sources.values() or [None]:
                is_known = source is not None and not is_data_set(source)
                checked = source if is_known else self._configs.placeholder_source
                PrefetchLoader("x", self._config(split, checked), tail=self._tail, **self._loading)

    @property
    def batch_size(self) -> int:
        """Number of samples in one batch of a rank."""
        return int(self._loading["batch_size"])

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        ShardSpec(0, 0, 1, batch_size)  # raises if the size is invalid
        if batch_size != self.batch_size:
            self._loading["batch_size"] = batch_size
            # Iterators keep old loaders and caches until they end: new caches get new names.
            self._loaders.clear()
            self._generation += 1

    @property
    def classes(self) -> list[str]:
        """Names of the classes, in the order of their indices; lists the folders if needed.

        Raises:
            ConfigError: If samples have no labels, no source is given, or a sample is in no folder.
        """
        return self._labels.names()

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Index of each class, by its name."""
        return {name: index for index, name in enumerate(self.classes)}

    def use(self, split: str, source: SplitSource) -> None:
        """Set the source of "train", "val", "test" or "predict", for data modules that know it only
        in `setup`. A data set must be set before `setup` of this class, which writes its store.

        Raises:
            ConfigError: If the split is none of these, or the source does not fit.
        """
        if split not in SPLITS:
            raise ConfigError(got_expected("split", split, " or ".join(SPLITS), "'train'"))
        new_split = Split.of(split, source)
        # These options may apply to the source of another split, which is set later.
        unchecked = dict.fromkeys(SOURCE_OPTIONS)
        check_source_arguments([new_split], {**self._source_arguments, **unchecked})
        self._stores.forget(self._splits[split].sources)
        self._splits[split] = new_split
        self._labels.forget_folders()

    @override
    def setup(self, stage: str) -> None:
        trainer = self._trainer()
        self._ended = None if stage == "fit" else self._ended
        self._job = self._job or str(trainer.strategy.broadcast(uuid.uuid4().hex[:12], 0))
        names = {"fit": ("train", "val"), "validate": ("val",)}.get(stage, (stage,))
        needs_classes = False
        for split in names:
            for name, source in self._splits[split].sources.items():
                if is_data_set(source):
                    self._stores.write(trainer, self._job, name, source)
                elif split in LABELLED:
                    needs_classes = True
        if needs_classes:
            self._labels.broadcast_names(trainer.strategy, trainer.is_global_zero)

    @override
    def teardown(self, stage: str) -> None:
        self._release()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._release()

    @override
    def train_dataloader(self) -> PrefetchLoader:
        if "train" in self._loaders:
            return self._loaders["train"]
        trainer = self._trainer()
        shuffle = self._shuffle
        if shuffle and trainer.overfit_batches:  # type: ignore[attr-defined]
            rank_zero_warn("overfit_batches is set: training samples come in the data set's order.")
            shuffle = False
        loader = self._make_loader("train", "train", self._tail, shuffle)
        keep_order(loader, self._ended)
        self._train_start = loader.state_dict()
        if self._train_state is not None and trainer.state.fn == "fit":
            whole_epoch = len(loader)
            loader.load_state_dict(self._train_state)
            self._train_state = None
            if len(loader) != whole_epoch:
                # The Trainer counts the batches once. Let it request a loader again after the rest
                # of this epoch: it gets this one, and counts the batches of a whole epoch.
                trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
        return loader

    @override
    def val_dataloader(self) -> PrefetchLoader | list[PrefetchLoader]:
        if not self._splits["val"].sources and self._trainer().state.fn == "fit":
            # Lightning then skips validation.
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
        passes = {
            name: self._loaders[name].next_epoch
            for name in self._splits["val"].sources
            if name in self._loaders
        }
        loader = self._loaders.get("train")
        # Lightning restores no empty state: without a loader, too, there is one.
        return {
            "train": self._train_state if loader is None else loader.state_dict(),
            "val": {**self._next_passes, **passes},
            "classes": list(self._labels.known_names),
            "ended": self._ended,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._labels.check_checkpoint_names(state_dict.get("classes", []))
        # Restore positions only in fit().
        if self._trainer().state.fn != "fit":
            return
        self._next_passes = dict(state_dict.get("val", {}))
        for name in self._splits["val"].sources:
            if name in self._loaders:
                rewind(self._loaders[name], self._next_passes.get(name, 0))
        self._train_state, self._ended = state_dict.get("train"), state_dict.get("ended")
        if "train" in self._loaders:
            # The loader exists already, for instance for `Trainer.estimated_stepping_batches`. A
            # state without one was saved earlier, as by LearningRateFinder at the start of `fit`.
            resume_of_same_length(self._loaders["train"], self._train_state or self._train_start)
            self._train_state = None

    def _release(self) -> None:
        if "train" in self._loaders:
            self._ended = self._loaders["train"].state_dict()
        for loader in self._loaders.values():
            loader.close()
        self._loaders.clear()
        self._train_state, self._train_start, self._next_passes = None, None, {}
        self._metrics_log = MetricsLog()
        self._stores.remove_temporary()

    def _config(self, split: Split, source: Any) -> HostConfig:
        classes = self._labels.known_names if split.name in LABELLED else ()
        return self._configs.config(split, source, classes)

    def _folders(self) -> Sequence[str]:
        """Return the folders in the first source whose samples have labels."""
        for name in LABELLED:
            for source in self._splits[name].sources.values():
                return source_classes(self._config(self._splits[name], source).source)
        raise ConfigError(
            "train, val or test must be given to list the classes, got None for all. Pass a list "
            "of class names as labels."
        )

    def _eval_loaders(self, name: str, tail: Tail) -> PrefetchLoader | list[PrefetchLoader]:
        split = self._splits[name]
        loaders = [
            # A loader without batches is false, but it exists.
            self._loaders[source_name]
            if source_name in self._loaders
            else self._make_loader(name, source_name, tail, False)
            for source_name in split.sources or [name]
        ]
        return loaders if split.is_list else loaders[0]

    def _make_loader(
        self, split: str, source_name: str, tail: Tail, shuffle: bool
    ) -> PrefetchLoader:
        """Return a new loader.

        Args:
            split: Name of the split.
            source_name: Name of the source and of its loader.
            tail: See `ShardSpec`.
            shuffle: See `PrefetchLoader`.
        """
        source = self._stores.source_of(self._splits[split], source_name)
        trainer = self._trainer()
        require_set_up(type(self), self._job)
        ranks, is_shared = data_parallel_ranks(trainer)
        name = f"{self._job}-{self._generation}-{source_name}"
        is_train = split == "train"
        loader = PrefetchLoader(
            name if is_shared else f"{name}-{trainer.global_rank}",
            self._config(self._splits[split], source),
            ranks=ranks,
            tail=tail,
            shuffle=shuffle,
            epoch=trainer.current_epoch if is_train else self._next_passes.get(source_name, 0),
            epochs=num_epochs(trainer) if is_train else 1,
            **(TrainingProgress(trainer, self._metrics_log).loader_hooks() if is_train else {}),
            **self._loading,
        )
        self._loaders[source_name] = loader
        _ = loader.data_set  # List the files, or start the cache, before the first epoch begins.
        return loader

    def _trainer(self) -> Trainer:
        return attached(self.trainer)
