"""States of pushes' codecs, saved and loaded by another number of workers, or with other keys."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.paramserver.execute.worker.push_codecs import PushCodecs, SavedPushes
from lightning_dlres.paramserver.gradient_codecs import job_codec
from tests.support.parameter_jobs import float32_keys, job_of

SIZES = {"weight": 30_000, "bias": 10, "other": 9000}
PUSHES = 3
COMPRESSED = ("weight", "other")


def codecs_of(
    worker: int, workers: int, *, key_bytes: int = 1 << 30, codec: str = "tbq", **options: Any
) -> PushCodecs:
    parameters = {name: torch.zeros(size) for name, size in SIZES.items()}
    job = job_of(
        ["tcp://127.0.0.1:1"],
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1),
        float32_keys(parameters, 1, key_bytes),
        worker=worker,
        workers=workers,
        codec=job_codec(codec, options),
    )
    return PushCodecs(job)


def pushed(workers: int, **options: Any) -> list[SavedPushes]:
    """Return what workers keep after some pushes of random gradients."""
    saved = []
    for worker in range(workers):
        codecs = codecs_of(worker, workers, **options)
        generator = torch.Generator().manual_seed(worker)
        for step in range(PUSHES):
            for key in codecs._job.keys:
                codec = codecs.codec(key.index, step)
                if codec is not None:
                    payload = torch.zeros(codec.payload_bytes(key.count), dtype=torch.uint8)
                    gradient = torch.randn(key.count, generator=generator)
                    codecs.write(key.index, codec, gradient, payload.numpy(), step)
        saved.append(codecs.save([PUSHES] * len(codecs._job.keys)))
    return saved


def unsent_mean(saved: Sequence[SavedPushes], name: str) -> Tensor:
    """Return what the mean over the workers lacks of a parameter's gradients."""
    total = torch.zeros(SIZES[name], dtype=torch.float64)
    for worker in saved:
        for entry in worker:
            if entry["parameter"] == name:
                end = entry["start"] + entry["count"]
                total[entry["start"] : end] += entry["tensors"]["residual"]
    return total / len(saved)


@pytest.mark.parametrize("key_bytes", [1 << 30, 64 << 10, 32 << 10])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (1, 3), (3, 1), (2, 3)])
def test_nothing_unsent_is_lost(before: int, after: int, key_bytes: int) -> None:
    saved = pushed(before, key_bytes=64 << 10)
    loaded = []
    for worker in range(after):
        codecs = codecs_of(worker, after, key_bytes=key_bytes)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if before == after else "ignore")
            codecs.load(saved)
        entries = codecs.save([1] * len(codecs._job.keys))
        # Small keys have no codec, and hence no number of pushes of an earlier job.
        assert {entry["pushes"] for entry in entries if entry["codec"]} == {PUSHES + 1}
        loaded.append(entries)
    for name in COMPRESSED:
        expected = unsent_mean(saved, name)
        assert expected.abs().max() > 0.1
        assert torch.allclose(unsent_mean(loaded, name), expected, rtol=0, atol=1e-6)


def test_the_same_job_goes_on_to_the_bit() -> None:
    saved = pushed(2, codec="dgc", momentum=0.5)
    for worker in range(2):
        codecs = codecs_of(worker, 2, codec="dgc", momentum=0.5)
        codecs.load(saved)
        for one, other in zip(codecs.save([0] * 100), saved[worker], strict=True):
            assert {**one, "tensors": None} == {**other, "tensors": None}
            assert one["tensors"].keys() == other["tensors"].keys() == {"residual", "momentum"}
            assert all(torch.equal(t, other["tensors"][name]) for name, t in one["tensors"].items())


def test_another_number_of_workers_is_named() -> None:
    with pytest.warns(UserWarning, match="pushes of 2 ranks, and this run has 3"):
        codecs_of(0, 3).load(pushed(2))


@pytest.mark.parametrize("codec", ["onebit", "terngrad", ""])
def test_another_codec_sends_the_residuals(codec: str) -> None:
    saved = pushed(2)
    first, second = ([codecs_of(worker, 2, codec=codec) for worker in range(2)] for _ in range(2))
    for codecs in first:
        codecs.load(saved)
    # A checkpoint that is saved before the next push has them, too.
    passed_on = [codecs.save([0] * 100) for codecs in first]
    for codecs in second:
        codecs.load(passed_on)
    for name in COMPRESSED:
        assert torch.equal(unsent_mean(passed_on, name), unsent_mean(saved, name))
    (key,) = (key for key in second[0]._job.keys if key.name == "weight")
    sender = second[0].codec(key.index, 0)
    nbytes = key.nbytes if sender is None else sender.payload_bytes(key.count)
    payload, decoded = torch.zeros(nbytes, dtype=torch.uint8), torch.empty(key.count)
    second[0].write(key.index, sender, torch.zeros(key.count), payload.numpy(), 0)
    if sender is None:
        decoded = payload.view(torch.float32)
    else:
        sender.expand(payload, decoded)
    expected = torch.zeros(key.count)
    for entry in saved[0]:
        if entry["parameter"] == "weight":
            expected = entry["tensors"]["residual"]
    assert torch.nn.functional.cosine_similarity(decoded, expected, dim=0) > 0.5
    # They are sent once.
    if sender is None:
        second[0].write(key.index, sender, torch.zeros(key.count), payload.numpy(), 1)
        assert not payload.any()


def test_a_parameter_that_is_gone_is_named() -> None:
    saved = [[{**entry, "parameter": f"old.{entry['parameter']}"} for entry in pushed(1)[0]]]
    codecs = codecs_of(0, 1)
    with pytest.warns(UserWarning, match=r"\['old.other', 'old.weight'\] were dropped, because"):
        codecs.load(saved)
    assert not any(entry["tensors"] for entry in codecs.save([0] * 100))
