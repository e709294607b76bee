"""Tests that each public constructor refuses wrong values of each argument with a ConfigError."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch

import lightning_dlres as dlres
from lightning_dlres.pipeline.profile.cluster import Device, Link
from lightning_dlres.pipeline.profile.run_profile import LayerProfile

# The last sentence of a message, which says what to do.
FIX = r"\. [A-Z].*\.$"
# Values by name, most of them wrong for most arguments. `TABLE` names the values that are valid.
WRONG: dict[str, Any] = {
    "object": object(),
    "complex": 1j,
    "bytes": b"x",
    "dict": {"a": 1},
    "set": {1},
    "none": None,
    "true": True,
    "nan": nan,
    "infinite": inf,
    "negative": -1,
    "negative fraction": -0.5,
    "zero": 0,
    "fraction": 1.5,
    "digits": "2",
    "empty": "",
    "word": "no such word",
    "empty list": [],
    "nested": [[0, 0]],
    "list of none": [None],
}
PATH = {"digits", "word"}
SIZE = {"digits", "zero", "none"}


# For each constructor: its other arguments, and for each argument the names of valid values.
TABLE: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, set[str]]]] = {
    "HeteroPipeStrategy": (
        dlres.HeteroPipeStrategy,
        {},
        {
            "stages": set(),
            "microbatches": set(),
            "schedule": set(),
            "module": {"none", "digits", "word", "empty"},
            "device_map": {"none"},
            "plan": {"none"},
            "split_batch": {"none"},
            "emulate_speed": {"none"},
            "memory_limit": {"none", "digits"},
            "recompute": set(),
            "gradient_codec": {"none"},
            "profile": {"none"},
            "timeout": {"fraction", "digits"},
            "process_group_backend": {"none"},
            "deferred_init": {"true"},
            "gpu_transfers": set(),
            "evaluation": set(),
            "save_distributed_checkpoint": {"true"},
        },
    ),
    "CompressedDDPStrategy": (
        dlres.CompressedDDPStrategy,
        {},
        {
            "algorithm": set(),
            "codec_options": {"none"},
            "topology": set(),
            "coordinator": set(),
            "transport": set(),
            "hierarchy": set(),
            "min_bytes": {"zero"},
            "replan": set(),
            "share_samples": set(),
            "timeout": {"fraction", "digits"},
            "find_unused_parameters": {"true"},
            "static_graph": {"true"},
            "gradient_as_bucket_view": {"true"},
            "bucket_cap_mb": {"none", "fraction"},
            "process_group_backend": {"none"},
        },
    ),
    "GradientSyncState": (
        dlres.GradientSyncState,
        {},
        {
            "algorithm": set(),
            "codec_options": {"none"},
            "topology": set(),
            "coordinator": set(),
            "transport": set(),
            "hierarchy": set(),
            "host": {"none", "digits", "word"},
            "min_bytes": {"zero"},
            "replan": set(),
            "bucket_cap_mb": {"fraction"},
            "timeout": {"fraction", "digits"},
            "optimizers": {"none", "empty list"},
            "check": {"none"},
            "keeps_previous": {"true"},
            "tracer": {"none"},
        },
    ),
    "MomentumSync": (
        dlres.MomentumSync,
        {},
        {
            "algorithm": set(),
            "codec_options": {"none"},
            "topology": set(),
            "coordinator": set(),
            "min_bytes": {"zero"},
            "timeout": {"none", "fraction", "digits"},
            "check": {"none"},
        },
    ),
    "ProfileConfig": (
        dlres.ProfileConfig,
        {},
        {
            "samples": set(),
            "batch": set(),
            "microbatch": set(),
            "repeats": set(),
            "seconds": {"zero", "fraction"},
        },
    ),
    "ActivationOffload": (
        dlres.ActivationOffload,
        {},
        {
            "budget": {"fraction", "digits"},
            "saved_budget": {"none", "fraction", "digits"},
            "host_budget": SIZE,
            "disk": {"none", *PATH},
            "disk_budget": SIZE,
            "min_size": {"digits", "zero"},
            "actions": {"empty list"},
            "on_over_budget": set(),
            "plan": {"none"},
            "profile_steps": set(),
            "exact": {"true"},
        },
    ),
    "ParameterMirror": (
        dlres.ParameterMirror,
        {},
        {
            "window": {"digits"},
            "disk": {"none", *PATH},
            "update": set(),
            "profile_steps": set(),
            "fused": {"true"},
        },
    ),
    "ParameterServerStrategy": (
        dlres.ParameterServerStrategy,
        {},
        {
            "consistency": set(),
            "staleness": {"zero"},
            "servers": set(),
            "embedded_servers": set(),
            "codec": {"none"},
            "codec_options": {"none"},
            "key_bytes": set(),
            "overlap": {"true"},
            "worker_deadline": {"fraction", "digits"},
            "log_bytes": {"zero", "fraction", "digits"},
            "log_directory": {"none", *PATH},
            "key": {"none"},
            "server_key": {"none"},
            "timeout": {"fraction", "digits"},
            "process_group_backend": {"none"},
        },
    ),
    "OneBitAdam": (
        dlres.OneBitAdam,
        {"params": [torch.nn.Parameter(torch.zeros(2))]},
        {
            "lr": {"zero", "fraction"},
            "betas": set(),
            "eps": {"zero", "fraction"},
            "weight_decay": {"zero", "fraction"},
            "freeze_step": set(),
            "sync": {"none"},
        },
    ),
    "MemoryPrecision": (dlres.MemoryPrecision, {}, {"precision": set()}),
    "ResourceReport": (dlres.ResourceReport, {}, {"dir": {"none", *PATH}}),
    "Device": (
        Device,
        {},
        {
            "kind": {"zero"},
            "power": {"fraction"},
            "host": {"digits", "word", "empty"},
            "memory_limit": {"none", "zero"},
        },
    ),
    "Link": (
        Link,
        {"ranks": (0, 1), "latency": 0.0, "bytes_per_second": 1.0},
        {
            "ranks": set(),
            "latency": {"zero", "fraction"},
            "bytes_per_second": {"infinite", "fraction"},
        },
    ),
    "LayerProfile": (
        LayerProfile,
        {"name": "layer"},
        {"name": {"digits", "word", "empty"}, "parameter_bytes": {"zero"}, "saved_bytes": {"zero"}},
    ),
    "PipelinePlan": (
        dlres.PipelinePlan,
        {"replicas": ((0, 1),), "split": (1, 1)},
        {
            "replicas": set(),
            "split": set(),
            "recompute": {"empty list"},
            "schedule": set(),
            "microbatches": {"zero"},
            "extra_in_flight": {"zero"},
        },
    ),
    "PrefetchCacheNode": (
        dlres.PrefetchCacheNode,
        {"source": "data"},
        {
            "source": PATH,
            "ranks": {"none"},
            "shuffle": {"true"},
            "seed": {"zero"},
            "tail": set(),
            "epochs": {"none"},
            "cache": {"none", "digits"},
            "capacity": {"digits"},
            "prefetch": set(),
            "lookahead": SIZE,
            "replicas": set(),
            "nodes": {"none"},
            "pinned": {"digits", "zero"},
            "pinned_directory": {"none", *PATH},
            "threshold": set(),
            "timeout": {"digits", "fraction"},
            "max_inflight_requests": set(),
            "read_threads": {"none"},
            "storage": set(),
        },
    ),
    "PrefetchCacheDataModule": (
        dlres.PrefetchCacheDataModule,
        {},
        {
            "batch_size": set(),
            "storage": set(),
            "capacity": {"digits"},
            "prefetch": set(),
            "replicas": set(),
            "tail": set(),
            "shuffle": {"true"},
            "seed": {"zero"},
            "decode": {"none"},
            "collate": {"none"},
            "num_workers": {"zero"},
            "worker_type": set(),
            "timeout": {"digits", "fraction"},
            "store": {"none", *PATH},
            "labels": {"none"},
            "extensions": {"none"},
            "storage_options": {"none", "dict"},
            "val": {"none", "dict", *PATH},
            "train": {"none", "dict", *PATH},
            "test": {"none", "dict", *PATH},
            "predict": {"none", "dict", *PATH},
            "drop_last": {"true"},
            "pin_memory": {"true"},
            "follow_links": {"true"},
            "threshold": set(),
            "lookahead": SIZE,
            "nodes": {"none"},
            "pinned": {"digits", "zero"},
            "pinned_directory": {"none", *PATH},
            "max_inflight_requests": set(),
            "read_threads": {"none"},
            "key": {"none"},
            "server_key": {"none"},
        },
    ),
}
CASES = [(name, argument) for name, (_, _, arguments) in TABLE.items() for argument in arguments]


def test_the_table_has_all_public_constructors_and_their_arguments() -> None:
    made_by_the_package = {"Sample", "MemoryPlan", "PipelinePlan"}
    # Arguments of strategies that are Lightning's objects.
    of_lightning = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"}
    of_lightning |= {"precision_plugin"}
    for name in dlres.__all__:
        kind = getattr(dlres, name)
        if not isinstance(kind, type) or issubclass(kind, Exception) or name in made_by_the_package:
            continue
        _, others, arguments = TABLE[name]
        named = {
            one.name
            for one in inspect.signature(kind).parameters.values()
            if one.kind is not inspect.Parameter.VAR_KEYWORD
        }
        assert named - of_lightning - set(others) <= set(arguments), name


@pytest.mark.parametrize(("name", "argument"), CASES, ids=lambda value: value)
def test_wrong_values_are_refused_with_the_name_of_the_argument(name: str, argument: str) -> None:
    make, others, valid_kinds = TABLE[name]
    failures = []
    for kind, value in WRONG.items():
        try:
            make(**{**others, argument: value})
        except dlres.ConfigError as error:
            if kind in valid_kinds[argument]:
                failures.append(f"{kind}: refused: {error}")
            elif not re.match(rf"(\w+\.)?{argument}\b.* must be .*, got .*{FIX}", str(error)):
                failures.append(f"{kind}: {error}")
        except Exception as error:
            failures.append(f"{kind}: {type(error).__name__}: {error}")
        else:
            if kind not in valid_kinds[argument]:
                failures.append(f"{kind}: accepted")
    assert failures == []


def test_timeouts_that_cannot_be_represented_are_refused() -> None:
    for make in (dlres.HeteroPipeStrategy, dlres.PrefetchCacheDataModule):
        with pytest.raises(dlres.ConfigError, match="timeout must be a time above 0 and up to"):
            make(timeout=1e30)
