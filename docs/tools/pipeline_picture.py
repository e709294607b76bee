"""The README's picture: one training step with an even split and with a planned one.

    python -m docs.tools.pipeline_picture docs/images/hetero_pipe.png

Times come from the simulator, for a model of 16 equal layers on two devices of different speed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_dlres.pipeline.plan.cost_model.costs import Workload
from lightning_dlres.pipeline.plan.cost_model.simulator import simulate
from lightning_dlres.pipeline.plan.schedules.registry import schedule_named
from lightning_dlres.pipeline.plan.search.device_orders import search_plan
from lightning_dlres.pipeline.profile.cluster import Cluster, Device, Link
from lightning_dlres.pipeline.profile.run_profile import LayerProfile, StepCosts
from lightning_dlres.pipeline.report.gantt import Panel, draw

# The second device takes three times as long as the first.
_FORWARD, _BACKWARD, _SLOWER = 0.004, 0.008, 3.0
_LAYERS, _MICROBATCHES = 16, 6


def picture() -> bytes:
    """Return the picture as PNG."""
    layer = {
        "output_bytes": 1 << 16,
        "gradient_output_bytes": 1 << 16,
        "forward": (_FORWARD, _FORWARD * _SLOWER),
        "backward": (_BACKWARD, _BACKWARD * _SLOWER),
    }
    workload = Workload(
        layers=tuple(LayerProfile(name=f"block {i}", **layer) for i in range(_LAYERS)),
        step=StepCosts(loss=(0.002, 0.006)),
        cluster=Cluster(
            kinds=("fast", "slow"),
            devices=(Device(kind=0, power=1.0), Device(kind=1, power=1 / _SLOWER)),
            links=(Link(ranks=(0, 1), latency=2e-4, bytes_per_second=25e6),),
        ),
        replicas=((0, 1),),
        schedule=schedule_named("1f1b"),
        microbatches=_MICROBATCHES,
    )
    even = (_LAYERS // 2, _LAYERS // 2)
    planned = search_plan(workload, 2, keep_order=True).split
    panels = [
        Panel(f"Even split, {even[0]} + {even[1]} layers", simulate(workload, even)),
        Panel(f"Planned split, {planned[0]} + {planned[1]} layers", simulate(workload, planned)),
    ]
    return draw(panels, {(0, 0): "fast device", (0, 1): "slow device"})


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(picture())
