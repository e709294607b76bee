"""Module that initialises Numba when it is imported.

The first compiled function of a process costs a quarter of a second of CPU time: Numba then imports
its registries of types and compiles its runtime. A fork server imports this module, so that its
forks inherit both.
"""

from __future__ import annotations

from lightning_dlres.prefetch.order.sequence import shuffled

shuffled(2, seed=0, epoch=0)
