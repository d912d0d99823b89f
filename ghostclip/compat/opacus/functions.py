"""Functions and layers of Opacus that scripts use by themselves: accounting, norms and sums, recurrent layers.

The central limit theorem gives a sampled training its μ. What follows from that μ can lie far below the true ε, so
nothing here turns steps into an ε by it; `ghostclip.accounting.GaussianAccountant(estimate=True)` does.

Layers are torch's under Opacus's names. ghostclip clips the gradients of torch's own modules, so nothing needs to be
replaced: these are torch's classes with Opacus's constructor arguments, `state_init` and `batch_size_t`. Outputs and
`state_dict` keys are torch's, so that weights go from one to the other in both directions. What Opacus's own classes
leave out or compute otherwise (`proj_size`; dropout, which they also put on the state that a layer hands to its next
step) is torch's here.

Shape letters: A orders, B samples, T steps, E features, H hidden features.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

from ghostclip import _torch
from ghostclip._validate import defaults, non_negative, positive, positive_int, probability, takes
from ghostclip.accounting import GaussianAccountant, RDPAccountant
from ghostclip.accounting.history import checked_noise_multiplier, checked_sample_rate
from ghostclip.accounting.rdp import epsilon_from_rdp, rdp_curve
from ghostclip.errors import GhostClipError, InvalidOptionError, UnsupportedModelError
from ghostclip.validation.layer_check import STRATEGIES, Inputs, compute_grad_sample, compute_microbatch_grad_sample


class DPMultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention``: the same arguments, outputs and ``state_dict`` keys.

    Opacus's class of this name computes another function with ``batch_first=True`` and more than one head (it mixes
    heads with positions), refuses ``is_causal`` and 2-D masks of ``batch_first`` inputs; weights trained here are meant
    for torch's function.
    """


class SequenceBias(nn.Module):
    """Appends one learned element, drawn from a standard normal distribution, to the end of every sequence.

    Attributes:
        bias: The element, shape ``(E,)``.

    Args:
        embed_dim: E.
        batch_first: Whether sequences are ``(B, T, E)``, not ``(T, B, E)``.
    """

    def __init__(self, embed_dim: int, batch_first: bool = False) -> None:  # noqa: FBT001, FBT002 - Opacus's signature
        super().__init__()
        self.batch_first = batch_first
        self.bias = nn.Parameter(torch.empty(embed_dim))
        nn.init.normal_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequences with the element appended: one step more, same dtype."""
        if self.batch_first:
            return torch.cat([x, self.bias.repeat(x.shape[0], 1, 1)], 1)
        return torch.cat([x, self.bias.repeat(1, x.shape[1], 1)], 0)


class RNNLinear(nn.Linear):
    """``torch.nn.Linear`` under the name that Opacus gives to those inside its cells.

    Attributes:
        max_batch_len: Set by scripts for Opacus; not needed here.
    """

    max_batch_len: int


class _TakesStateInit:
    """Lets the initial state be given as ``state_init``, as in Opacus, or as ``hx``, as in torch."""

    def forward(self, input: Tensor | PackedSequence, hx: Any = None, state_init: Any = None) -> Any:  # noqa: A002
        """Run the layer as torch does, from the initial state ``hx`` or ``state_init``, or from zeros."""
        forward: Any = super().forward  # type: ignore[misc]
        return forward(input, hx if state_init is None else state_init)


class DPLSTM(_TakesStateInit, nn.LSTM):
    """``torch.nn.LSTM``, its initial state also as ``state_init``."""


class DPGRU(_TakesStateInit, nn.GRU):
    """``torch.nn.GRU``, its initial state also as ``state_init``."""


class DPRNN(_TakesStateInit, nn.RNN):
    """``torch.nn.RNN`` with Opacus's order of arguments.

    Args:
        input_size: Features of the input.
        hidden_size: H.
        options: Those of ``torch.nn.RNN``, and `proj_size`, which must be 0: only an LSTM has projections.

    Raises:
        UnsupportedModelError: A projection is asked for.
    """

    @takes(
        *defaults({"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False}),
        *defaults({"proj_size": 0, "nonlinearity": "tanh"}),
    )
    def __init__(self, input_size: int, hidden_size: int, options: dict) -> None:
        if proj_size := options.pop("proj_size"):
            message = f"DPRNN: proj_size={proj_size}, but only an LSTM has projections. Use DPLSTM, or leave it at 0."
            raise UnsupportedModelError(message)
        super().__init__(input_size, hidden_size, **options)


class _TakesBatchSize:
    """Lets a step be taken with the first rows of a state only, as Opacus does for packed sequences."""

    def forward(self, input: Tensor, hx: Any = None, batch_size_t: int | None = None) -> Any:  # noqa: A002
        """Return the state after a step from the first ``batch_size_t`` rows of a state ``(B, H)`` or pair of them."""
        if hx is not None and batch_size_t is not None:
            hx = hx[:batch_size_t] if isinstance(hx, Tensor) else tuple(part[:batch_size_t] for part in hx)
        forward: Any = super().forward  # type: ignore[misc]
        return forward(input, hx)


class DPLSTMCell(_TakesBatchSize, nn.LSTMCell):
    """``torch.nn.LSTMCell``, also on the first rows of a state."""


class DPGRUCell(_TakesBatchSize, nn.GRUCell):
    """``torch.nn.GRUCell``, also on the first rows of a state."""


class DPRNNCell(_TakesBatchSize, nn.RNNCell):
    """``torch.nn.RNNCell``, also on the first rows of a state."""


class RenameParamsMixin:
    """A module whose parameters appear under other names: those of a reference layer that it replaces.

    A parameter is registered on the module itself under its new name as well, where ``named_parameters`` of any module
    around it finds it first; ``state_dict`` holds the new names alone, and loading accepts them, however deep the
    module lies. Write it before ``nn.Module`` among the base classes.
    """

    def set_rename_map(self, rename_map: Mapping[str, str]) -> None:
        """Say which parameters have other names, also of those that are added later.

        Args:
            rename_map: New name by old name; the old ones dotted where a submodule has the parameter.
        """
        assert isinstance(self, nn.Module)
        first = "old_to_new" not in vars(self)
        self.old_to_new = dict(rename_map)
        self.new_to_old = {new: old for old, new in rename_map.items()}
        if first:
            self.register_state_dict_post_hook(_without_old_names)
            self.register_load_state_dict_pre_hook(_with_old_names)
        _register_renamed(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a parameter that comes with it gets its new name at once."""
        super().__setattr__(name, value)
        if isinstance(value, (nn.Module, nn.Parameter)) and "old_to_new" in vars(self):
            _register_renamed(self)


def _register_renamed(module: Any) -> None:
    table = _torch.parameter_table(module)
    for old, new in module.old_to_new.items():
        owner, _, key = old.rpartition(".")
        try:
            parameter = _torch.parameter_table(module.get_submodule(owner)).get(key)
        except AttributeError:
            continue
        if parameter is not None and table.get(new) is not parameter:
            module.register_parameter(new, parameter)
            if not owner:
                # Listed before its old name, of which it takes the place.
                table[key] = table.pop(key)


def _without_old_names(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for old in module.old_to_new:
        state_dict.pop(prefix + old, None)


def _with_old_names(module: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    for old, new in module.old_to_new.items():
        if prefix + new in state_dict:
            state_dict.setdefault(prefix + old, state_dict[prefix + new])


# ---------------------------------------------------------------- accounting


def compute_mu_poisson(*, steps: int, noise_multiplier: float, sample_rate: float) -> float:
    """Estimate the μ of a number of steps on Poisson samples: q·√(T·(e^{1/σ²} - 1)).

    Privacy:
        No bound; see the module.

    Args:
        steps: T.
        noise_multiplier: σ.
        sample_rate: q.

    Returns:
        μ.

    Reference:
        Bu, Dong, Long, Su 2020, Corollary 2.
    """
    count, estimate = positive_int(steps, "steps"), GaussianAccountant(estimate=True)
    estimate.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate)
    return math.sqrt(count) * estimate.mu


def delta_eps_mu(*, eps: float, mu: float) -> float:
    """Return the exact δ of a μ-Gaussian mechanism: Φ(μ/2 - ε/μ) - e^ε·Φ(-μ/2 - ε/μ).

    Args:
        eps: ε ≥ 0.
        mu: μ > 0.

    Returns:
        δ in [0, 1].

    Reference:
        Balle and Wang 2018, Theorem 8; Dong, Roth, Su 2022, Corollary 1.
    """
    # Imported when it is used: scipy's statistics take long to load.
    from ghostclip.audit.methods import gaussian_delta

    return gaussian_delta(non_negative(eps, "eps"), mu=positive(mu, "mu"))


def eps_from_mu(*, mu: float, delta: float) -> float:
    """Return the ε of a μ-Gaussian mechanism, exact up to rounding.

    Args:
        mu: μ > 0.
        delta: δ in (0, 1).

    Returns:
        ε ≥ 0.
    """
    from ghostclip.audit.methods import gaussian_epsilon

    return gaussian_epsilon(positive(mu, "mu"), delta=probability(delta, "delta"))


def compute_rdp(
    *, q: float, noise_multiplier: float, steps: int, orders: Sequence[float] | float
) -> list[float] | float:
    """Return the Rényi divergence of a number of equal steps; the same bounds as `RDPAccountant`'s.

    Args:
        q: Probability with which each record joins a batch.
        noise_multiplier: σ.
        steps: Number of steps.
        orders: α > 1, one or several.

    Returns:
        The divergence at each order; a number for a number.

    Raises:
        InvalidOptionError: If a value is out of range.
    """
    count, sigma = positive_int(steps, "steps"), checked_noise_multiplier(noise_multiplier)
    rdp_A = count * rdp_curve(noise_multiplier=sigma, sample_rate=checked_sample_rate(q), orders=_checked(orders))
    return [float(value) for value in rdp_A] if isinstance(orders, Sequence) else float(rdp_A[0])


def get_privacy_spent(
    *, orders: Sequence[float] | float, rdp: Sequence[float] | float, delta: float
) -> tuple[float, float]:
    """Return the smallest ε that a Rényi curve proves, and the order that proves it.

    Args:
        orders: α > 1, one or several.
        rdp: The divergence at each of them.
        delta: δ in (0, 1).

    Returns:
        (ε, α).

    Raises:
        InvalidOptionError: If the two differ in number, or a value is out of range.
    """
    orders_A, rdp_A = _checked(orders), np.asarray(rdp, dtype=np.float64).ravel()
    if rdp_A.shape != orders_A.shape or not np.all(rdp_A >= 0):
        raise InvalidOptionError(f"rdp={rdp!r}: give one divergence of at least 0 for each of {orders_A.size} orders.")
    epsilon, best = epsilon_from_rdp(orders_A, rdp_A, delta=probability(delta, "delta"))
    return epsilon, float(orders_A[best])


def _checked(orders: Sequence[float] | float) -> np.ndarray:
    orders_A = np.asarray(orders, dtype=np.float64).ravel()
    if not orders_A.size or not np.all(np.isfinite(orders_A) & (orders_A > 1)):
        raise InvalidOptionError(f"orders={orders!r}: give finite orders greater than 1.")
    return orders_A


# ---------------------------------------------------------------- norms and sums of per-sample gradients


def calc_sample_norms(named_params: Iterable[tuple[str, Tensor]], *, flat: bool = True) -> list[Tensor]:
    """Return the norm of every sample's gradient.

    Args:
        named_params: (name, per-sample gradient `[B, ...]`) of each parameter.
        flat: Over all parameters together, or of each by itself.

    Returns:
        One tensor `[B]`, or one for each parameter; float32 at least.
    """
    norms = [calc_sample_norms_one_layer(grad_sample) for _, grad_sample in named_params]
    return [torch.stack(norms).norm(dim=0)] if flat else norms


def calc_sample_norms_one_layer(param: Tensor) -> Tensor:
    """Return the norms `[B]`, in float32 at least, of every sample's gradient `[B, ...]` of one parameter."""
    wide = param.to(torch.promote_types(param.dtype, torch.float32))
    return wide.reshape(len(param), -1 if param.numel() else 0).norm(dim=1)


def sum_over_all_but_batch_and_last_n(tensor: Tensor, n_dims: int) -> Tensor:
    """Add up what lies between the samples and the last axes.

    Args:
        tensor: `[B, ..., last n_dims axes]`.
        n_dims: How many axes at the end stay.

    Returns:
        `[B, last n_dims axes]`.
    """
    between = tuple(range(1, tensor.dim() - n_dims))
    return tensor.sum(dim=between) if between else tensor


def compute_seq_lengths(batch_sizes: Tensor) -> list[int]:
    """Return the lengths, longest first, of a packed sequence with these `batch_sizes`."""
    sizes = batch_sizes.tolist()
    return [sum(size > sequence for size in sizes) for sequence in range(sizes[0] if sizes else 0)]


def compute_grad_samples_microbatch_and_opacus(
    x: Inputs,
    module: nn.Module,
    batch_first: bool = True,  # noqa: FBT001, FBT002 - Opacus's signature
    loss_reduction: str = "mean",
    grad_sample_mode: str = "hooks",
    chunk_method: Callable[[Any], Iterator[Any]] = iter,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return per-sample gradients as one sample after the other gives them, and as the engine forms them.

    Args:
        x: A batch.
        module: The module; copies are run.
        batch_first: Whether the samples lie along axis 0.
        loss_reduction: The loss's reduction over the samples.
        grad_sample_mode: "hooks", or another of Opacus's names for it.
        chunk_method: Yields the batch's samples as batches of one; `iter` stands for rows along the batch axis.

    Returns:
        Gradients by parameter name, `(B, *P)`, both times.
    """
    wanted = compute_microbatch_grad_sample(x, module, batch_first, chunk_method=chunk_method)
    return wanted, compute_grad_sample(x, module, batch_first, loss_reduction, grad_sample_mode)


def get_grad_sample_modes(use_ew: bool = False) -> list[str]:  # noqa: FBT001, FBT002 - Opacus's signature
    """Return the strategies that a check of a layer goes through; Opacus's "ew" is one of them, "hooks"."""
    return list(STRATEGIES)


# ---------------------------------------------------------------- parameters of modules and optimizers


def params(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups that require a gradient, in order."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def has_params(module: nn.Module) -> bool:
    """Return whether a module itself, not its children, owns a parameter."""
    return next(module.parameters(recurse=False), None) is not None


def requires_grad(module: nn.Module, *, recurse: bool = False) -> bool:
    """Return whether a module owns a trainable parameter.

    Args:
        module: The module.
        recurse: Whether its children count too.

    Returns:
        Whether it does.
    """
    return any(p.requires_grad for p in module.parameters(recurse=recurse))


def iterate_submodules(module: nn.Module) -> Iterator[nn.Module]:
    """Return the modules inside a module, itself included, that own parameters."""
    return filter(has_params, module.modules())


def parametrized_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return (name, module) of those inside a module, itself included, that own parameters."""
    return ((name, part) for name, part in module.named_modules() if has_params(part))


def trainable_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return (name, module) of those inside a module, itself included, that own trainable parameters."""
    return ((name, part) for name, part in module.named_modules() if requires_grad(part))


def trainable_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return (name, parameter) of the trainable ones of a module and its children, each once."""
    return ((name, p) for name, p in module.named_parameters() if p.requires_grad)


def clone_module(module: nn.Module) -> nn.Module:
    """Return an independent copy of a module on the same devices."""
    return copy.deepcopy(module)


def get_submodule(module: nn.Module, target: str) -> nn.Module:
    """Return a module inside another one.

    Args:
        module: The outer module.
        target: Dotted name; "" is the module itself.

    Returns:
        The inner module.
    """
    return module.get_submodule(target)


def are_state_dict_equal(sd1: Mapping[str, Tensor], sd2: Mapping[str, Tensor]) -> bool:
    """Say whether two states hold the same names with the same values.

    Args:
        sd1: A state.
        sd2: Another one.

    Returns:
        Whether they do, values compared exactly.
    """
    return sd1.keys() == sd2.keys() and all(torch.equal(value, sd2[name]) for name, value in sd1.items())


# ---------------------------------------------------------------- `scripts.compute_dp_sgd_privacy`


def compute_dp_sgd_privacy(
    *, sample_rate: float, noise_multiplier: float, epochs: int, delta: float, alphas: Sequence[float] | None = None
) -> tuple[float, float]:
    """Return the ε of a training by Rényi accounting, and the order that proves it.

    Args:
        sample_rate: Probability with which each record joins a batch.
        noise_multiplier: σ.
        epochs: Passes over the data.
        delta: δ.
        alphas: Orders to search.

    Returns:
        (ε, α).
    """
    accountant = RDPAccountant()
    accountant.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate)
    accountant.history = [(noise_multiplier, sample_rate, steps_of(sample_rate, epochs))]
    return accountant.get_privacy_spent(delta=delta, alphas=alphas)


def steps_of(sample_rate: float, epochs: int) -> int:
    """Return the number of steps of a training.

    Args:
        sample_rate: Probability with which each record joins a batch.
        epochs: Passes over the data.

    Returns:
        Steps, rounded up.
    """
    return math.ceil(positive_int(epochs, "epochs") / sample_rate)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what a planned training will cost; `ghostclip epsilon` knows more.

    Args:
        arguments: As on the command line.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="compute_dp_sgd_privacy", description="What a planned training will cost.")
    parser.add_argument("-r", "-s", "--sample-rate", type=float, required=True, help="probability to join a batch")
    parser.add_argument("-n", "--noise-multiplier", type=float, required=True, help="σ, in units of the bound")
    parser.add_argument("-e", "--epochs", type=int, required=True, help="passes over the data")
    parser.add_argument("-d", "--delta", type=float, default=1e-5, help="δ (default: %(default)s)")
    parser.add_argument("-a", "--alphas", type=float, nargs="+", help="Rényi orders to search; a wide range by default")
    plan = parser.parse_args(arguments)
    try:
        epsilon, alpha = compute_dp_sgd_privacy(**vars(plan))
    except GhostClipError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(
        f"DP-SGD with sampling rate {plan.sample_rate:g}, noise multiplier {plan.noise_multiplier:g} and "
        f"{steps_of(plan.sample_rate, plan.epochs)} steps is (ε, δ) = ({epsilon:.4g}, {plan.delta:g})-private, "
        f"proved at order α = {alpha:g}.\n"
    )
    return 0
