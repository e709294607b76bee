"""Parameters whose gradients are sparse."""

from __future__ import annotations

from torch import Tensor, nn


def sparse_parameters(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module's embeddings with `sparse=True`.

    DistributedDataParallel gives each of them a bucket of its own.
    """
    embeddings = [m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    return [embedding.weight for embedding in embeddings if embedding.sparse]
