"""Modules that are built without memory get the values of a plain construction, to the bit."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.deferred.recording import deferred_init
from lightning_dlres.pipeline.deferred.values import deferred_values, is_deferred
from lightning_dlres.pipeline.stage.initialise import initialised_copy

# Nearly all tensors of the tests are deferred.
SMALLEST = 64

Make = Callable[[], nn.Module]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def check(make: Make, smallest: int = SMALLEST) -> tuple[nn.Module, int]:
    """Check all tensors, last one first; return the module and the number of deferred tensors."""
    torch.manual_seed(3)
    plain, next_number = make(), torch.rand(1)
    torch.manual_seed(3)
    with deferred_init(smallest):
        module = make()
    assert torch.equal(torch.rand(1), next_number)
    expected, made = tensors_of(plain), tensors_of(module)
    assert list(made) == list(expected)
    count = 0
    for name in reversed(list(made)):
        tensor, value = made[name], made[name]
        assert type(tensor) is type(expected[name])
        assert tensor.requires_grad == expected[name].requires_grad
        if tensor.is_meta:
            assert is_deferred(tensor)
            (value,) = deferred_values([tensor])
            assert not value.is_meta
            count += 1
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), name
    return module, count


class Made(nn.Module):
    """Module whose parameters a function makes."""

    def __init__(self, make: Callable[[Any], None]) -> None:
        super().__init__()
        make(self)


CODES: dict[str, Callable[[Any], None]] = {}


def code(make: Callable[[Any], None]) -> Callable[[Any], None]:
    CODES[make.__name__] = make
    return make


@code
def initialisations(m: Any) -> None:
    m.a, m.b, m.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Conv2d(8, 8, 3)
    nn.init.orthogonal_(m.a.weight)
    nn.init.trunc_normal_(m.b.weight, std=0.02)
    nn.init.dirac_(m.c.weight)
    nn.init.sparse_(m.b.weight, 0.3)
    nn.init.eye_(m.a.weight[:8, :8].detach())


@code
def parametrizations(m: Any) -> None:
    m.a = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    m.b = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
    m.c = nn.utils.parametrizations.orthogonal(nn.Linear(16, 16))
    m.d = nn.utils.weight_norm(nn.Linear(16, 16))  # type: ignore[no-untyped-call]


@code
def values_that_code_reads(m: Any) -> None:
    weight = nn.Parameter(torch.empty(64, 4))
    nn.init.normal_(weight)
    m.mean = nn.Parameter(torch.full((100,), float(weight.std())))
    m.rates = nn.Parameter(torch.tensor([rate.item() for rate in torch.linspace(0, 1, 100)]))
    m.listed = nn.Parameter(torch.tensor(weight.tolist()))
    m.numpy = nn.Parameter(torch.from_numpy(weight.detach().numpy() * 2))
    m.more = nn.Parameter(weight.detach() * 2 if bool((weight > 0).any()) else weight.detach())
    with torch.no_grad():
        weight[weight > 0.1] = 0.0
    m.weight = weight


@code
def views(m: Any) -> None:
    m.transposed = nn.Parameter(torch.randn(8, 16).t())
    m.rows = nn.Parameter(torch.randn(32, 16)[::2])
    m.halves = nn.Parameter(torch.rand(64, dtype=torch.float64).half())
    m.conjugate = nn.Parameter(torch.randn(32, dtype=torch.complex64).conj())
    whole = torch.randn(64, 3)
    m.parts = nn.ParameterList(part.clone() for part in whole.split(32))
    whole.data = torch.ones(64, 3)
    m.whole = nn.Parameter(whole)


@code
def random_operations(m: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    m.own = nn.Parameter(torch.randn(64, generator=generator))
    m.own_again = nn.Parameter(torch.empty(64).normal_(generator=generator))
    m.order = nn.Parameter(torch.randperm(64).float())
    m.likely = nn.Parameter(torch.bernoulli(torch.rand(64)))
    m.drawn = nn.Parameter(torch.normal(torch.zeros(64), torch.ones(64)))
    m.like = nn.Parameter(torch.rand_like(m.own.detach()))
    m.dropped = nn.Parameter(nn.functional.dropout(torch.ones(64)))
    m.picked = nn.Parameter(torch.multinomial(torch.rand(64), 40).float())


@code
def tied_and_copied(m: Any) -> None:
    m.a = nn.Embedding(32, 16, padding_idx=3)
    m.b = nn.Linear(16, 32, bias=False)
    m.b.weight = m.a.weight
    m.c = nn.ModuleList(copy.deepcopy(m.a) for _ in range(2))
    nn.init.ones_(m.c[0].weight[2:].detach())
    m.register_buffer("mask", torch.tril(torch.ones(32, 32)).bool())
    m.mask = ~m.mask


@code
def given_values(m: Any) -> None:
    values = np.arange(64.0)
    m.a = nn.Parameter(torch.from_numpy(values))
    m.b = nn.Linear(8, 8, dtype=torch.float64)
    m.b.load_state_dict(
        {"weight": torch.from_numpy(values).view(8, 8), "bias": torch.ones(8, dtype=torch.float64)}
    )
    values += 1.0


@code
def inference_tensors(m: Any) -> None:
    with torch.inference_mode():
        values = torch.arange(16.0)
    m.a = nn.Linear(4, 8)
    with torch.no_grad():
        m.a.weight[:, :2].copy_(values.view(8, 2))


@code
def made_for_the_meta_device(m: Any) -> None:
    nn.Linear(16, 16, device="meta")
    with torch.device("meta"):
        nn.Linear(16, 16)
        torch.randn(64).normal_()
    m.a = nn.utils.skip_init(nn.Linear, 16, 16)
    m.b = nn.Linear(16, 16, device="meta").to_empty(device="cpu")
    for module in (m.a, m.b):
        module.reset_parameters()
    m.c = nn.Linear(16, 16)


@code
def data_that_is_set(m: Any) -> None:
    m.a, m.b = nn.Linear(16, 16), nn.Linear(16, 4)
    m.a.weight.data = torch.from_numpy(np.eye(16, dtype=np.float32))
    m.a.weight.data *= 2
    m.b.bias.data = m.a.weight.data[0, :4]
    vector = nn.utils.parameters_to_vector(m.a.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, m.a.parameters())
    m.lazy = nn.LazyLinear(16)
    m.lazy(torch.ones(1, 16))


@code
def results_that_are_given(m: Any) -> None:
    m.a, m.b = nn.Linear(16, 16), nn.Linear(16, 16)
    nn.init.eye_(m.a.weight)
    with torch.no_grad():
        torch.add(m.a.weight, 1, out=m.b.weight)
        torch.randn(4, 16, out=m.b.weight[:4].detach())
    m.c = nn.Parameter(torch.full((32,), float(torch.quantile(m.b.weight, 0.5))))


MODULES: dict[str, Make] = {
    "layers": lambda: nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 3)),
    "transformer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64), 3),
    "lstm": lambda: nn.LSTM(32, 64, 2, bidirectional=True),
    "images": lambda: nn.Sequential(nn.Conv2d(3, 64, 7), nn.BatchNorm2d(64)),
    **{name: lambda make=make: Made(make) for name, make in CODES.items()},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", sorted(MODULES))
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_values_are_those_of_a_plain_construction(name: str) -> None:
    _, count = check(MODULES[name])
    assert count


def test_a_model_for_the_meta_device_stays_there() -> None:
    with deferred_init(SMALLEST), torch.device("meta"):
        module = nn.Linear(16, 16)
    assert module.weight.is_meta
    assert not is_deferred(module.weight)


def test_an_array_of_values_cannot_be_changed() -> None:
    with deferred_init(SMALLEST):
        module = nn.Linear(16, 16)
        for array in (module.weight.detach().numpy(), np.asarray(module.weight.detach())):
            with pytest.raises(ValueError, match="read-only"):
                array *= 0.5


def test_tensors_have_addresses_of_their_own() -> None:
    with deferred_init(SMALLEST):
        first, second = torch.ones(64), torch.ones(64)
        assert first.data_ptr() != second.data_ptr()
        assert first.data_ptr() == first.view(8, 8).data_ptr() != first[1:].data_ptr()


def test_a_sparse_buffer_is_made_at_once() -> None:
    def make(m: Any) -> None:
        m.register_buffer("edges", torch.eye(32).to_sparse())

    with deferred_init(SMALLEST):
        module = Made(make)
    assert torch.equal(module.edges.to_dense(), torch.eye(32))


def test_tensors_that_are_no_parameters_have_values_at_once() -> None:
    numbers: list[Tensor] = []

    def make(m: Any) -> None:
        m.plain = torch.randn(64)
        m.parameters_in_a_list = [nn.Parameter(torch.randn(40))]
        inner = torch.randn(50)
        m.read = lambda: inner
        numbers.append(torch.randn(30))
        m.a = nn.Linear(16, 16)

    torch.manual_seed(3)
    plain = Made(make)
    torch.manual_seed(3)
    with deferred_init(SMALLEST):
        module = Made(make)
    assert module.a.weight.is_meta
    assert torch.equal(module.plain, plain.plain)
    assert torch.equal(module.read(), plain.read())
    assert torch.equal(numbers[0], numbers[1])
    ours, theirs = module.parameters_in_a_list[0], plain.parameters_in_a_list[0]
    assert torch.equal(ours, theirs)
    assert type(ours) is nn.Parameter


def test_small_tensors_are_made_at_once() -> None:
    module, count = check(lambda: nn.Linear(64, 128), smallest=16 << 10)
    assert count == 1
    assert not module.bias.is_meta


def test_code_sees_the_device_of_the_data() -> None:
    with deferred_init(SMALLEST):
        weight = nn.Linear(16, 16).weight
        seen = weight.is_meta, weight.is_cpu, weight.is_cuda, weight.device, weight.get_device()
        other = torch.ones(64, device=weight.device)
    assert seen == (False, True, False, torch.device("cpu"), -1)
    assert other.eq(1).all()


def test_an_error_of_the_code_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="size of tensor"), deferred_init(SMALLEST):
        torch.ones(64) + torch.ones(63)
    assert not torch.ones(1 << 20).is_meta


def test_a_large_source_that_changes_later_is_refused() -> None:
    source = torch.zeros(1 << 19)
    with deferred_init():
        module = nn.Linear(1 << 9, 1 << 10)
        with torch.no_grad():
            module.weight.copy_(source.view(1 << 10, 1 << 9))
    source += 1
    with pytest.raises(ConfigError, match="must stay as it is, got one that was changed later"):
        deferred_values([module.weight])


def test_a_tensor_that_a_graph_uses_must_be_registered() -> None:
    kept: list[Tensor] = []

    def make(m: Any) -> None:
        m.a = nn.Linear(16, 16)
        kept.append(torch.ones(16, 16))
        kept.append(m.a.weight * kept[0])

    with (
        pytest.raises(ConfigError, match=r"shape \(16, 16\) that autograd uses. Register it"),
        deferred_init(SMALLEST),
    ):
        Made(make)


def mapped_file_bytes() -> int:
    """Return the bytes of files in this process's memory."""
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssFile:")
    ]
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_file_of_weights_is_read_where_values_are_needed(tmp_path: Path) -> None:
    layers, width = 8, 1024
    torch.manual_seed(5)
    pretrained = {f"{i}.weight": torch.randn(width, width) for i in range(layers)}
    torch.save(pretrained, tmp_path / "weights.pt")
    before = mapped_file_bytes()
    with deferred_init():
        module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        module.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=True, weights_only=True))
    (value,) = deferred_values([module[3].weight])
    assert torch.equal(value, pretrained["3.weight"])
    assert mapped_file_bytes() - before < 3 * width * width * 4


def test_a_copy_for_measurements_has_exact_buffers_and_stand_ins_for_weights() -> None:
    with deferred_init(SMALLEST):
        module = Made(CODES["tied_and_copied"])
    first, second = (initialised_copy(module, torch.device("cpu")) for _ in range(2))
    assert torch.equal(first.mask, ~torch.tril(torch.ones(32, 32)).bool())
    assert torch.equal(first.a.weight, second.a.weight)
    assert 0 < first.a.weight.std() < 1
    assert is_deferred(module.a.weight)
    assert is_deferred(module.mask)
