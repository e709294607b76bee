"""Codecs of a worker's pushes, and what they keep from one push to the next.

A codec keeps what it has not sent, the residual, in a state for each key. The number of a push
decides the stage of a codec's warm-up, and its random numbers. A checkpoint holds both, for each
worker, so that a resumed run pushes what an uninterrupted one would. With another number of
workers, each one takes the mean of all states: updates use means over the workers, so nothing of
the residuals is lost. With other keys, states are cut anew. A residual that no state can take, as
without a codec, is added to the next gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dlres.codecs.gradient.base import RESIDUAL, GradientCodec, State
from lightning_dlres.core.arrays import byte_array
from lightning_dlres.paramserver.execute.worker.job import Job
from lightning_dlres.paramserver.gradient_codecs import codec_of
from lightning_dlres.paramserver.plan.keys import Key

# Saved state of one worker: a list of entries, one for each key, with the name of the "parameter",
# "start" and "count" of the key's elements, the name of the "codec" ("" for none), the number of
# "pushes" so far, and the "tensors" of the codec's state by name.
SavedPushes = Sequence[Mapping[str, Any]]


class PushCodecs:
    """Codecs of one worker, with their states.

    Args:
        job: The job.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._codecs = [codec_of(key, job.codec) for key in job.keys]
        # By index of the key.
        self._states: dict[int, State] = {}
        # Residuals that no state can take, float32[count] by index of the key.
        self._unsent: dict[int, Tensor] = {}
        # For each key, the number of pushes before this job.
        self._pushes_before = [0] * len(job.keys)

    def step(self, key: int, number: int) -> int:
        """Return the step of a codec, from 0; pushes of earlier jobs count.

        Args:
            key: Index of the key.
            number: Number of the push in this job, from 1.
        """
        return self._pushes_before[key] + number - 1

    def codec(self, key: int, step: int) -> GradientCodec | None:
        """Return the codec of a key at a step; None if its gradients travel as they are."""
        codec = self._codecs[key]
        return None if codec is None else codec.at_step(step)

    def write(
        self, key: int, codec: GradientCodec | None, values: Tensor, payload: Any, step: int
    ) -> None:
        """Write the payload of a push.

        Args:
            key: Index of the key.
            codec: Its codec at this step, see `codec`.
            values: Gradient, flat and on the CPU; float32 for a key with a codec.
            payload: Destination, uint8[payload bytes at this step].
            step: Step of the codec.
        """
        unsent = self._unsent.pop(key, None)
        if unsent is not None:
            values = values + unsent.to(values.dtype)
        if codec is None:
            payload[:] = byte_array(values)
            return
        # Keys, steps and workers have different seeds.
        seed = ((step + 1) * self._job.workers + self._job.worker) * len(self._job.keys) + key
        codec.compress(values, self._state(key, codec), torch.from_numpy(payload), seed=seed)

    def save(self, numbers: Sequence[int]) -> SavedPushes:
        """Return what this worker keeps (tensors are not copied).

        Args:
            numbers: Number of the latest push of each key in this job.
        """
        entries = []
        for key, codec in zip(self._job.keys, self._codecs, strict=True):
            tensors = dict(self._states.get(key.index, {}))
            if key.index in self._unsent:
                tensors[RESIDUAL] = self._unsent[key.index]
            if codec is not None or tensors:
                entries.append(
                    {
                        "parameter": key.name,
                        "start": key.start,
                        "count": key.count,
                        "codec": "" if codec is None else codec.name,
                        "pushes": self._pushes_before[key.index] + numbers[key.index],
                        "tensors": tensors,
                    }
                )
        return entries

    def load(self, saved: Sequence[SavedPushes]) -> None:
        """Go on from an earlier job, before the first push; warn of what is not as it was.

        Args:
            saved: Saved states of all workers of that job.
        """
        workers = len(saved)
        sources = saved if workers != self._job.workers else [saved[self._job.worker]]
        entries: dict[str, list[Mapping[str, Any]]] = {}
        for source in sources:
            for entry in source:
                entries.setdefault(entry["parameter"], []).append(entry)
        for key in self._job.keys:
            pieces = [entry for entry in entries.get(key.name, ()) if _overlap(entry, key)]
            self._load_key(key, pieces, 1 / len(sources))
        if workers != self._job.workers:
            warnings.warn(
                f"The checkpoint has residuals of pushes of {workers} ranks, and this run has "
                f"{self._job.workers}: they were shared out again.",
                stacklevel=2,
            )
        lost = sorted(entries.keys() - {key.name for key in self._job.keys})
        if lost:
            warnings.warn(
                f"The checkpoint's residuals of pushes of {lost} were dropped, because these "
                "parameters are gone or no longer trained.",
                stacklevel=2,
            )

    def _state(self, key: int, codec: GradientCodec) -> State:
        if key not in self._states:
            count = self._job.keys[key].count
            self._states[key] = codec.new_state(count, torch.device("cpu"))
        return self._states[key]

    def _load_key(self, key: Key, pieces: Sequence[Mapping[str, Any]], factor: float) -> None:
        """Add what earlier jobs have kept of a key, times a factor, to what this one keeps."""
        codec = self._codecs[key.index]
        for entry in pieces:
            is_same_codec = codec is not None and entry["codec"] == codec.name
            if is_same_codec:
                pushes = max(self._pushes_before[key.index], entry["pushes"])
                self._pushes_before[key.index] = pushes
            for name, tensor in entry["tensors"].items():
                # Another codec can send a residual, but has no use for other tensors.
                if is_same_codec or name == RESIDUAL:
                    self._load_tensor(key, entry, name, tensor, factor)

    def _load_tensor(
        self, key: Key, entry: Mapping[str, Any], name: str, tensor: Tensor, factor: float
    ) -> None:
        codec = self._codecs[key.index]
        state = {} if codec is None else self._state(key.index, codec)
        target = state.get(name)
        if target is None and name == RESIDUAL:
            target = self._unsent.setdefault(key.index, torch.zeros(key.count))
        if target is None:
            return
        if (entry["start"], entry["count"], factor) == (key.start, key.count, 1.0):
            target.copy_(tensor)
        elif (tensor.numel(), target.numel()) == (entry["count"], key.count):
            # Tensors without an entry per element, such as a threshold, begin anew.
            first = max(entry["start"], key.start)
            end = min(entry["start"] + entry["count"], key.start + key.count)
            piece = tensor.reshape(-1)[first - entry["start"] : end - entry["start"]]
            target.view(-1)[first - key.start : end - key.start] += factor * piece


def _overlap(entry: Mapping[str, Any], key: Key) -> bool:
    end = entry["start"] + entry["count"]
    return bool(entry["start"] < key.start + key.count and key.start < end)
