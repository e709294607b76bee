"""The benchmark of the gradient codecs' speed runs to its end on tiny sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from benchmarks import gradient_codecs
from lightning_dlres.codecs.gradient.base import gradient_codec


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_every_figure_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert gradient_codecs.main(["--quick"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["bench"] == "gradient_codecs"
    for codec in gradient_codecs.CHECKED:
        for task in (gradient_codecs.ENCODE, gradient_codecs.DECODE):
            assert line["checks"][f"CPU, {codec}, {task}, 0.25 MiB: of a triad"]["value"] > 0
    row = dict(zip(line["raw"]["columns"], line["raw"]["rows"][0], strict=True))
    assert row["MiB"] == 0.25


@pytest.mark.parametrize(
    ("name", "encode", "decode"),
    [("tbq", 12.25, 8.25), ("onebit", 12.125, 8.125), ("int8", 13, 9), ("fp16", 14, 10)],
)
def test_the_bytes_are_those_that_a_task_must_move(name: str, encode: float, decode: float) -> None:
    speeds = gradient_codecs.measure(
        gradient_codec(name), 1 << 18, torch.device("cpu"), gradient_codecs.QUICK
    )
    # Means and scales of blocks, and the threshold, are the rest.
    assert speeds["encode"].bytes_per_element == pytest.approx(encode, rel=1e-3)
    assert speeds["decode"].bytes_per_element == pytest.approx(decode, rel=1e-3)


def test_the_largest_arrays_exceed_the_caches() -> None:
    settings = gradient_codecs.settings_of(is_quick=False)
    assert settings.beyond_caches is not None
    assert settings.beyond_caches >= 2 * gradient_codecs.cache_bytes()
    assert gradient_codecs.sizes(settings)[-1] == (
        settings.beyond_caches,
        gradient_codecs.CHECKED,
    )
