"""Tests of the demo's model: causal predictions, and errors for invalid arguments."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_dlres.demos.byte_gpt import ByteGPT


def test_logits_depend_only_on_bytes_up_to_their_position() -> None:
    model = ByteGPT(width=16, depth=2, heads=2, context=8).eval()
    text = torch.randint(0, 256, (2, 8), dtype=torch.uint8)
    changed_text = text.clone()
    changed_text[:, 5] += 1
    with torch.no_grad():
        logits, changed_logits = model(text), model(changed_text)
    assert torch.equal(logits[:, :5], changed_logits[:, :5])
    assert not torch.equal(logits[:, 5:], changed_logits[:, 5:])


def test_an_untrained_model_gives_all_bytes_the_same_probability() -> None:
    torch.manual_seed(0)
    model = ByteGPT(width=16, depth=2, heads=2, context=8)
    batch = torch.randint(0, 256, (16, 9), dtype=torch.uint8)
    loss = torch.nn.functional.cross_entropy(
        model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten().long()
    )
    assert float(loss.detach()) == pytest.approx(math.log(256), abs=0.1)


def test_an_invalid_width_and_a_long_text_are_refused() -> None:
    with pytest.raises(ValueError, match=r"width must be a multiple of heads \(4\), got 10"):
        ByteGPT(width=10, heads=4)
    with pytest.raises(ValueError, match=r"Use ByteGPT\(context=9\)"):
        ByteGPT(width=16, depth=1, context=8)(torch.zeros(1, 9, dtype=torch.uint8))
