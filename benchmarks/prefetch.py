"""Loading small files from four storage hosts on slow links: this package beside its peers.

    python -m benchmarks.prefetch           about 20 minutes
    python -m benchmarks.prefetch --quick   tiny sizes: the figures mean nothing

The peers are a plain DataLoader, torchdata's ParallelMapper, LitData and MosaicML streaming. The
samples are several copies of the standard library's source files. Each storage host has a link of
200 Mbit/s and answers a request after 5 ms, a few at a time; the trainer's link has no limit. All
contenders read from the same storage nodes. LitData and Mosaic read uncompressed shards that their
own writers made; the others read the samples themselves. Needs root (see
benchmarks/support/testbed), and an environment with the peers, which
`make bench NAME=prefetch` installs.
"""

from __future__ import annotations

import json
import runpy
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.command import Figures, conclude_on_testbed, flags
from benchmarks.support.report import at_least, at_most, table
from benchmarks.support.testbed import Command, Host, HostError, Testbed

NAME = "prefetch"
ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".venv" / "peers" / "bin" / "python"
# Number of storage hosts, which come first, and index of the trainer's host.
STORES, TRAINER = 4, 4
# Rate of a storage host's link, in bits per second.
RATE_BITS = 200e6
# `Host.burst`: several of the 64 KiB pieces that the kernel sends.
BURST_BYTES = 256 << 10
# TCP payload over size of a full Ethernet frame, as the kernel's traffic shaper counts it.
PAYLOAD = 1448 / 1514


@dataclass(frozen=True)
class Settings:
    """Sizes of a run.

    Attributes:
        copies: Number of copies of the source files.
        seconds: Time limit of a measurement. LitData and Mosaic always read one epoch.
        repeats: Number of turns of this package and the best setting of LitData and Mosaic.
        delay: Delay of a storage node's replies.
        read_threads: Number of requests that a storage node serves at the same time.
        prefetch: Number of samples per request of this package.
        shard_bytes: Sizes of shards in the sweep of LitData and Mosaic.
        peer_workers: Numbers of workers in that sweep.
        litdata_ahead: Numbers of shards that each worker of LitData loads ahead.
        mosaic_ahead: Numbers of shards that each worker of Mosaic loads ahead.
    """

    copies: int = 16
    seconds: float = 8.0
    repeats: int = 3
    delay: str = "5ms"
    read_threads: int = 4
    prefetch: int = 32
    shard_bytes: tuple[int, ...] = (1 << 20, 4 << 20)
    peer_workers: tuple[int, ...] = (4, 8)
    litdata_ahead: tuple[int, ...] = (4,)
    # Mosaic shuffles over some hundred thousand samples. With fewer shards ahead it would wait for
    # every shard.
    mosaic_ahead: tuple[int, ...] = (1000,)


QUICK = Settings(
    copies=1,
    seconds=1.0,
    repeats=1,
    shard_bytes=(1 << 20,),
    peer_workers=(2,),
    litdata_ahead=(4,),
    mosaic_ahead=(1000,),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    settings = QUICK if flags(NAME, __doc__, argv).quick else Settings()
    if not PEERS.exists():
        reason = f"the peers' interpreter {PEERS} must exist. Run `make bench NAME={NAME}`."
        print(f"cannot measure here: {reason}", file=sys.stderr)
        return 2
    return conclude_on_testbed(NAME, lambda: compare(settings))


def compare(settings: Settings) -> Figures:
    """Write the sources and the peers' shards, and measure all contenders on a testbed."""
    work = Path(tempfile.mkdtemp(prefix="dlres-bench-"))
    try:
        samples, source_bytes = _copy_sources(work / "files", settings.copies)
        _call(
            [
                PEERS,
                ROOT / "benchmarks/support/prefetch_peers.py",
                "write",
                work / "shards",
                work / "files" / "0",
                settings.copies,
                "--sizes",
                *settings.shard_bytes,
            ]
        )
        hosts = [Host(rate="200mbit", burst=BURST_BYTES) for _ in range(STORES)] + [Host()]
        with Testbed(hosts) as bed:
            return _measure(bed, work, samples, source_bytes, settings)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _measure(
    bed: Testbed, work: Path, samples: int, source_bytes: int, settings: Settings
) -> Figures:
    bound = STORES * RATE_BITS / 8 * PAYLOAD
    mean = source_bytes / samples
    print(
        f"{samples} samples of {mean:.0f} bytes; the links' bound is {bound / 1e6:.1f} MB/s, "
        f"{bound / mean:.0f} samples/s",
        flush=True,
    )
    runs: dict[str, list[dict[str, Any]]] = {}
    common = ["--samples", samples, "--seconds", settings.seconds]

    def run(name: str, argv: Sequence[object]) -> float:
        figures = _run(bed, argv)
        runs.setdefault(name, []).append(figures)
        speed, samples_per_second = (figures[x] / figures["seconds"] for x in ("bytes", "samples"))
        print(f"{name}: {speed / 1e6:.2f} MB/s, {samples_per_second:.0f} samples/s", flush=True)
        return float(speed)

    sweep = _sweep(bed, work, settings, run)
    best = max(sweep, key=lambda name: sweep[name][0])
    with _serving(bed, work / "files", settings) as endpoints:
        loader_command = [sys.executable, "-m", "benchmarks.support.prefetch_ours"]
        files = ["--endpoints", endpoints, *common]
        for workers in (2, 8):
            run(
                f"DataLoader, {workers} workers",
                [*loader_command, "plain", *files, "--workers", workers],
            )
        for workers, method in ((8, "thread"), (32, "thread"), (8, "process")):
            name = f"ParallelMapper, {workers} {'threads' if method == 'thread' else 'processes'}"
            run(name, [*loader_command, "mapper", *files, "--workers", workers, "--method", method])
        # One thread decodes the samples, which the workers do for the peers.
        ours = [*loader_command, "ours", *files, "--prefetch", settings.prefetch, "--workers", 1]
    # The best setting of LitData and Mosaic, and this package, take turns.
    for _ in range(settings.repeats):
        with _serving(bed, sweep[best][1], settings) as endpoints:
            run(best, [*sweep[best][2], "--endpoints", endpoints])
        with _serving(bed, work / "files", settings) as endpoints:
            ours[ours.index("--endpoints") + 1] = endpoints
            run("ours", ours)
            run("ours, demand 80 %", [*ours, "--pace", 0.8 * bound])
    index_figures = _run(bed, [sys.executable, "-m", "benchmarks.support.prefetch_ours", "index"])
    checks, raw = _figures(runs, best, bound, settings)
    checks["seconds for the index of 10 million"] = at_most(index_figures["index_seconds"], 5.0)
    checks["management bytes per sample"] = at_most(index_figures["bytes_per_sample"], 64.0)
    return checks, {**raw, "ten million": index_figures}


def _sweep(bed: Testbed, work: Path, settings: Settings, run: Any) -> dict[str, Any]:
    """Measure LitData and Mosaic under all settings; leave out settings that fail.

    Returns:
        By name of the setting: bytes per second, the folder of its shards, and the command.
    """
    sweep: dict[str, Any] = {}
    for peer in ("litdata", "mosaic"):
        for size in settings.shard_bytes:
            shards = work / "shards" / peer / str(size)
            for workers in settings.peer_workers:
                shards_ahead = (
                    settings.litdata_ahead if peer == "litdata" else settings.mosaic_ahead
                )
                for ahead in shards_ahead:
                    # Mosaic's option counts samples, of about 17 kB each.
                    count = ahead if peer == "litdata" else ahead * size // 17_000
                    name = f"{peer}, {size >> 20} MiB, {workers} workers, {ahead} shards ahead each"
                    argv = [
                        PEERS,
                        ROOT / "benchmarks/support/prefetch_peers.py",
                        "read",
                        peer,
                        "--workers",
                        workers,
                        "--ahead",
                        count,
                    ]
                    with _serving(bed, shards, settings) as endpoints:
                        try:
                            speed = run(name, [*argv, "--endpoints", endpoints])
                        except HostError as error:
                            print(f"{name}: failed: {str(error)[-300:]}", flush=True)
                            continue
                    sweep[name] = (speed, shards, argv)
    return sweep


def _figures(
    runs: dict[str, list[dict[str, Any]]], best: str, bound: float, settings: Settings
) -> Figures:
    speeds = {
        name: statistics.median(run["bytes"] / run["seconds"] for run in runs_of_loader)
        for name, runs_of_loader in runs.items()
    }
    ours, paced = runs["ours"], runs["ours, demand 80 %"]
    rows = [(name, speed / 1e6, speed / bound) for name, speed in speeds.items()]
    print(table(("loader", "MB/s", "of the bound"), sorted(rows, key=lambda row: -row[1])))
    pairs = [
        (a["bytes"] / a["seconds"]) / (b["bytes"] / b["seconds"])
        for a, b in zip(ours, runs[best][-len(ours) :], strict=True)
    ]
    checks = {"of the links' bound": at_least(speeds["ours"] / bound, 0.9)}
    for workers, target in ((2, 5.0), (8, 3.0)):
        plain = speeds[f"DataLoader, {workers} workers"]
        # The target is at most nine tenths of the ratio that the links allow.
        allowed = min(target, 0.9 * bound / plain)
        print(f"the bound allows {bound / plain:.2f} times the DataLoader with {workers} workers")
        checks[f"over the DataLoader with {workers} workers"] = at_least(
            speeds["ours"] / plain, round(allowed, 3)
        )
    checks["over the better of LitData and Mosaic"] = at_least(statistics.median(pairs), 0.95)
    requests_per_sample = statistics.median(run["requests_per_sample"] for run in ours)
    checks["requests per sample, times samples per request"] = at_most(
        requests_per_sample * settings.prefetch, 1.1
    )
    stall = statistics.median(run["stalled"] for run in paced)
    checks["stall at 80 % demand"] = at_most(stall, 0.02)
    paced_speed = statistics.median(run["bytes"] / run["seconds"] for run in paced)
    raw = {
        "bound": bound,
        "best": best,
        "speeds": speeds,
        "ratios": pairs,
        "paced_over_bound": paced_speed / bound,
        "runs": runs,
        "settings": asdict(settings),
    }
    return checks, raw


@contextmanager
def _serving(bed: Testbed, source: Path, settings: Settings) -> Iterator[str]:
    """Context manager that runs a storage node on every storage host, and yields the addresses."""
    running = []
    # Run by its path, because importing the package would import torch, which takes seconds.
    lightweight_command = runpy.run_path(
        str(ROOT / "lightning_dlres/core/host/lightweight_process.py")
    )["lightweight_command"]
    try:
        for node in range(STORES):
            options = [
                "serve",
                source,
                "--nodes",
                STORES,
                "--node",
                node,
                "--insecure",
                "--bind",
                bed.hosts[node].address,
                "--read-threads",
                settings.read_threads,
                "--emulate-delay",
                settings.delay,
            ]
            process = bed.popen(
                node,
                lightweight_command("lightning_dlres.cli.store:serve_main", *map(str, options)),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=ROOT,
                text=True,
            )
            running.append(process)
        addresses = []
        for process in running:
            line = process.stdout.readline()
            if not line.startswith("Serving"):
                raise HostError(f"a storage node must print 'Serving' at its start, got {line!r}")
            addresses.append(line.rpartition(" ")[2].strip())
        yield ",".join(addresses)
    finally:
        for process in running:
            process.kill()
            process.wait()


def _run(bed: Testbed, argv: Sequence[object]) -> dict[str, Any]:
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = Command(TRAINER, [str(part) for part in argv], env)
    (out,) = bed.run([command], timeout=180.0)
    figures: dict[str, Any] = json.loads(out.splitlines()[-1])
    return figures


def _copy_sources(target: Path, copies: int) -> tuple[int, int]:
    """Copy the standard library's source files.

    Returns:
        Number and bytes of all copies.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if "site-packages" not in path.parts and path.stat().st_size
    ]
    for copy in range(copies):
        for path in files:
            destination = target / str(copy) / path.relative_to(root)
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, destination)
    return len(files) * copies, copies * sum(path.stat().st_size for path in files)


def _call(argv: Sequence[object]) -> None:
    done = subprocess.run([str(part) for part in argv], capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostError(f"{argv[1]}: {done.stderr[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
