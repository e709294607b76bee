"""Hook that DistributedDataParallel gets only when it is needed.

Without a hook, DDP divides gradients by the number of ranks while it copies them into a bucket.
With a hook, the division is another pass over memory, even if torch's all-reduce does the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_dlres.gradsync.hook.ddp_hook import compressed_hook
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState


class LazyHook:
    """Registers `compressed_hook` before the first backward that needs it.

    Until then, torch averages the gradients. Steps are counted and watched nevertheless, and the
    ranks may change the plan between two of them.

    Args:
        state: State of the hook, with all parameters named.
        module: Module whose gradients are synchronised.

    Attributes:
        is_registered: True once the module has the hook, which it then keeps.
    """

    def __init__(self, state: GradientSyncState, module: DistributedDataParallel) -> None:
        self._state, self._module = state, module
        self.is_registered = False
        # The first layer's gradients are mostly the last ones.
        first = next(p for p in module.module.parameters() if p.requires_grad)
        self._handle: RemovableHandle = first.register_post_accumulate_grad_hook(self._note_ready)
        self._register_if_needed()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context manager of a backward; all ranks use it in the same backwards.

        Raises:
            PeerError: If a rank was lost or late.
            ConfigError: If the state was closed.
        """
        is_plain = not self.is_registered and self._module.require_backward_grad_sync
        if is_plain:
            self._state.begin_unhooked()
            self._register_if_needed()
        yield
        if is_plain and not self.is_registered:
            self._state.end_unhooked()

    def close(self) -> None:
        """Remove the hook of the first parameter."""
        self._handle.remove()

    def _register_if_needed(self) -> None:
        if self._state.needs_hook:
            self.is_registered = True
            self._handle.remove()
            self._module.register_comm_hook(self._state, compressed_hook)

    def _note_ready(self, parameter: Tensor) -> None:
        if self._module.require_backward_grad_sync:
            self._state.note_ready()
