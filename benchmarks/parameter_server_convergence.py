"""Convergence of training with parameter servers, against training on the joint batch.

    python -m benchmarks.parameter_server_convergence           more than half an hour
    python -m benchmarks.parameter_server_convergence --quick   few steps: the figures mean little

Four workers, threads of one process, train the models of benchmarks/convergence.py, with random
delays. Each training runs with three seeds. The spread of the validation losses of joint training,
the largest minus the smallest, is the margin. Training with servers converges if its mean loss
exceeds that of joint training by at most the margin. The standard error of that mean is printed
beside it: asynchronous runs differ, and where it is larger than the margin three of them do not
decide.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.convergence import (
    PLAIN,
    RANKS,
    RUNS,
    SEEDS,
    Task,
    digits_task,
    gpt_task,
    recorded,
    train,
)
from benchmarks.support.command import Figures, flags
from benchmarks.support.parameter_server.jobs import packed_options
from benchmarks.support.parameter_server.thread_job import ThreadJob, open_servers
from benchmarks.support.report import at_most, conclude, table

NAME = "parameter_server_convergence"
# Options of jobs, by name.
JOBS: dict[str, dict[str, Any]] = {
    "bsp": {"consistency": "bsp"},
    "ssp, staleness 2": {"consistency": "ssp", "staleness": 2},
    "asp": {"consistency": "asp"},
}
_SERVERS = 2
# Longest random delay of a worker's step, in seconds.
_DELAY_SECONDS = 0.002
# Time limit of one training, in seconds.
_RUN_SECONDS = 900.0
_WEIGHT_DECAY = 0.01
# Learning rate of AdamW for the GPT. At the 0.003 of benchmarks/convergence.py late gradients made
# training unstable under every rule that was tried, see docs/notes/parameter_server.md.
_GPT_ADAMW_RATE = 0.001


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print, and return the exit status."""
    quick = flags(NAME, __doc__, argv, quick="few steps: the figures mean little").quick
    torch.set_num_threads(1)
    tasks = {}
    try:
        tasks["digits"] = digits_task(4 if quick else 1000)
    except ImportError as error:
        print(f"without digits: {error}. Install scikit-learn.", file=sys.stderr)
    gpt = gpt_task(4 if quick else 500)
    tasks["gpt"] = replace(gpt, lr={**gpt.lr, "adamw": _GPT_ADAMW_RATE})
    checks, raw = compare(tasks, SEEDS[:2] if quick else SEEDS)
    conclude(NAME, checks, raw)
    return 0


def compare(tasks: Mapping[str, Task], seeds: Sequence[int]) -> Figures:
    """Train each task with each optimizer and each job."""
    checks, rows = {}, []
    raw: dict[str, list[float]] = {}
    for task_name, task in tasks.items():
        for optimizer, runs in RUNS.items():
            joint = [train(task, optimizer, runs[PLAIN], seed).validation for seed in seeds]
            raw[f"{task_name}, {optimizer}, joint"] = joint
            margin, base = max(joint) - min(joint), statistics.mean(joint)
            rows.append([task_name, optimizer, "joint", base, 0.0, _standard_error(joint) / margin])
            for name, options in JOBS.items():
                losses = [train_with_servers(task, optimizer, options, seed) for seed in seeds]
                raw[f"{task_name}, {optimizer}, {name}"] = losses
                excess = (statistics.mean(losses) - base) / margin
                error = _standard_error(losses) / margin
                rows.append([task_name, optimizer, name, statistics.mean(losses), excess, error])
                key = f"{task_name}, {optimizer}, {name}: excess over margin"
                checks[key] = at_most(excess, 1.0)
                print(f"{key}: {excess:.3f}, standard error {error:.3f}", flush=True)
    header = ["task", "optimizer", "consistency", "loss", "excess / margin", "± standard error"]
    print(table(header, rows))
    return checks, raw


def _standard_error(losses: Sequence[float]) -> float:
    return statistics.stdev(losses) / math.sqrt(len(losses))


def train_with_servers(
    task: Task, optimizer_name: str, options: Mapping[str, Any], seed: int
) -> float:
    """Train with servers; return the loss of the final parameters on the validation data."""
    models = []
    for _ in range(RANKS):
        torch.manual_seed(seed)
        models.append(task.make())
    with open_servers(_SERVERS) as servers:
        job = ThreadJob(servers, RANKS, seconds=_RUN_SECONDS, **options)

        def work(worker: int) -> None:
            model, delays = models[worker], random.Random(seed * RANKS + worker)
            parameters = dict(model.named_parameters())
            optimizer, schedule = _optimizer(task, optimizer_name, model)
            session = job.join(worker, parameters, optimizer)
            for step in range(task.steps):
                optimizer.zero_grad()
                task.loss(model, task.batch(seed, step, worker)).backward()
                time.sleep(_DELAY_SECONDS * delays.random())
                packed = packed_options(optimizer)
                for one in reversed(session.exchange.keys):
                    session.push(one.key.index, parameters[one.key.name].grad, packed)
                session.wait()
                session.land()
                # Servers step the optimizer here. The schedule would warn that `optimizer.step` was
                # never called.
                optimizer._opt_called = True  # type: ignore[attr-defined]
                schedule.step()
            job.land_final(session, packed_options(optimizer))
            session.leave()

        job.run(work)
    with torch.no_grad():
        return recorded(task.loss(models[0], task.validation()))


def _optimizer(
    task: Task, name: str, model: torch.nn.Module
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return the optimizer and schedule that `benchmarks.convergence.train` uses."""
    lr = task.lr[name]
    optimizer: torch.optim.Optimizer
    if name == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=_WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, lr, total_steps=task.steps, pct_start=0.1, cycle_momentum=False
    )
    return optimizer, schedule


if __name__ == "__main__":
    raise SystemExit(main())
