"""Small networks whose backward needs saved tensors of every kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.support.models import VOCABULARY, gpt, mlp


class UNet(nn.Module):
    """U-Net with two levels: storages of the first layers are used last."""

    def __init__(self) -> None:
        super().__init__()

        def block(channels: int, out: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True)
            )

        self.down, self.middle = block(3, 8), block(8, 16)
        self.pool = nn.MaxPool2d(2)
        self.upsample = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.up, self.head = block(16, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down(x)
        deep = self.middle(self.pool(first))
        return self.head(self.up(torch.cat([first, self.upsample(deep)], 1)))


class Recurrent(nn.Module):
    """LSTM classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, num_layers=2, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def relu_cnn() -> nn.Module:
    """Return a network of convolutions and ReLUs, one of them in place, and dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 4),
    )


@dataclass(frozen=True)
class NetworkCase:
    """Network with a function that makes its batches."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Tensor]


CASES = {
    "mlp": NetworkCase(lambda: mlp(0.2), lambda: torch.randn(6, 16)),
    "cnn": NetworkCase(relu_cnn, lambda: torch.randn(4, 3, 8, 8)),
    "gpt": NetworkCase(lambda: gpt(0.1), lambda: torch.randint(VOCABULARY, (3, 10))),
    "unet": NetworkCase(UNet, lambda: torch.randn(2, 3, 8, 8)),
    "lstm": NetworkCase(Recurrent, lambda: torch.randn(5, 7, 8)),
}
