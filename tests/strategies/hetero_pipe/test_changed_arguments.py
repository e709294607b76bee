"""Lists and sequences whose layers, or whose step, change the objects that the layers get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import is_initialized
from torch.nn import functional as F

from tests.support.rank_pool import RankPool
from tests.support.training_cases import (
    Case,
    Classifier,
    batches,
    differences_in,
    expect_refusal,
    no_differences_in,
)


@dataclass
class Penalties:
    rows: list[Tensor] = field(default_factory=list)


# For each kind of object: how a step makes it, how a layer changes it, and what the loss takes.
Make, Change, Use = Callable[[Tensor], Any], Callable[[Any, Tensor], Any], Callable[[Any], Tensor]


def write_to_column(table: Tensor, rows: Tensor) -> None:
    # The first column that is still empty.
    table[:, int((table.abs().sum(0) > 0).sum())] = rows


KINDS: dict[str, tuple[Make, Change, Use]] = {
    "list": (lambda x: [], lambda kept, rows: kept.append(rows), lambda kept: sum(kept).mean()),
    "list with a state": (
        lambda x: [x.square().mean(1)],
        lambda kept, rows: kept.append(rows.detach()),
        lambda kept: torch.stack(kept).sum(),
    ),
    "dict": (
        lambda x: {},
        lambda kept, rows: kept.update({str(len(kept)): rows}),
        lambda kept: (kept["0"] + kept["3"]).mean(),
    ),
    "data class": (
        lambda x: Penalties(),
        lambda kept, rows: kept.rows.append(rows),
        lambda kept: sum(kept.rows).mean(),
    ),
    "list in a dict": (
        lambda x: {"deep": {"rows": []}},
        lambda kept, rows: kept["deep"]["rows"].append(rows),
        lambda kept: sum(kept["deep"]["rows"]).mean(),
    ),
    "tensor": (
        lambda x: torch.zeros(len(x)),
        lambda kept, rows: kept.add_(rows),
        lambda kept: kept.mean(),
    ),
    "columns": (
        lambda x: torch.zeros(len(x), 4),
        write_to_column,
        lambda kept: kept.square().mean(),
    ),
    "dict with a table": (
        lambda x: {"table": torch.eye(5), "rows": x.mean(1)},
        lambda kept, rows: kept.update(rows=kept["rows"] + kept["table"].sum() * rows),
        lambda kept: (kept["rows"] + kept["table"].sum()).mean(),
    ),
    "nothing": (lambda x: [], lambda kept, rows: None, lambda kept: torch.zeros(())),
}


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(16, 16), kind

    def forward(self, x: Tensor, kept: Any) -> Tensor:
        x = x + torch.tanh(self.linear(x))
        if kept is not None:
            KINDS[self.kind][1](kept, x.square().mean(1))
        return x


class Keeping(Classifier):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.ModuleList([Layer(kind) for _ in range(4)])
        self.head, self.kind = nn.Linear(16, 5), kind

    def loss(self, batch: Any) -> Tensor:
        x, kept = batch[0], KINDS[self.kind][0](batch[0])
        for layer in self.net:  # type: ignore[attr-defined]
            x = layer(x, kept)
        return F.cross_entropy(self.head(x), batch[1]) + KINDS[self.kind][2](kept)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", self.loss(batch))

    def val_dataloader(self) -> Any:
        return batches()


def case(make: Callable[[], Classifier], schedule: str = "auto", **options: Any) -> Case:
    return Case(make, schedule, options={"plan": None, **options})


def test_a_step_finds_what_layers_change(pool: RankPool) -> None:
    cases = {kind: case(partial(Keeping, kind)) for kind in KINDS}
    cases["gpipe"] = case(partial(Keeping, "dict"), "gpipe")
    cases["gpipe, table"] = case(partial(Keeping, "dict with a table"), "gpipe")
    cases["one micro-batch"] = case(partial(Keeping, "tensor"), microbatches=1)
    assert pool.run(differences_in, 2, cases) == no_differences_in(cases)


def test_changes_travel_over_three_stages(pool: RankPool) -> None:
    cases = {kind: case(partial(Keeping, kind), stages=3) for kind in ("list in a dict", "columns")}
    assert pool.run(differences_in, 3, cases) == no_differences_in(cases, 3)


class DictLayer(nn.Module):
    """Layer that changes its dict, and returns the same one unless it is the last.

    Args:
        is_last: Whether it returns a tensor.
    """

    def __init__(self, is_last: bool = False) -> None:
        super().__init__()
        self.linear, self.is_last = nn.Linear(16, 16), is_last

    def forward(self, state: dict[str, Any]) -> Any:
        state["x"] = state["x"] + torch.tanh(self.linear(state["x"]))
        state["seen"].append(state["x"].mean(1))
        return state["x"] if self.is_last else state


class DictOfSequence(Classifier):
    """Classifier that reads the dict that it gave to a sequence, or the sequence's output.

    Args:
        reads_output: Whether it reads the output, a tensor.
    """

    def __init__(self, reads_output: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = [*(DictLayer() for _ in range(3)), DictLayer(is_last=reads_output)]
        self.net, self.head = nn.Sequential(*layers), nn.Linear(16, 5)
        self.reads_output = reads_output

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        state: dict[str, Any] = {"x": batch[0], "seen": []}
        output = self.net(state)
        x = output if self.reads_output else state["x"]
        if not self.reads_output and output is not state:
            raise ValueError("the sequence must return the dict that it got")
        loss = F.cross_entropy(self.head(x), batch[1])
        return loss if self.reads_output else loss + sum(state["seen"]).square().mean()


class Renewing(nn.Module):
    """First layer, which returns a new dict.

    Args:
        changes: Whether it changes the dict that it got.
    """

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.linear, self.changes = nn.Linear(16, 16), changes

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        x = state["x"] + torch.tanh(self.linear(state["x"]))
        if self.changes:
            state["first"] = x.square().mean(1)
            return {"x": x, "seen": state.pop("seen")}
        return {"x": x, "seen": []}


class RenewedDict(Classifier):
    """Classifier that reads the dict that it gave to a sequence, which goes on with another one.

    Args:
        changes: Whether the first layer changes the dict.
        is_last: Whether the last layer returns a tensor.
    """

    def __init__(self, changes: bool, is_last: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = [DictLayer(), DictLayer(), DictLayer(is_last=is_last)]
        self.net, self.head = nn.Sequential(Renewing(changes), *layers), nn.Linear(16, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        state: dict[str, Any] = {"x": batch[0], "seen": [batch[0].mean(1)]}
        output = self.net(state)
        x = output if isinstance(output, Tensor) else output["x"]
        loss = F.cross_entropy(self.head(x), batch[1]) + (x - state["x"]).square().mean()
        self.log("left", float(len(state.get("seen", ()))))
        return loss + state["first"].mean() if "first" in state else loss


class Storing(nn.Module):
    """First layer, which stores what is no data of samples in its dict, and returns a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, state: dict[str, Any]) -> Tensor:
        x = torch.tanh(self.linear(state["x"]))
        state.update(size=len(x), scalar=x.detach().mean(), table=torch.arange(5), rows=x.mean(1))
        state["function"] = lambda: x
        state["old"][0] = len(x)
        return x


class StoredInDict(Classifier):
    """Classifier that finds data of samples in its dict, and nothing in the place of the rest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = [nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5)]
        self.net = nn.Sequential(Storing(), *layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        state: dict[str, Any] = {"x": batch[0], "old": [1, 2]}
        loss = F.cross_entropy(self.net(state), batch[1])
        # Plain training keeps everything. In it, no process group exists.
        if is_initialized() and (state.keys() != {"x", "old", "rows"} or state["old"] != [None, 2]):
            raise ValueError(f"got {state}")
        return loss + state["rows"].square().mean()


class ReadBeside(DictOfSequence):
    """Classifier that reads both the output of a sequence and its dict."""

    def __init__(self) -> None:
        super().__init__(reads_output=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        state: dict[str, Any] = {"x": batch[0], "seen": []}
        loss = F.cross_entropy(self.head(self.net(state)), batch[1])
        return loss + state["x"].square().mean() + sum(state["seen"]).square().mean()


class Aliased(Keeping):
    """Classifier that holds a second reference to a tensor that layers change in a dict.

    Args:
        is_trained: Whether the changes have gradients.
    """

    def __init__(self, is_trained: bool) -> None:
        super().__init__("nothing")
        torch.manual_seed(1)
        self.net = nn.ModuleList([Adding(is_trained) for _ in range(4)])

    def loss(self, batch: Any) -> Tensor:
        x, sums, rows = batch[0], torch.zeros(len(batch[0])), list[Tensor]()
        kept = {"sums": sums, "deep": {"rows": rows}, "mask": batch[0]}
        for layer in self.net:  # type: ignore[attr-defined]
            x = layer(x, kept)
        return F.cross_entropy(self.head(x), batch[1]) + sums.mean() + sum(rows).square().mean()


class Adding(Layer):
    def __init__(self, is_trained: bool) -> None:
        super().__init__("nothing")
        self.is_trained = is_trained

    def forward(self, x: Tensor, kept: Any) -> Tensor:
        x = x + torch.tanh(self.linear(x))
        rows = x.square().mean(1)
        kept["sums"].add_(rows if self.is_trained else rows.detach())
        kept["deep"]["rows"].append(rows)
        return x


class Cleared(Keeping):
    """Classifier whose step clears a list of its own, which the layers then fill."""

    def __init__(self) -> None:
        super().__init__("list")
        self.rows: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        x = batch[0]
        self.rows.clear()
        for layer in self.net:  # type: ignore[attr-defined]
            x = layer(x, self.rows)
        return F.cross_entropy(self.head(x), batch[1]) + torch.stack(self.rows).mean()


class GivenTwice(Keeping):
    def __init__(self) -> None:
        super().__init__("list")
        torch.manual_seed(1)
        self.net = nn.ModuleList([Twice("list") for _ in range(4)])

    def loss(self, batch: Any) -> Tensor:
        x, kept = batch[0], list[Tensor]()
        for layer in self.net:  # type: ignore[attr-defined]
            x = layer(x, kept, again=kept)
        return F.cross_entropy(self.head(x), batch[1])


class Twice(Layer):
    def forward(self, x: Tensor, kept: Any, again: Any = None) -> Tensor:
        return super().forward(x, kept)


class InPlace(Classifier):
    """Classifier whose first layer changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.ReLU(inplace=True), nn.Linear(16, 12), nn.ReLU(inplace=True), nn.Linear(12, 5)
        )


class ChangedByStep(Keeping):
    """Classifier whose step changes what the layers get, between their calls."""

    def loss(self, batch: Any) -> Tensor:
        x, place = batch[0], {"number": 0.0}
        for layer in self.net:  # type: ignore[attr-defined]
            place["number"] += 0.25
            x = layer(x, None) * place["number"] if self.kind == "step" else layer(x, place)
        return F.cross_entropy(self.head(x), batch[1])


class Scaling(Layer):
    def forward(self, x: Tensor, kept: Any) -> Tensor:
        return x + kept["number"] * torch.tanh(self.linear(x))


class ScaledByStep(ChangedByStep):
    def __init__(self) -> None:
        super().__init__("nothing")
        torch.manual_seed(1)
        self.net = nn.ModuleList([Scaling("nothing") for _ in range(4)])


OTHERS = {
    "dict of a sequence": case(partial(DictOfSequence, False)),
    "dict and output": case(partial(DictOfSequence, True)),
    "dict beside the output": case(ReadBeside),
    "stored": case(StoredInDict),
    "stored, gpipe": case(StoredInDict, "gpipe"),
    "new dict": case(partial(RenewedDict, False, False)),
    "new dict, tensor": case(partial(RenewedDict, False, True)),
    "new dict, changed": case(partial(RenewedDict, True, False)),
    "new dict, changed, tensor": case(partial(RenewedDict, True, True), "gpipe"),
    "cleared": case(Cleared),
    "aliased": case(partial(Aliased, False)),
    "aliased, trained": case(partial(Aliased, True)),
    "in place": case(InPlace),
    "in place, gpipe": case(InPlace, "gpipe"),
    # The step is cut, where each layer gets the present values.
    "changed by the step": case(ScaledByStep),
}


def test_steps_that_share_objects_with_layers_train_as_on_one_device(pool: RankPool) -> None:
    assert pool.run(differences_in, 2, OTHERS) == no_differences_in(OTHERS)


class SharedNumber(nn.Module):
    def __init__(self, holder: nn.Module) -> None:
        super().__init__()
        self.linear, self.holders = nn.Linear(16, 16), [holder]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.holders[0].number * torch.tanh(self.linear(x))


class NumberSetBetween(Classifier):
    """Classifier whose step sets an attribute before each layer, which the layer reads."""

    def __init__(self) -> None:
        super().__init__()
        holder = nn.Identity()
        holder.number = 3.0
        self.holder, self.head = holder, nn.Linear(16, 5)
        self.net = nn.ModuleList([SharedNumber(holder) for _ in range(4)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for number, layer in enumerate(self.net):  # type: ignore[arg-type, var-annotated]
            self.holder.number = float(number)
            x = layer(x)
        return F.cross_entropy(self.head(x), batch[1])


class ListOfSamples(Classifier):
    """Classifier that gives its module a list with an element for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([Lengths() for _ in range(4)])
        self.head = nn.Linear(16, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, lengths = batch[0], batch[1].tolist()
        for layer in self.net:  # type: ignore[attr-defined]
            x = layer(x, lengths)
        return F.cross_entropy(self.head(x), batch[1])


class Lengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        scales = torch.tensor([float(n) for n, _ in zip(lengths, x, strict=False)])
        return x + scales[:, None] * torch.tanh(self.linear(x))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (NumberSetBetween, "must not change"),
        (GivenTwice, "must be among their arguments once"),
        (ListOfSamples, "must not have a list with as many elements"),
    ],
)
def test_what_layers_would_not_see_is_refused(
    pool: RankPool, make: Callable[[], Classifier], words: str
) -> None:
    pool.run(expect_refusal, 2, case(make), words)


def test_a_list_of_samples_trains_in_one_micro_batch(pool: RankPool) -> None:
    cases = {"one": case(ListOfSamples, microbatches=1)}
    assert pool.run(differences_in, 2, cases) == no_differences_in(cases)
