"""Rank that trains a case with `torch.distributed.pipelining.pipeline()`.

The peer gets all help that its user could give: the model in training mode, no cache of keys and
values, an output that is only the loss or the tensors that the loss needs, the middle one of our
layers as its split point, whose inputs are made contiguous, and, if that cannot be exported,
attention in plain operations.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Pipe, ScheduleGPipe, SplitPoint, pipeline
from torch.utils._pytree import tree_map_only

from benchmarks.support.capture.cuts import as_call, layer_names, split_points
from benchmarks.support.capture.quiet import be_quiet
from benchmarks.support.capture.rank_report import RankReport, reporting
from benchmarks.support.capture.task import (
    AS_IT_IS,
    EAGER,
    Task,
    make_net,
    make_optimizer,
    microbatches,
    reference,
)
from benchmarks.support.capture_models.case import (
    SAMPLES,
    Batch,
    CaptureCase,
    call,
    cut,
    own_loss,
    tensors_of,
)

# The pipeline puts this prefix before the names of the model.
_PREFIX = "net."


class TensorsOnly(nn.Module):
    """Model whose output is a loss, or the tensors that its loss needs.

    Args:
        net: The model.
        case: Its case.
        batch: Batch that shows which tensors of the output have gradients.
    """

    def __init__(self, net: nn.Module, case: CaptureCase, batch: Batch) -> None:
        super().__init__()
        self.net, self._has_loss = net, case.loss is own_loss
        self._names = list(batch) if isinstance(batch, dict) else []
        buffers = [buffer.clone() for buffer in net.buffers()]
        tensors = list(tensors_of(call(net, batch)))
        for buffer, before in zip(net.buffers(), buffers, strict=True):
            buffer.data.copy_(before)
        self._places = [n for n, tensor in enumerate(tensors) if tensor.requires_grad]

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        # Stages after the first get no inputs but those that the first stage has computed.
        args = tuple(tensor.clone() for tensor in args)
        kwargs = {name: tensor.clone() for name, tensor in kwargs.items()}
        if self._names and not kwargs:
            args, kwargs = (), dict(zip(self._names, args, strict=True))
        output = self.net(*args, **kwargs)
        if self._has_loss:
            return output.loss
        tensors = list(tensors_of(output))
        return tuple(tensors[place] for place in self._places)


def main() -> None:
    """Train the case of `sys.argv`."""
    be_quiet()
    task, rank = Task.from_json(sys.argv[1]), int(os.environ["RANK"])
    with reporting(Path(task.directory, f"peer-{rank}"), (Exception,)) as report:
        try:
            train(task, rank, report)
        except Exception as error:
            # The outer errors of the pipeline say only in which stage it failed.
            raise root_cause(error) from None


def train(task: Task, rank: int, report: RankReport) -> None:
    """Train a stage of a case."""
    case, batches = task.case(), task.batches()
    count = microbatches(reference(case, make_net(case)))
    micro_batch = cut(batches[0], SAMPLES // count)[0]
    names = split_points(layer_names(case, batches[0]), task.stages)
    report.notes = {"split points": names}
    pipe, help_given = first_exported(case, micro_batch, names)
    report.notes["help"] = help_given
    dist.init_process_group("gloo")
    stage = pipe.build_stage(rank, torch.device("cpu"))
    parameters = [p for p in stage.submod.parameters() if p.requires_grad]
    optimizer = make_optimizer(case.name, parameters) if parameters else None
    schedule = ScheduleGPipe(stage, count, loss_fn=loss_function(case))
    for number, batch in enumerate(batches):
        report.enter(f"step {number + 1}")
        losses: list[Tensor] = []
        args, kwargs = peer_call(batch) if rank == 0 else ((), {})
        # The target is a formality: the loss needs none.
        target = torch.zeros(SAMPLES) if stage.is_last else None
        schedule.step(*args, target=target, losses=losses, return_outputs=False, **kwargs)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        if stage.is_last:
            report.losses.append(float(torch.stack(losses).mean()))
    weights = stage.submod.state_dict()
    report.save_weights({name.removeprefix(_PREFIX): value for name, value in weights.items()})
    dist.barrier()


def first_exported(case: CaptureCase, batch: Batch, names: Sequence[str]) -> tuple[Pipe, str]:
    """Return the pipeline of a model, and the help that it took.

    Raises:
        Exception: Error of the first try, if no help helps.
    """
    errors = []
    for help_given in (AS_IT_IS, EAGER):
        net = make_net(case)
        without_cache(net)
        if help_given == EAGER:
            if not hasattr(net, "set_attn_implementation"):
                break
            net.set_attn_implementation("eager")
        module = TensorsOnly(net, case, batch)
        args, kwargs = peer_call(batch)
        spec = {_PREFIX + name: SplitPoint.BEGINNING for name in names}
        for name in names:
            net.get_submodule(name).register_forward_pre_hook(_contiguous, with_kwargs=True)
        try:
            pipe = pipeline(module, args, kwargs, split_spec=spec)
            if pipe.num_stages != len(names) + 1:
                raise RuntimeError(f"pipeline() made {pipe.num_stages} stages")
            return pipe, help_given
        except Exception as error:
            errors.append(error)
    raise errors[0]


def peer_call(batch: Batch) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the arguments for the peer: by position if a name is one that its schedule takes."""
    if isinstance(batch, dict) and "target" in batch:
        return tuple(batch.values()), {}
    return as_call(batch)


def _contiguous(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return contiguous arguments: the pipeline cannot send others."""
    return tree_map_only(Tensor, Tensor.contiguous, (args, kwargs))


def root_cause(error: BaseException) -> BaseException:
    """Return the error that caused an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def without_cache(net: nn.Module) -> None:
    """Turn off caches of keys and values, as training needs none."""
    for module in net.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False


def loss_function(case: CaptureCase) -> Any:
    """Return the loss of a stage's output and a target."""
    if case.loss is own_loss:
        return lambda output, target: next(tensors_of(output))
    return lambda output, target: case.loss(output)
