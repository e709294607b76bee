"""The list of models that capture is judged on: its names, and a step of each model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.support.capture_models import all_cases, family_cases, libraries
from benchmarks.support.capture_models.case import (
    MICRO_SAMPLES,
    SAMPLES,
    CaptureCase,
    call,
    cut,
)
from benchmarks.support.capture_models.libraries import MissingLibraryError
from benchmarks.support.capture_models.names import BY_HAND, NAMES, TORCHVISION, TRANSFORMERS

ROOT = Path(__file__).resolve().parents[2]
LISTED = [(family, name) for family, names in NAMES.items() for name in names]
BATCH_NORM = nn.modules.batchnorm._BatchNorm


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def installed_cases(family: str) -> dict[str, CaptureCase] | str:
    """Return the cases of a family, or the reason why there are none."""
    try:
        return family_cases(family)
    except MissingLibraryError as error:
        return str(error)


def listed_case(family: str, name: str) -> CaptureCase:
    cases = installed_cases(family)
    if isinstance(cases, str):
        pytest.skip(cases)
    return cases[name]


def step(
    case: CaptureCase, samples: int, *, cut_to: int | None = None, is_training: bool = True
) -> tuple[Tensor, nn.Module]:
    """Return the loss of a step, and the model with its gradients.

    Args:
        case: Case to run.
        samples: Samples of the batch.
        cut_to: Samples of a micro-batch; None runs the whole batch at once.
        is_training: False runs the model in evaluation mode, without dropout.
    """
    torch.manual_seed(0)
    model = case.make().train(is_training)
    torch.manual_seed(2)
    micro_batches = cut(case.batch(samples, 1), cut_to or samples)
    losses = [case.loss(call(model, batch)) / len(micro_batches) for batch in micro_batches]
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss.detach(), model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def test_the_list_is_long_and_its_names_are_distinct() -> None:
    assert len(TRANSFORMERS) >= 40
    assert len(TORCHVISION) >= 20
    assert len(BY_HAND) >= 10
    names = [name for _, name in LISTED]
    assert len(names) == len(set(names))


def test_the_names_need_no_library() -> None:
    code = (
        "import sys; from benchmarks.support.capture_models import names, family_cases; "
        "family_cases('by hand'); "
        "assert not {'transformers', 'torchvision'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "find_spec", lambda name: None)
    with pytest.raises(MissingLibraryError, match="pip install transformers"):
        all_cases()
    with pytest.raises(MissingLibraryError, match="pip install torchvision"):
        family_cases("torchvision")


@pytest.mark.parametrize(("family", "name"), LISTED)
def test_a_model_gives_a_finite_loss_and_gradients(family: str, name: str) -> None:
    case = listed_case(family, name)
    assert (case.family, case.name) == (family, name)
    for samples in (MICRO_SAMPLES, SAMPLES):
        loss, model = step(case, samples)
        assert loss.shape == ()
        assert loss.isfinite()
        computed = gradients(model)
        assert all(gradient.isfinite().all() for gradient in computed.values())
        assert any(gradient.any() for gradient in computed.values())


@pytest.mark.parametrize("name", BY_HAND)
def test_every_trained_parameter_by_hand_has_a_gradient(name: str) -> None:
    _, model = step(listed_case("by hand", name), SAMPLES)
    computed = gradients(model)
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert computed[parameter_name].any(), parameter_name
        else:
            assert parameter_name not in computed


@pytest.mark.parametrize(("family", "name"), LISTED)
def test_the_seed_determines_a_step(family: str, name: str) -> None:
    case = listed_case(family, name)
    (loss, model), (again, same) = step(case, MICRO_SAMPLES), step(case, MICRO_SAMPLES)
    assert torch.equal(loss, again)
    computed = gradients(same)
    for parameter_name, gradient in gradients(model).items():
        assert torch.equal(gradient, computed[parameter_name]), parameter_name


@pytest.mark.parametrize(("family", "name"), LISTED)
def test_micro_batches_change_no_gradients_of_a_case_per_sample(family: str, name: str) -> None:
    case = listed_case(family, name)
    if not case.is_per_sample:
        assert len(cut(case.batch(SAMPLES, 1), MICRO_SAMPLES)) == SAMPLES // MICRO_SAMPLES
        step(case, SAMPLES, cut_to=MICRO_SAMPLES)
        return
    _, whole = step(case, SAMPLES, is_training=False)
    _, parts = step(case, SAMPLES, cut_to=MICRO_SAMPLES, is_training=False)
    # BatchNorm mixes samples in training mode only.
    assert not any(isinstance(module, BATCH_NORM) for module in whole.modules())
    computed = gradients(parts)
    for parameter_name, gradient in gradients(whole).items():
        difference = (gradient - computed[parameter_name]).norm()
        assert difference <= 1e-4 * gradient.norm() + 1e-6, parameter_name
