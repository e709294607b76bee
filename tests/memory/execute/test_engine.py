"""Engine: gradients equal those of plain training bit for bit, whatever the policy decides."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dlres.memory.execute.actions import MemoryAction
from tests.support.networks import CASES
from tests.support.scripted_policy import ScriptedEngine

ACTIONS = [*MemoryAction, None]  # None: each action in turn


def scripted_engine(
    action: MemoryAction | None, directory: Path | None = None, late: bool = False
) -> ScriptedEngine:
    """Return an engine that takes one action; `late` emulates copies that end later."""
    every = list(MemoryAction)
    return ScriptedEngine(
        lambda number, _: action or every[number % len(every)], directory, late=late
    )


@pytest.fixture(params=[(a, late) for a in ACTIONS for late in (False, True)], ids=str)
def engine(request: pytest.FixtureRequest) -> Iterator[ScriptedEngine]:
    """Engine that must have released everything when the test ends."""
    action, late = request.param
    engine = scripted_engine(action, late=late)
    yield engine
    engine.start_step()
    gc.collect()
    assert engine.byte_counter.now == 0
    assert engine.tier.used_bytes == 0


Step = Callable[[Callable[[], AbstractContextManager[None]]], list[Tensor]]


def require_parity(engine: ScriptedEngine, step: Step, *modules: nn.Module) -> None:
    """Run a step plainly, and under the engine; compare what it returns, bit for bit.

    Parameters and buffers of `modules` stay in memory.
    """

    def hooks() -> AbstractContextManager[None]:
        kept = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        return engine.hooks(kept)

    torch.manual_seed(0)
    plain = step(nullcontext)
    torch.manual_seed(0)
    actual = step(hooks)
    assert len(plain) == len(actual) > 0
    for expected, tensor in zip(plain, actual, strict=True):
        assert torch.equal(expected, tensor)


def gradients(*modules: nn.Module) -> list[Tensor]:
    """Return all gradients, and forget them."""
    tensors = [p.grad for m in modules for p in m.parameters() if p.grad is not None]
    for module in modules:
        module.zero_grad()
    return tensors


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_those_of_plain_training(engine: ScriptedEngine, name: str) -> None:
    net = CASES[name].make()

    def step(hooks: Callable[[], AbstractContextManager[None]]) -> list[Tensor]:
        results = []
        for _ in range(2):
            with hooks():
                loss = net(CASES[name].batch()).float().square().mean()
            loss.backward()
            results += [loss.detach(), *gradients(net)]
        return results

    require_parity(engine, step, net)


def test_storages_can_be_offloaded_to_a_file(tmp_path: Path) -> None:
    engine, net = scripted_engine(MemoryAction.BOTH, tmp_path), CASES["cnn"].make()
    assert list(tmp_path.iterdir()) == []

    def step(hooks: Callable[[], AbstractContextManager[None]]) -> list[Tensor]:
        with hooks():
            loss = net(CASES["cnn"].batch()).square().mean()
        loss.backward()
        return gradients(net)

    require_parity(engine, step, net)


@pytest.mark.parametrize("inplace", [False, True])
def test_noise_that_is_saved_before_it_is_written(engine: ScriptedEngine, inplace: bool) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.RReLU(inplace=inplace), nn.Linear(8, 3))

    def step(hooks: Callable[[], AbstractContextManager[None]]) -> list[Tensor]:
        with hooks():
            loss = net(torch.randn(5, 6)).square().mean()
        loss.backward()
        return [loss.detach(), *gradients(net)]

    require_parity(engine, step, net)


def test_views_transposes_and_expands(engine: ScriptedEngine) -> None:
    def step(hooks: Callable[[], AbstractContextManager[None]]) -> list[Tensor]:
        x = torch.randn(6, 8, requires_grad=True)
        with hooks():
            y = torch.relu(x)
            parts = y[1:3] * y[2:4] + y[:, 3:5].t()[:, 2:4].repeat(1, 4)
            wide = y[0].expand(50, 8) * y[5].unsqueeze(0)
            loss = (parts.exp().sum() + wide.sin().sum() + (y.t() @ y).diagonal().prod()).square()
        loss.backward()
        assert x.grad is not None
        return [x.grad]

    require_parity(engine, step)


def test_an_expanded_tensor_takes_the_bytes_of_its_source() -> None:
    engine = scripted_engine(MemoryAction.OFFLOAD)
    row = torch.randn(1, 256, requires_grad=True)
    with engine.hooks():
        out = row.exp().expand(1000, 256).sin()
    assert engine.tier.used_bytes <= 2 * 1024
    out.sum().backward()


def test_a_small_part_of_a_large_storage_moves_alone() -> None:
    engine = scripted_engine(MemoryAction.OFFLOAD)
    x = torch.randn(100, 100, requires_grad=True)
    with engine.hooks([x]):
        out = (x + 1)[7].sin()
    assert engine.tier.used_bytes == 400
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[7], (x[7] + 1).cos())


def test_a_storage_that_is_saved_twice_moves_once() -> None:
    engine = scripted_engine(MemoryAction.OFFLOAD)
    x = torch.randn(64, 64, requires_grad=True)
    with engine.hooks([x]):
        y = x + 1
        z = y.sin() + y.cos() + (y.t() @ y) + y.view(-1).exp().view(64, 64)
    # The storages of y and of the result of exp.
    assert engine.tier.used_bytes == 2 * 4 * 64 * 64
    z.sum().backward()


def test_a_change_in_place_after_saving_is_an_error(engine: ScriptedEngine) -> None:
    x = torch.randn(5, requires_grad=True)
    for change in (lambda y: y.add_(1), lambda y: y[:2].zero_(), lambda y: y.detach().mul_(2)):
        with engine.hooks():
            y = x * 2
            z = y.sin()
            change(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()
        del y, z


def test_a_change_in_place_before_saving_again_moves_again(engine: ScriptedEngine) -> None:
    x = torch.randn(5, requires_grad=True)
    with engine.hooks():
        y = x * 1
        first = y.sin()
        y.add_(1)
        second = y.exp() * y
    second.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, (x + 1).exp() * (x + 2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


def test_a_changed_parameter_is_an_error(engine: ScriptedEngine) -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    with engine.hooks(layer.parameters()):
        out = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_nested_checkpoints(engine: ScriptedEngine, reentrant: bool) -> None:
    inner, outer = CASES["mlp"].make(), nn.Linear(16, 16)

    def step(hooks: Callable[[], AbstractContextManager[None]]) -> list[Tensor]:
        x = torch.randn(4, 16, requires_grad=True)

        def block(y: Tensor) -> Tensor:
            y = torch.relu(outer(y))
            return checkpoint(inner, y, use_reentrant=reentrant)

        with hooks():
            loss = checkpoint(block, x.sin(), use_reentrant=reentrant).square().sum()
            loss.backward()
        assert x.grad is not None
        return [x.grad, *gradients(inner, outer)]

    require_parity(engine, step, inner, outer)


def test_double_backward(engine: ScriptedEngine) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def step(hooks: Callable[[], AbstractContextManager[None]]) -> list[Tensor]:
        x = torch.randn(4, 8, requires_grad=True)
        with hooks():
            out = net(x).square().sum()
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            (out + (slope.norm() - 1).square()).backward()
        return gradients(net)

    require_parity(engine, step, net)


def test_backward_twice(engine: ScriptedEngine) -> None:
    net = CASES["cnn"].make()

    def step(hooks: Callable[[], AbstractContextManager[None]]) -> list[Tensor]:
        with hooks():
            loss = net(CASES["cnn"].batch()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(net)

    require_parity(engine, step, net)


def test_two_optimizers_as_in_a_gan(engine: ScriptedEngine) -> None:
    generator, discriminator = (
        nn.Sequential(nn.Linear(4, 8), nn.ReLU()),
        nn.Sequential(nn.Linear(8, 1)),
    )

    def step(hooks: Callable[[], AbstractContextManager[None]]) -> list[Tensor]:
        results = []
        with hooks():
            fake_samples = generator(torch.randn(6, 4))
            generator_loss = -discriminator(fake_samples).mean()
            results += torch.autograd.grad(
                generator_loss, list(generator.parameters()), retain_graph=True
            )
            discriminator_loss = (
                discriminator(fake_samples.detach()).sigmoid().mean()
                - discriminator(torch.randn(6, 8)).mean()
            )
            discriminator_loss.backward()
            generator_loss.backward()
        return [*results, *gradients(generator, discriminator)]

    require_parity(engine, step, generator, discriminator)


def test_several_forwards_before_backward(engine: ScriptedEngine) -> None:
    net = CASES["gpt"].make()

    def step(hooks: Callable[[], AbstractContextManager[None]]) -> list[Tensor]:
        losses = []
        for length in (10, 4, 7):
            with hooks():
                losses.append(net(CASES["gpt"].batch()[:, :length]).float().square().mean())
        for loss in losses:
            loss.backward()
        return gradients(net)

    require_parity(engine, step, net)


def test_no_grad_and_inference_in_between(engine: ScriptedEngine) -> None:
    net = CASES["unet"].make()

    def step(hooks: Callable[[], AbstractContextManager[None]]) -> list[Tensor]:
        net.load_state_dict(start)
        with hooks():
            out = net(CASES["unet"].batch())
            net.eval()
            with torch.no_grad():
                net(CASES["unet"].batch())
            with torch.inference_mode():
                net(CASES["unet"].batch())
            net.train()
            out.square().mean().backward()
        return gradients(net)

    start = {name: value.clone() for name, value in net.state_dict().items()}
    require_parity(engine, step, net)


def test_a_step_after_one_that_failed(engine: ScriptedEngine) -> None:
    net = CASES["mlp"].make()

    def fails() -> None:
        net(torch.randn(6, 16))
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"), engine.hooks(net.parameters()):
        fails()
    engine.start_step()
    gc.collect()
    assert engine.byte_counter.now == 0

    def step(hooks: Callable[[], AbstractContextManager[None]]) -> list[Tensor]:
        with hooks():
            loss = net(torch.randn(6, 16)).square().mean()
        loss.backward()
        return gradients(net)

    require_parity(engine, step, net)


def test_compiled_models(engine: ScriptedEngine) -> None:
    net = CASES["cnn"].make()
    compiled = torch.compile(net, backend="aot_eager")

    def step(hooks: Callable[[], AbstractContextManager[None]]) -> list[Tensor]:
        with hooks():
            loss = compiled(CASES["cnn"].batch()).square().mean()
        loss.backward()
        return gradients(net)

    require_parity(engine, step, net)


def test_complex_numbers_and_unusual_tensors(engine: ScriptedEngine) -> None:
    def step(hooks: Callable[[], AbstractContextManager[None]]) -> list[Tensor]:
        x = torch.randn(4, 6, requires_grad=True)
        with hooks():
            spectrum = torch.fft.fft(x)
            loss = (spectrum.conj() * spectrum).real.square().sum() + spectrum.imag.exp().sum()
            loss = loss + torch.sparse.mm(torch.eye(4).to_sparse(), x.sin()).cos().sum()
            loss = loss + x.bfloat16().tanh().double().exp().sum() + x[:0].sin().sum()
        loss.backward()
        assert x.grad is not None
        return [x.grad]

    require_parity(engine, step)


def test_a_reused_address_is_not_taken_for_an_earlier_storage() -> None:
    engine = scripted_engine(MemoryAction.OFFLOAD)
    x = torch.randn(1000, requires_grad=True)
    expected = torch.zeros(1000)
    with engine.hooks([x]):
        total = torch.zeros(())
        for number in range(50):
            # The allocator reuses the memory of the previous product.
            total = total + (x * number).sin().sum()
            expected += number * (x.detach() * number).cos()
    total.backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, expected, rtol=1e-4, atol=1e-3)


def test_storages_stay_if_the_tier_is_full() -> None:
    engine = ScriptedEngine(lambda *_: MemoryAction.OFFLOAD, tier_bytes=1024)
    x = torch.randn(200, requires_grad=True)
    with engine.hooks([x]):
        out = (x + 1).sin().exp().cos().sum()
    assert engine.byte_counter.now > 0
    out.backward()
    plain = x.grad
    x.grad = None
    (x + 1).sin().exp().cos().sum().backward()
    assert plain is not None
    assert x.grad is not None
    assert torch.equal(plain, x.grad)


def test_zeros_without_memory_stay(engine: ScriptedEngine) -> None:
    def step(hooks: Callable[[], AbstractContextManager[None]]) -> list[Tensor]:
        x = torch.ones(40, requires_grad=True)
        with hooks():
            loss = (x * torch._efficientzerotensor(40)).sum() + x.sin().sum()
        loss.backward()
        assert x.grad is not None
        return [x.grad]

    require_parity(engine, step)


def test_memory_that_is_freed_and_filled_again_before_backward(engine: ScriptedEngine) -> None:
    def step(hooks: Callable[[], AbstractContextManager[None]]) -> list[Tensor]:
        # FSDP does this with the parameters of a layer.
        x, weight = torch.randn(500, requires_grad=True), torch.randn(500)
        values = weight.clone()
        with hooks():
            loss = (x * weight).sum()
        weight.untyped_storage().resize_(0)
        weight.untyped_storage().resize_(2000)
        with torch.autograd._unsafe_preserve_version_counter(weight):
            weight.copy_(values)
        loss.backward()
        assert x.grad is not None
        return [x.grad]

    require_parity(engine, step)


def test_small_tensors_and_parameters_stay() -> None:
    seen = []
    engine = ScriptedEngine(
        lambda _, t: seen.append(t.numel()) or MemoryAction.KEEP, min_bytes=1000
    )
    layer = nn.Linear(100, 100)
    with engine.hooks(layer.parameters()):
        layer(torch.randn(2, 100, requires_grad=True)).sin().exp()
        layer(torch.randn(30, 100, requires_grad=True)).sin()
    assert seen == [3000, 3000]
