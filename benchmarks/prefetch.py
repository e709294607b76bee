"""Small files from four storage hosts on slow links: this package beside a plain DataLoader,
torchdata's ParallelMapper, LitData and MosaicML streaming, in one run.

    python -m benchmarks.prefetch           about 20 minutes
    python -m benchmarks.prefetch --quick   tiny sizes: the figures mean nothing

The standard library's source files, several times over, are samples. Each storage host has a link
of 200 Mbit/s and answers a request after 5 ms, a few at a time; the trainer's link is not shaped.
All contenders read from the same storage nodes: LitData and Mosaic the shards that their own
writers have made, without compression, everybody else the samples. Needs root (see
benchmarks/support/testbed.py), and the peers: `make bench NAME=prefetch` installs them apart.
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
STORES, TRAINER = 4, 4
RATE_BITS = 200e6
# What the kernel hands over in one piece, several times over: see Host.
BURST_BYTES = 256 << 10
# Of a full frame of Ethernet, as the kernel's shaper counts it, what is TCP's payload.
PAYLOAD = 1448 / 1514


@dataclass(frozen=True)
class Settings:
    """Sizes of a run."""

    copies: int = 16
    seconds: float = 8.0
    repeats: int = 3
    delay: str = "5ms"
    read_threads: int = 4
    prefetch: int = 32
    shard_bytes: tuple[int, ...] = (1 << 20, 4 << 20)
    peer_workers: tuple[int, ...] = (4, 8)
    litdata_ahead: tuple[int, ...] = (4,)
    # Mosaic shuffles over some hundred thousand samples: little ahead, it waits for every shard.
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
        print(f"cannot measure here: no {PEERS}. Try `make bench NAME={NAME}`.", file=sys.stderr)
        return 2
    return conclude_on_testbed(NAME, lambda: compare(settings))


def compare(settings: Settings) -> Figures:
    """Measure everybody."""
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
        found = _run(bed, argv)
        runs.setdefault(name, []).append(found)
        speed = found["bytes"] / found["seconds"]
        print(
            f"{name}: {speed / 1e6:.2f} MB/s, {found['samples'] / found['seconds']:.0f} samples/s",
            flush=True,
        )
        return float(speed)

    swept = _sweep(bed, work, settings, run)
    best = max(swept, key=lambda name: swept[name][0])
    with _serving(bed, work / "files", settings) as endpoints:
        side = [sys.executable, "-m", "benchmarks.support.prefetch_ours"]
        files = ["--endpoints", endpoints, *common]
        for workers in (2, 8):
            run(f"DataLoader, {workers} workers", [*side, "plain", *files, "--workers", workers])
        for workers, method in ((8, "thread"), (32, "thread"), (8, "process")):
            name = f"ParallelMapper, {workers} {'threads' if method == 'thread' else 'processes'}"
            run(name, [*side, "mapper", *files, "--workers", workers, "--method", method])
        # One thread takes the samples apart, as workers do it for the others.
        ours = [*side, "ours", *files, "--prefetch", settings.prefetch, "--workers", 1]
    # The best of the peers and we, in turns.
    for _ in range(settings.repeats):
        with _serving(bed, swept[best][1], settings) as endpoints:
            run(best, [*swept[best][2], "--endpoints", endpoints])
        with _serving(bed, work / "files", settings) as endpoints:
            ours[ours.index("--endpoints") + 1] = endpoints
            run("ours", ours)
            run("ours, demand 80 %", [*ours, "--pace", 0.8 * bound])
    many = _run(bed, [sys.executable, "-m", "benchmarks.support.prefetch_ours", "index"])
    checks, raw = _figures(runs, best, bound, settings)
    checks["seconds for the index of 10 million"] = at_most(many["index_seconds"], 5.0)
    checks["management bytes per sample"] = at_most(many["bytes_per_sample"], 64.0)
    return checks, {**raw, "ten million": many}


def _sweep(bed: Testbed, work: Path, settings: Settings, run: Any) -> dict[str, Any]:
    """Return of every setting of the peers: bytes a second, its shards and its command."""
    swept: dict[str, Any] = {}
    for peer in ("litdata", "mosaic"):
        for size in settings.shard_bytes:
            shards = work / "shards" / peer / str(size)
            for workers in settings.peer_workers:
                aheads = settings.litdata_ahead if peer == "litdata" else settings.mosaic_ahead
                for ahead in aheads:
                    # Mosaic counts samples.
                    count = ahead if peer == "litdata" else ahead * size // 17_000
                    name = f"{peer}, {size >> 20} MiB, {workers} workers, {ahead} shards ahead"
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
                    swept[name] = (speed, shards, argv)
    return swept


def _figures(
    runs: dict[str, list[dict[str, Any]]], best: str, bound: float, settings: Settings
) -> Figures:
    speeds = {
        name: statistics.median(run["bytes"] / run["seconds"] for run in found)
        for name, found in runs.items()
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
        # A ratio that the links do not allow is not asked for.
        allowed = min(target, 0.9 * bound / plain)
        print(f"the bound allows {bound / plain:.2f} times the DataLoader with {workers} workers")
        checks[f"over {workers} workers"] = at_least(speeds["ours"] / plain, round(allowed, 3))
    checks["over the better of LitData and Mosaic"] = at_least(statistics.median(pairs), 0.95)
    asked = statistics.median(run["requests_per_sample"] for run in ours)
    checks["requests per sample, times k"] = at_most(asked * settings.prefetch, 1.1)
    stall = statistics.median(run["stalled"] for run in paced)
    checks["stall at 80 % demand"] = at_most(stall, 0.02)
    demand = statistics.median(run["bytes"] / run["seconds"] for run in paced)
    raw = {
        "bound": bound,
        "best": best,
        "speeds": speeds,
        "ratios": pairs,
        "demand": demand / bound,
        "runs": runs,
        "settings": asdict(settings),
    }
    return checks, raw


@contextmanager
def _serving(bed: Testbed, source: Path, settings: Settings) -> Iterator[str]:
    """Run a storage node on every storage host."""
    running = []
    # By its path: importing the package would bring torch, which this process does without.
    light = runpy.run_path(str(ROOT / "lightning_dlres/core/host/lightweight_process.py"))[
        "lightweight_command"
    ]
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
                light("lightning_dlres.cli.store:serve_main", *map(str, options)),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=ROOT,
                text=True,
            )
            running.append(process)
        names = []
        for process in running:
            line = process.stdout.readline()
            if not line.startswith("Serving"):
                raise HostError(f"a storage node has not started: {line!r}")
            names.append(line.rpartition(" ")[2].strip())
        yield ",".join(names)
    finally:
        for process in running:
            process.kill()
            process.wait()


def _run(bed: Testbed, argv: Sequence[object]) -> dict[str, Any]:
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = Command(TRAINER, [str(part) for part in argv], env)
    (out,) = bed.run([command], timeout=180.0)
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def _copy_sources(target: Path, copies: int) -> tuple[int, int]:
    """Copy the standard library's source files so many times; return how many, and their bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if "site-packages" not in path.parts and path.stat().st_size
    ]
    for copy in range(copies):
        for path in files:
            to = target / str(copy) / path.relative_to(root)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)
    return len(files) * copies, copies * sum(path.stat().st_size for path in files)


def _call(argv: Sequence[object]) -> None:
    done = subprocess.run([str(part) for part in argv], capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostError(f"{argv[1]}: {done.stderr[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
