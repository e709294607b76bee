"""Device memory and step time of plain training, of its peers, and of `Offloader` under budgets.

    python -m benchmarks.activation_offload

All trainings take turns in one process, on the first GPU or else on the CPU. On the CPU, "device"
means the process's own memory, and tensors are offloaded to a mapped file. The peers are
`torch.utils.checkpoint` around every block, `torch.autograd.graph.save_on_cpu`, and torchtune's
`OffloadActivations` if it is installed and there is a GPU. The table shows the peak bytes of a step
in the allocator, and the median step time. build/activation_offload.png shows the same.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from benchmarks.support.command import flags
from benchmarks.support.report import Check, at_most, conclude, table, versions
from lightning_dlres.core.device.gpu import gpu_of
from lightning_dlres.memory.config import ACTIONS, MemoryConfig
from lightning_dlres.memory.offloader import Offloader
from lightning_dlres.memory.profile.meter import AllocatorMeter, ProfilerMeter

# Budgets, as parts of the bytes that plain training saves for backward.
BUDGETS = (0.75, 0.5, 0.3)
PICTURE = Path("build/activation_offload.png")
# Largest step time with half of the saved bytes. On a GPU it is divided by that of plain training,
# on the CPU by the bound: a plain step and the copies.
SLOWER_TARGET, BOUND_TARGET = 1.05, 1.03
# Relative difference in bytes or time up to which two trainings count as equal.
_NOISE = 0.02
# Number of steps within which each offloader must have a plan.
_MAX_STEPS_WITHOUT_PLAN = 30


@dataclass(frozen=True)
class Settings:
    """Sizes of the networks, and number of measured steps (`rounds`)."""

    width: int = 384
    blocks: int = 6
    batch: int = 8
    length: int = 256
    channels: int = 32
    image: int = 48
    rounds: int = 11


QUICK = Settings(32, 2, 2, 16, 4, 8, 2)
ON_GPU = Settings(2048, 16, 8, 1024, 128, 128, 21)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.heads = max(1, width // 64)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)


def transformer(s: Settings) -> tuple[nn.Sequential, Tensor]:
    blocks = nn.Sequential(*(Block(s.width) for _ in range(s.blocks)))
    return blocks, torch.randn(s.batch, s.length, s.width)


def relu_cnn(s: Settings) -> tuple[nn.Sequential, Tensor]:
    def block(inputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, s.channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(s.channels, s.channels, 3, padding=1),
            nn.ReLU(),
        )

    blocks = [block(3), *(block(s.channels) for _ in range(s.blocks - 1))]
    return nn.Sequential(*blocks), torch.randn(4 * s.batch, 3, s.image, s.image)


NETWORKS = {"transformer": transformer, "ReLU CNN": relu_cnn}


@dataclass
class Way:
    """One way to train a network, with its measurements.

    Attributes:
        name: Name in the table.
        network: The network.
        around: Returns the context manager in which a step runs.
        forward: Forward of a step; None is the network itself.
        is_ours: True for this package's offloader.
        offloader: The offloader, if there is one.
        optimizer: Optimizer of the network's parameters.
        seconds: Seconds of each measured step.
        peak: Peak bytes of a step.
        gradients: Gradients of the last step, in the order of the parameters.
    """

    name: str
    network: nn.Module
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    forward: Callable[[Tensor], Tensor] | None = None
    is_ours: bool = False
    offloader: Offloader | None = None
    optimizer: Any = None
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    gradients: list[Tensor] = field(default_factory=list)

    @property
    def is_planned(self) -> bool:
        """True if steps follow a plan already, or need none."""
        return self.offloader is None or self.offloader.measurements.steps > 0

    def step(self, x: Tensor) -> None:
        torch.manual_seed(0)
        with self.around():
            out = (self.forward or self.network)(x)
            out.float().square().mean().backward()
            self.gradients = [p.grad.clone() for p in self.network.parameters()]  # type: ignore[union-attr]
            self.optimizer.step()
            self.optimizer.zero_grad()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    on_gpu = torch.cuda.is_available()
    quick = flags("activation_offload", __doc__, argv).quick
    settings = QUICK if quick else ON_GPU if on_gpu else Settings()
    device = torch.device("cuda" if on_gpu else "cpu")
    # The gradients of all ways must be equal, and some kernels of GPUs add up in any order.
    torch.use_deterministic_algorithms(on_gpu, warn_only=True)
    checks: dict[str, Check] = {}
    raw: dict[str, Any] = {"settings": vars(settings), **versions()}
    rows: list[list[object]] = []
    ways_by_network: dict[str, list[Way]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, make in NETWORKS.items():
            ways = ways_by_network[name] = measure(make, settings, device, Path(directory))
            plain = ways[0]
            for way in ways:
                ratio = median(a / b for a, b in zip(way.seconds, plain.seconds, strict=True))
                mib = way.peak / 2**20
                rows.append([name, way.name, mib, way.peak / plain.peak, ratio])
            checks |= checks_of(name, ways, on_gpu)
            raw[name] = {w.name: {"peak": w.peak, "seconds": w.seconds} for w in ways}
            raw[name]["predicted"] = predictions(ways)
    columns = ("network", "way", "peak MiB", "of plain", "step over plain")
    print(table(columns, rows))
    print(f"torchtune: {reason_without_torchtune(device) or 'measured'}")
    for name, ways in ways_by_network.items():
        print(link_bound(name, ways))
    draw(ways_by_network)
    print(f"picture: {PICTURE}")
    conclude("activation_offload", checks, raw)
    return 0


def measure(make: Any, settings: Settings, device: torch.device, directory: Path) -> list[Way]:
    """Return all ways to train one network, measured in turns."""
    torch.manual_seed(0)
    network, x = make(settings)
    start = {name: value.clone() for name, value in network.state_dict().items()}
    x = x.to(device)

    def copy() -> nn.Sequential:
        twin: nn.Sequential = make(settings)[0]
        twin.load_state_dict(start)
        return twin.to(device)

    ways = [Way("plain", copy())]
    blocks = copy()
    ways.append(Way("torch checkpoint, every block", blocks, forward=checkpointed(blocks)))
    ways.append(Way("save_on_cpu", copy(), lambda: save_on_cpu(pin_memory=device.type == "cuda")))
    if reason_without_torchtune(device) is None:
        offload = importlib.import_module("torchtune.training").OffloadActivations
        ways.append(Way("torchtune OffloadActivations", copy(), offload))
    for budget in (*BUDGETS, "min"):
        ways.append(ours(copy(), budget, device, directory, x))
    for way in ways:
        way.optimizer = torch.optim.SGD(way.network.parameters(), lr=1e-3)
    turn = counted = 0
    while counted < settings.rounds:
        # In its first steps an offloader measures, to make its plan, so their times do not count.
        counts = all(way.is_planned for way in ways)
        if turn == _MAX_STEPS_WITHOUT_PLAN and not counts:
            raise RuntimeError(f"every offloader must have a plan after {turn} steps")
        for way in ways if turn % 2 else reversed(ways):
            start_time = time.perf_counter()
            way.step(x)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if counts:
                way.seconds.append(time.perf_counter() - start_time)
        turn, counted = turn + 1, counted + counts
        require_same(ways)
    for way in ways:
        way.peak = peak_of(way, x, device)
    return ways


def checkpointed(blocks: nn.Sequential) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    return forward


def ours(
    network: nn.Module, budget: float | str, device: torch.device, directory: Path, x: Tensor
) -> Way:
    """Return this package's way to train under a budget.

    Args:
        network: The network.
        budget: Part of the bytes that plain training saves, or "min" for the smallest peak.
        device: Device of the network.
        directory: Directory for offloaded tensors on the CPU.
        x: Input of a step.
    """
    disk = None if device.type == "cuda" else directory
    if isinstance(budget, str):
        options = MemoryConfig(budget=budget, disk=disk, actions=ACTIONS)
    else:
        options = MemoryConfig(budget="1PiB", saved_budget=budget, disk=disk, actions=ACTIONS)
    offloader = Offloader(network, options.for_device(device), device)

    @contextmanager
    def around() -> Iterator[None]:
        parameters = list(network.parameters())

        def resident() -> list[Tensor]:
            return [*parameters, *(p.grad for p in parameters if p.grad is not None), x]

        with offloader.step("one", parameters, resident):
            yield

    name = f"ours, {budget:.0%} of saved" if isinstance(budget, float) else "ours, min"
    return Way(name, network, around, is_ours=True, offloader=offloader)


def require_same(ways: Sequence[Way]) -> None:
    """Raise unless all ways compute the same gradients, bit for bit.

    Otherwise their times could not be compared.
    """
    for way in ways[1:]:
        for one, other in zip(ways[0].gradients, way.gradients, strict=True):
            if not torch.equal(one, other):
                raise RuntimeError(f"{way.name}: gradients must equal those of plain training")


def peak_of(way: Way, x: Tensor, device: torch.device) -> int:
    """Return the peak bytes on the device in one step."""
    gpu = gpu_of(device)
    meter = ProfilerMeter() if gpu is None else AllocatorMeter(gpu)
    way.gradients = []
    with meter.running(lambda: [x, *way.network.parameters()]):
        first = meter.mark(is_own_work=False)
        way.step(x)
        last = meter.mark(is_own_work=False)
    return meter.trace().peak(first, last)


def checks_of(name: str, ways: Sequence[Way], on_gpu: bool) -> dict[str, Check]:
    """Return the checks of one network.

    They are the number of pairs (peer, budget) in which the peer is better in bytes and time, and
    the step time with half of the saved bytes.
    """
    our_ways = [way for way in ways if way.is_ours]
    better = [
        (peer.name, way.name)
        for way in our_ways
        for peer in ways
        if not peer.is_ours
        and peer.peak < (1 - _NOISE) * way.peak
        and median(peer.seconds) < (1 - _NOISE) * median(way.seconds)
    ]
    for peer, way in better:
        print(f"{name}: {peer} is better than {way} on both axes")
    checks = {f"{name}: peers that are better on both axes": at_most(len(better), 0)}
    half = half_of(ways)
    pairs = list(zip(half.seconds, ways[0].seconds, strict=True))
    if on_gpu:
        key = f"{name}: step with half of what is saved, over plain"
        checks[key] = at_most(median(own / plain for own, plain in pairs), SLOWER_TARGET)
    else:
        # On the CPU training waits for each copy.
        copies = copy_seconds(half)
        key = f"{name}: step with half of what is saved, over its bound"
        checks[key] = at_most(median(own / (plain + copies) for own, plain in pairs), BOUND_TARGET)
    return checks


def half_of(ways: Sequence[Way]) -> Way:
    """Return our way with half of the saved bytes."""
    return next(way for way in ways if way.is_ours and "50%" in way.name)


def copy_seconds(way: Way) -> float:
    """Return the seconds of all copies of a step, at the rates that the offloader has measured.

    Half of the copied bytes go out, and half come back. Recomputed tensors are not copied, and
    their time is not counted.
    """
    assert way.offloader is not None
    plan, profile = way.offloader.plan, way.offloader.profile
    assert plan is not None
    assert profile is not None
    if not profile.links:
        return 0.0
    link = profile.links[0]
    return plan.moved / 2 * (1 / link.out_rate + 1 / link.in_rate)


def predictions(ways: Sequence[Way]) -> dict[str, Any]:
    """Return the predictions of each plan, by name of the way."""
    predicted = {}
    for way in ways:
        plan = way.offloader.plan if way.offloader is not None else None
        if plan is not None:
            predicted[way.name] = {"peak": plan.peak, "seconds": plan.seconds, "moved": plan.moved}
    return predicted


def link_bound(name: str, ways: Sequence[Way]) -> str:
    """Return a line with the time of all copies under the budget of 50 %, beside a plain step."""
    half = half_of(ways)
    assert half.offloader is not None
    plan, profile = half.offloader.plan, half.offloader.profile
    assert plan is not None
    assert profile is not None
    hidden = "during the computation" if any(x.overlaps for x in profile.links) else "in addition"
    return (
        f"{name}: at half, {plan.moved / 2**20:.0f} MiB move out and back in "
        f"{copy_seconds(half) * 1e3:.0f} ms {hidden}, "
        f"a plain step takes {median(ways[0].seconds) * 1e3:.0f} ms; "
        f"recomputed: {', '.join(plan.recompute) or 'nothing'}"
    )


def reason_without_torchtune(device: torch.device) -> str | None:
    """Return the reason why torchtune is not measured; None if it is."""
    if device.type != "cuda":
        return "not measured: it needs CUDA"
    try:
        importlib.import_module("torchtune.training")
    except ImportError as error:
        return f"not measured: {error}"
    return None


def draw(ways_by_network: dict[str, list[Way]]) -> None:
    """Draw the peak bytes over the step time of every way, with one panel per network."""
    figure = Figure(figsize=(6 * len(ways_by_network), 4.5), layout="constrained")
    panels = figure.subplots(1, len(ways_by_network), squeeze=False)[0]
    for axes, (name, ways) in zip(panels, ways_by_network.items(), strict=True):
        for way in ways:
            point = median(way.seconds) * 1e3, way.peak / 2**20
            axes.plot(*point, "o" if way.is_ours else "s", color="C0" if way.is_ours else "C1")
            axes.annotate(way.name, point, xytext=(4, 4), textcoords="offset points", fontsize=8)
        our_points = [(median(w.seconds) * 1e3, w.peak / 2**20) for w in ways if w.is_ours]
        axes.plot(*zip(*sorted(our_points), strict=True), color="C0", linewidth=1)
        axes.set(title=name, xlabel="step (ms)", ylabel="peak on the device (MiB)")
        axes.set_ylim(bottom=0)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=120)


if __name__ == "__main__":
    raise SystemExit(main())
