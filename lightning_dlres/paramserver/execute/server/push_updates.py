"""Optimizer steps by single pushes, for "asp" and "ssp", with the options of whole steps.

With n workers, n pushes make a step. While a worker computes a gradient, about n - 1 pushes of
others change the parameters. Therefore:

- SGD, with 1/n of the learning rate, adds at once what momentum would add over the next n - 1
  pushes. Workers then take parameters that are already where momentum carries them until the
  gradient arrives: Nesterov's momentum, over n - 1 pushes in place of a step (Hakimi et al., 2019,
  "Taming Momentum in a Distributed Asynchronous Environment"). Each gradient moves a parameter as
  far as in a joint step.
- Adam and AdamW do so, too. They divide by the size of gradients, and those of single pushes are
  noisier than their mean. By the rule for smaller batches the learning rate is divided by the
  root of n, and momentum keeps the n-th root of its factor with each push (Malladi et al., 2022,
  "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms"). Decoupled weight decay is 1/n
  of a step's.
- Other optimizers have 1/n of the learning rate; without a learning rate, 1/n of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer


class PushStep:
    """Step of an optimizer by one push.

    The optimizer steps with `options` between `before` and `after`.

    Args:
        kind: Class of the optimizer.
        options: All options of the parameter's group, for a joint step.
        workers: Number of workers whose pushes make a step.

    Attributes:
        options: Options for the optimizer.
    """

    def __init__(self, kind: type[Optimizer], options: Mapping[str, Any], workers: int) -> None:
        self.options = dict(options)
        # Share of a gradient that momentum adds after the next n - 1 pushes; None if all of it.
        self._later: float | None = None
        self._is_adam, self._is_user_owned = kind in (Adam, AdamW), "lr" not in options
        self._workers = workers
        if workers == 1 or self._is_user_owned:
            return
        if self._is_adam:
            self._plan_adam(kind)
        else:
            self.options["lr"] = options["lr"] / workers
            if kind is SGD and options["momentum"]:
                self._plan_sgd()

    def before(self, parameter: nn.Parameter) -> None:
        """Prepare a parameter's gradient; add what SGD adds at once."""
        gradient = parameter.grad
        assert gradient is not None
        if self._is_user_owned and self._workers > 1:
            gradient.div_(self._workers)
        if self._later is None:
            return
        # The optimizer would do it in its step, but the gradient is needed here, too.
        if self._is_maximized:
            gradient.neg_()
        if self._weight_decay:
            gradient.add_(parameter, alpha=self._weight_decay)
        if not self._is_adam:
            parameter.add_(gradient, alpha=-self._at_once)

    def after(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Add the difference of what Adam adds at once to what its step has added.

        Args:
            parameter: The parameter, after the optimizer's step.
            state: Its state in the optimizer.
        """
        if self._later is None or not self._is_adam:
            return
        steps, (beta1, beta2) = float(state["step"]), self.options["betas"]
        average = state["exp_avg"] / (1 - beta1**steps)
        square: Tensor = state["max_exp_avg_sq" if self.options["amsgrad"] else "exp_avg_sq"]
        size = square.sqrt().div_(math.sqrt(1 - beta2**steps)).add_(self.options["eps"])
        lead = average.neg_().add_(parameter.grad)
        parameter.addcdiv_(lead, size, value=-self.options["lr"] * (1 - self._later))

    def _plan_sgd(self) -> None:
        options, momentum = self.options, self.options["momentum"]
        self._take_over_gradient()
        pushes = self._workers if options["nesterov"] else self._workers - 1
        options["nesterov"] = False
        self._later = momentum**pushes
        in_time = sum(momentum**push for push in range(pushes)) * (1 - options["dampening"])
        self._at_once = options["lr"] * in_time
        options["lr"] *= self._later

    def _plan_adam(self, kind: type[Optimizer]) -> None:
        options, root = self.options, math.sqrt(self._workers)
        is_decoupled = options.get("decoupled_weight_decay", kind is AdamW)
        if is_decoupled:
            options["weight_decay"] /= root
        self._take_over_gradient(has_weight_decay=not is_decoupled)
        options["lr"] /= root
        beta1, beta2 = options["betas"]
        options["betas"] = beta1 ** (1 / self._workers), beta2
        self._later = options["betas"][0] ** (self._workers - 1)

    def _take_over_gradient(self, *, has_weight_decay: bool = True) -> None:
        options = self.options
        self._is_maximized, options["maximize"] = options["maximize"], False
        self._weight_decay = options["weight_decay"] if has_weight_decay else 0.0
        if has_weight_decay:
            options["weight_decay"] = 0.0
