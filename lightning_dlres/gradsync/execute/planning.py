"""Planning of gradient synchronisation on all ranks: measure here, decide on rank 0, share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch.optim import SGD, Optimizer

from lightning_dlres.codecs.gradient import GradientCodec, gradient_codec
from lightning_dlres.core.comm.mailbox import Mailbox
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.gradsync.plan.cost_model import AUTO_CODECS, auto_codecs, decide
from lightning_dlres.gradsync.plan.costs import SyncCosts
from lightning_dlres.gradsync.plan.decision import SyncDecision
from lightning_dlres.gradsync.plan.graph import TOPOLOGIES
from lightning_dlres.gradsync.plan.hosts import Hosts
from lightning_dlres.gradsync.plan.plan import SyncPlan
from lightning_dlres.gradsync.plan.prediction import BUCKET_BYTES, StepPrediction, StepPredictor
from lightning_dlres.gradsync.plan.units import GradientSpec
from lightning_dlres.gradsync.profile.measurement import measure_costs
from lightning_dlres.gradsync.profile.probe_messages import ProbeMessages

AUTO = "auto"
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class SyncPlanningOptions:
    """Options of the planning, the same on all ranks.

    Attributes:
        algorithm: "auto", the name of a codec, or "raw".
        topology: "auto", "ps" or "ring".
        is_adam_like: True if one- and two-bit gradients do not suit the optimizer; see
            `is_adam_like`. "auto" then leaves them out.
        has_error_feedback: False leaves only unbiased codecs to "auto".
        least_bytes: Gradients with fewer bytes are not compressed.
        device: Device of the gradients.
        element_bytes: Bytes of an element of a gradient.
        backward_seconds: Time of backward, with which synchronisation overlaps; 0 if not known.
        bucket_bytes: Bytes of a bucket of gradients.
        is_coordinated: True if a coordinator plans the messages; see `StepPredictor`.
        hosts: Ranks of each host, if one rank of a host synchronises for the others. The decision
            is then one for the hosts.
    """

    algorithm: str = AUTO
    topology: str = AUTO
    is_adam_like: bool = True
    has_error_feedback: bool = True
    least_bytes: int = 0
    device: torch.device = _CPU
    element_bytes: int = 4
    backward_seconds: float = 0.0
    bucket_bytes: int = BUCKET_BYTES
    is_coordinated: bool = False
    hosts: Hosts = ()


def plan_synchronisation(
    gradients: Sequence[GradientSpec],
    codecs: Mapping[str, GradientCodec],
    mailbox: Mailbox,
    options: SyncPlanningOptions,
    earlier: SyncCosts | None = None,
) -> SyncDecision:
    """Return the decision of rank 0; called by all ranks together.

    Args:
        gradients: The gradients, in the order of the model.
        codecs: Codecs by name: that of the algorithm, or the candidates of "auto".
        mailbox: Messages to the other ranks.
        options: Options of the planning.
        earlier: Costs of an earlier measurement; see `measure_costs`.

    Raises:
        PeerError: If a rank is late or lost.
    """
    messages = ProbeMessages(mailbox)
    costs = measure_costs(
        messages,
        _candidates(codecs, options),
        options.device,
        elements=sum(gradient.count for gradient in gradients),
        element_bytes=options.element_bytes,
        earlier=earlier,
        hosts=options.hosts,
    )
    text = ""
    if mailbox.rank == 0:
        text = _decide(gradients, costs, codecs, options).to_json()
    return SyncDecision.from_json(str(messages.share(text)))


def plan_rival(
    decision: SyncDecision,
    gradients: Sequence[GradientSpec],
    codecs: Mapping[str, GradientCodec],
    mailbox: Mailbox,
    options: SyncPlanningOptions,
) -> SyncDecision | None:
    """Return rank 0's decision for the same algorithm with the other topology; called by all ranks.

    None if the topology is fixed, or the other one is too slow to need a trial.

    For the other arguments see `plan_synchronisation`.

    Args:
        decision: Decision to compare with.
    """
    topology = decision.rival_topology
    if options.topology != AUTO or topology is None:
        return None
    text = ""
    if mailbox.rank == 0:
        fixed = replace(options, algorithm=decision.algorithm, topology=topology)
        text = _decide(gradients, decision.costs, codecs, fixed).to_json()
    return SyncDecision.from_json(str(ProbeMessages(mailbox).share(text)))


def plan_again(
    gradients: Sequence[GradientSpec],
    codecs: Mapping[str, GradientCodec],
    mailbox: Mailbox,
    options: SyncPlanningOptions,
    *,
    plan: SyncPlan | None,
    earlier: SyncCosts | None,
) -> tuple[SyncDecision, StepPrediction]:
    """Measure and decide again; called by all ranks together.

    For the other arguments see `plan_synchronisation`.

    Args:
        plan: Current plan, of the hosts' first ranks if there are hosts; None for torch's
            all-reduce.

    Returns:
        The new decision, and the prediction for the current plan with the new costs, both from
        rank 0.
    """
    decision = plan_synchronisation(gradients, codecs, mailbox, options, earlier)
    text = ""
    if mailbox.rank == 0:
        predictor = StepPredictor(
            decision.costs,
            codecs,
            element_bytes=options.element_bytes,
            backward_seconds=options.backward_seconds,
            bucket_bytes=options.bucket_bytes,
            is_coordinated=options.is_coordinated,
        )
        current = (
            predictor.predict_all_reduce(sum(gradient.count for gradient in gradients))
            if plan is None
            else predictor.predict_plan(plan)
        )
        text = msgspec.json.encode(current).decode()
    shared = ProbeMessages(mailbox).share(text)
    return decision, msgspec.json.decode(str(shared), type=StepPrediction)


def _candidates(
    codecs: Mapping[str, GradientCodec], options: SyncPlanningOptions
) -> dict[str, GradientCodec]:
    """Return the codecs among which to choose, by name."""
    if options.algorithm != AUTO:
        return {name: codec for name, codec in codecs.items() if name == options.algorithm}
    return auto_codecs(
        codecs,
        is_adam_like=options.is_adam_like,
        has_error_feedback=options.has_error_feedback,
    )


def _decide(
    gradients: Sequence[GradientSpec],
    costs: SyncCosts,
    codecs: Mapping[str, GradientCodec],
    options: SyncPlanningOptions,
) -> SyncDecision:
    """Return the decision for measured costs; for the arguments see `plan_synchronisation`."""
    return decide(
        gradients,
        costs,
        _candidates(codecs, options),
        algorithms=None if options.algorithm == AUTO else [options.algorithm],
        topologies=tuple(TOPOLOGIES) if options.topology == AUTO else (options.topology,),
        element_bytes=options.element_bytes,
        backward_seconds=options.backward_seconds,
        bucket_bytes=options.bucket_bytes,
        least_bytes=options.least_bytes,
        is_coordinated=options.is_coordinated,
    )


def codecs_for_auto() -> dict[str, GradientCodec]:
    """Return new codecs among which "auto" chooses, with their default options."""
    return {name: type(gradient_codec(name))() for name in AUTO_CODECS}


def check_optimizers(optimizers: object) -> Sequence[Optimizer]:
    """Return the argument `optimizers`; an empty sequence for None.

    Raises:
        ConfigError: If it is neither None nor a list of optimizers.
    """
    if optimizers is None:
        return ()
    is_list = isinstance(optimizers, (list, tuple))
    if not is_list or not all(isinstance(one, Optimizer) for one in optimizers):  # type: ignore[attr-defined]
        rule = "a list of optimizers or None"
        raise ConfigError(got_expected("optimizers", optimizers, rule, "optimizers=None"))
    return optimizers  # type: ignore[return-value]


def is_adam_like(optimizers: Iterable[Optimizer]) -> bool:
    """Return False only if one- and two-bit gradients are known to suit all optimizers.

    They suit torch's SGD, with or without momentum. Optimizers of other libraries often divide by
    an estimate of the variance, as Adam does.
    """
    kinds = [isinstance(optimizer, SGD) for optimizer in optimizers]
    return not kinds or not all(kinds)
