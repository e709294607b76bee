"""Updates on the servers, in the place of the optimizers' own.

A gradient is pushed as soon as backward has made it, if nothing may change it any more. Other
gradients are pushed when the optimizer steps. The step then waits for the new parameters. The
optimizer itself finds no gradients and changes nothing, but its hooks, schedulers and counters work
as usual.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_dlres._compat import has_foreign_gradient_hooks
from lightning_dlres.core._compat import accumulated_parameter, version_of
from lightning_dlres.core.errors import ConfigError, UnsupportedStepError
from lightning_dlres.paramserver.execute.server.optimizers import group_options
from lightning_dlres.paramserver.execute.worker.edited_parameters import EditedParameters
from lightning_dlres.paramserver.execute.worker.session import WorkerSession, norm_scale
from lightning_dlres.paramserver.setup.model_keys import ModelKeys, require_separate
from lightning_dlres.strategies.parameter_server.clipping import Clipping, ClippingBounds

# Least number of elements, spread over a gradient, that are compared.
_SAMPLE = 256


class _PushedGradient:
    """A gradient as it was when it was pushed.

    Writes through `.data` leave the version of a tensor as it is, so some elements are compared.
    """

    def __init__(self, gradient: Tensor) -> None:
        self._gradient, self._version = gradient, version_of(gradient)
        self._sample = self._elements().clone()

    def has_changed(self, gradient: Tensor | None) -> bool:
        """Return True if the parameter has another gradient now, or its elements have changed."""
        if gradient is not self._gradient or version_of(self._gradient) != self._version:
            return True
        # Compare bits, since NaN is unequal to itself.
        before, now = (t.view(torch.uint8) for t in (self._sample, self._elements().clone()))
        return not torch.equal(before, now)

    def _elements(self) -> Tensor:
        """Return elements at equal distances; the gradient is dense."""
        gradient = self._gradient.detach().reshape(-1)
        return gradient[:: max(gradient.numel() // _SAMPLE, 1)]


class _EmptyState(defaultdict[Any, Any]):
    """State of an optimizer whose real state is on the servers.

    Code that clears it, to restart momentum, would change nothing.
    """

    def __init__(self) -> None:
        super().__init__(dict)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy is the state of another optimizer.
        return defaultdict, (dict, dict(self))

    @override
    def clear(self) -> None:
        raise UnsupportedStepError(
            "optimizer.state must stay as it is in fit, since the servers hold it, got a call of "
            "clear on a rank. Call fit once more, which begins with a new state."
        )


class RemoteUpdates:
    """Hooks that let the servers update the parameters.

    Args:
        session: Session of this rank.
        keys: Keys of the model.
        optimizers: The optimizers, without Lightning's wrappers.
        clipping: Clipping of the steps.
        may_push_early: Returns True if no other code needs the gradients of this backward.
    """

    def __init__(
        self,
        session: WorkerSession,
        keys: ModelKeys,
        optimizers: Sequence[Optimizer],
        clipping: Clipping,
        may_push_early: Callable[[], bool],
    ) -> None:
        self._session, self._keys, self._optimizers = session, keys, tuple(optimizers)
        self._clipping, self._may_push_early = clipping, may_push_early
        self._edits = EditedParameters(keys.parameters)
        self._edits.remember()
        # Gradients of this step that were pushed in backward, as they were then.
        self._pushed: dict[nn.Parameter, _PushedGradient] = {}
        # Gradients that the optimizer must not see.
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        # Optimizer and group of each parameter in this step; None before its first push.
        self._places: dict[nn.Parameter, tuple[int, int]] | None = None
        # Options of each group in this step, as msgpack.
        self._options: dict[tuple[int, int], bytes] = {}
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
            for parameter in keys.by_parameter
            if parameter.requires_grad
        ]
        for optimizer in self._optimizers:
            optimizer.state = _EmptyState()
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        # Code of the user's own may call the step of an optimizer without the Trainer.
        self._pre_hooks = {
            optimizer: optimizer.register_step_pre_hook(self._before_step)
            for optimizer in self._optimizers
        }

    def prepare_step(self, optimizer: Optimizer) -> None:
        """Prepare for a step of an optimizer.

        The hook of this object must be the last one, since others may change gradients and options.

        Raises:
            UnsupportedStepError: If it is another optimizer than at the start.
        """
        if all(optimizer is not own for own in self._optimizers):
            raise UnsupportedStepError(
                f"optimizers must stay those of the start of fit, got another "
                f"{type(optimizer).__name__}: the servers hold the optimizer. Change the options "
                "in param_groups, or call fit once more."
            )
        self._pre_hooks.pop(optimizer).remove()
        self._pre_hooks[optimizer] = optimizer.register_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Remove the hooks, and let other code clear the states again."""
        for handle in (*self._handles, *self._pre_hooks.values()):
            handle.remove()
        for optimizer in self._optimizers:
            optimizer.state = defaultdict(dict, optimizer.state)
        self._handles.clear()
        self._pre_hooks.clear()

    def _on_gradient(self, hooked: Tensor) -> None:
        parameter = accumulated_parameter(hooked)
        self._clipping.renew(parameter)
        # Another hook may change the gradient after this one.
        is_early = self._may_push_early() and not has_foreign_gradient_hooks(parameter)
        if is_early and parameter.grad is not None and parameter in self._step_places():
            if parameter in self._pushed:
                raise UnsupportedStepError(
                    "backward must run once in a step that overlaps with pushes, but it made a "
                    "gradient twice. Set ParameterServerStrategy(overlap=False)."
                )
            optimizer = self._optimizers[self._keys.groups[parameter][0]]
            self._push(parameter, self._clipping.of(optimizer))
            self._pushed[parameter] = _PushedGradient(parameter.grad)

    def _step_places(self) -> dict[nn.Parameter, tuple[int, int]]:
        if self._places is None:
            self._places = self._keys.places(self._optimizers)
        return self._places

    def _push(self, parameter: nn.Parameter, bounds: ClippingBounds) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise ConfigError(
                "gradients must be dense for a parameter server, got a sparse one of shape "
                f"{tuple(gradient.shape)}. Use nn.Embedding(..., sparse=False)."
            )
        place = self._step_places()[parameter]
        if place not in self._options:
            self._options[place] = self._encoded_options(place)
        for key in reversed(self._keys.by_parameter[parameter]):
            self._session.push(
                key.index,
                gradient,
                self._options[place],
                is_held=bounds.max_norm is not None,
                clip_value=bounds.max_value or 0.0,
            )

    def _encoded_options(self, place: tuple[int, int]) -> bytes:
        return msgspec.msgpack.encode(group_options(self._optimizers[place[0]], place[1]))

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # The first argument is the optimizer itself.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = args[:1], {**kwargs, "closure": lambda: loss}
        if not self._pushed:
            self._places = None
        places = self._step_places()
        self._require_unedited()
        if self._edits.have_moved():
            # Two parameters may share their memory now.
            require_separate(self._keys.parameters)
        if type(optimizer.state) is not _EmptyState or any(optimizer.state.values()):
            raise UnsupportedStepError(
                "optimizer.state must be empty on a rank, since the servers hold it, got a state "
                "from other code. Resume with ckpt_path instead of load_state_dict, and let a step "
                "of your own skip parameters whose grad is None."
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._require_unchanged(places)
        bounds = self._clipping.of(optimizer)
        # In the order in which backward makes gradients, as far as that is known. Other workers
        # wait for a parameter that is trained, also if it has no gradient here. Optimizers use
        # gradients of parameters that were frozen after backward, too.
        landed = set(self._pushed)
        for parameter in reversed(parameters):
            is_used = parameter.requires_grad or parameter.grad is not None
            if is_used and parameter not in self._pushed:
                self._push(parameter, bounds)
                landed.add(parameter)
        if bounds.max_norm is not None:
            self._session.commit(norm_scale(self._session.wait_merged(), bounds.max_norm))
        self._session.wait()
        self._session.land()
        self._edits.remember(landed)
        self._pushed.clear()
        self._options.clear()
        self._places = None
        self._hidden = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, _ in self._hidden:
            parameter.grad = None
        return args, kwargs

    def refresh(self) -> None:
        """Land the latest values between two steps, except those of frozen parameters that other
        code has changed.

        Raises:
            PeerError: If a server does not answer in time.
        """
        without = self._edits.names(are_trained=False)
        self._session.refresh(without=without)
        self._edits.remember({p for n, p in self._keys.parameters.items() if n not in without})

    def are_edited(self) -> bool:
        """Return True if other code has changed parameters since the last step."""
        return bool(self._edits.names())

    def _require_unedited(self) -> None:
        names = self._edits.names()
        if names:
            more = f" and {len(names) - 1} others" if len(names) > 1 else ""
            raise UnsupportedStepError(
                f"parameter {names[0]}{more} changed between two steps, but servers hold the "
                "parameters, and the change would be lost. Change parameters only through the "
                "optimizer, whose step must leave those without a gradient as they are, or use "
                "another strategy."
            )

    def _require_unchanged(self, places: Mapping[nn.Parameter, tuple[int, int]]) -> None:
        """Raise if code has changed what was pushed already.

        Args:
            places: Optimizer and group of each parameter at the first push.

        Raises:
            UnsupportedStepError: If a gradient, an option or a group has changed.
        """
        if self._pushed and self._keys.places(self._optimizers) != places:
            raise UnsupportedStepError(
                "a group of the optimizer was changed after gradients were pushed to the servers. "
                "Set ParameterServerStrategy(overlap=False)."
            )
        for parameter, pushed in self._pushed.items():
            if pushed.has_changed(parameter.grad):
                raise UnsupportedStepError(
                    "a gradient was changed after it was pushed to the servers. Set "
                    "ParameterServerStrategy(overlap=False)."
                )
        for place, options in self._options.items():
            if self._encoded_options(place) != options:
                raise UnsupportedStepError(
                    "an option of the optimizer, such as lr, was changed after gradients were "
                    "pushed to the servers. Set ParameterServerStrategy(overlap=False)."
                )

    def _after_step(self, *args: Any) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()
