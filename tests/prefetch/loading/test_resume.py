"""Resume after SIGKILL at random points, with other ranks, from the last checkpoint.

A run counts up to the last state that it saved, because the next run resumes there. In these steps,
every sample of every epoch is trained on exactly once.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_dlres.prefetch.cache.options import host_config
from lightning_dlres.prefetch.cache.samples import Sample
from lightning_dlres.prefetch.loading.loader import PrefetchLoader
from lightning_dlres.prefetch.loading.ranks import Ranks
from tests.support.rank_pool import RankContext, RankPool
from tests.support.sample_files import SAMPLES, bytes_of
from tests.support.waiting import wait_until

EPOCHS = 7
# Points of a step at which the victim may be killed.
PHASES = ("before", "trained", "waited", "saved")


def checked_id(sample: Sample) -> int:
    assert bytes(sample.data) == bytes_of(sample.sample_id)
    return sample.sample_id


def train(
    context: RankContext, folder: str, work: str, runtime: str, run: int, options: dict[str, Any]
) -> None:
    """Train until the end, or until this rank is killed.

    Every step writes its samples to a journal, and rank 0 saves a state after every second step.
    """
    os.environ["XDG_RUNTIME_DIR"] = runtime
    context.init_process_group()
    world = context.world_size
    loader = PrefetchLoader(
        "resume",
        host_config(folder, storage="files", capacity="8KiB", prefetch=5),
        ranks=Ranks(context.rank, world, tuple(range(world))),
        batch_size=options["batch"],
        num_workers=options["num_workers"],
        worker_type=options["worker_type"],
        tail="uneven",
        decode=checked_id,
        epochs=EPOCHS,
    )
    saved = Path(work, "state.json")
    if saved.exists():
        loader.load_state_dict(json.loads(saved.read_text())["state"])
    step = 0

    def kill_if_victim(phase: str) -> None:
        if (context.rank, step, phase) == (options["victim"], options["step"], options["phase"]):
            os.kill(os.getpid(), signal.SIGKILL)

    while loader.state_dict()["epoch"] < EPOCHS:
        epoch = loader.state_dict()["epoch"]
        iterator = iter(loader)
        while True:
            kill_if_victim("before")
            batch = next(iterator, None)
            sample_ids = [] if batch is None else batch.tolist()
            with Path(work, f"journal-{run}-{context.rank}").open("a") as journal:
                journal.write(json.dumps([step, epoch, sample_ids]) + "\n")
            kill_if_victim("trained")
            # A rank may have one batch less. The epoch ends when no rank has one.
            has_batch = torch.tensor([float(batch is not None)])
            dist.all_reduce(has_batch)
            kill_if_victim("waited")
            step += 1
            if not has_batch.item():
                break
            if context.rank == 0 and step % 2 == 0:
                state = {"run": run, "steps": step, "state": loader.state_dict()}
                saved.with_suffix(".new").write_text(json.dumps(state))
                saved.with_suffix(".new").replace(saved)
            kill_if_victim("saved")
    loader.close()


def test_every_sample_is_trained_once_although_ranks_are_killed(
    pool: RankPool, folder: Path, tmp_path: Path
) -> None:
    draw = random.Random(7)
    # Number of steps of each run that count.
    counted_steps: dict[int, float] = {}
    ended = False
    with tempfile.TemporaryDirectory(prefix="dl") as runtime:
        kills = 0
        for run in range(60):
            world = draw.randint(1, 3)
            options = {
                "batch": draw.randint(1, 4),
                "num_workers": draw.randint(0, 2),
                "worker_type": draw.choice(["thread", "thread", "thread", "process"]),
                "victim": draw.randrange(world),
                # After the twentieth kill all ranks may live.
                "step": draw.randint(0, 9) if kills < 20 else -1,
                "phase": draw.choice(PHASES),
            }
            outcomes = pool.run_expecting_errors(
                train, world, str(folder), str(tmp_path), runtime, run, options, timeout=60
            )
            saved = tmp_path / "state.json"
            last_save = json.loads(saved.read_text()) if saved.exists() else None
            if last_save and last_save["run"] == run:
                counted_steps[run] = last_save["steps"]
            died = [outcome for outcome in outcomes if outcome.error_type == "RankDied"]
            kills += bool(died)
            if not died:
                assert all(o.error_type is None for o in outcomes), outcomes
                counted_steps[run] = math.inf
                ended = True
                break
        assert ended
        assert kills >= 20
        wait_until(lambda: not list(Path(runtime).glob("*/*")), "the cache has ended", timeout=30)
    trained: dict[int, list[int]] = {epoch: [] for epoch in range(EPOCHS)}
    for run, steps in counted_steps.items():
        for journal in sorted(tmp_path.glob(f"journal-{run}-*")):
            for line in journal.read_text().splitlines():
                step, epoch, sample_ids = json.loads(line)
                if step < steps:
                    trained[epoch].extend(sample_ids)
    for epoch, sample_ids in trained.items():
        assert sorted(sample_ids) == list(range(SAMPLES)), f"epoch {epoch}"
