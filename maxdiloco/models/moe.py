"""Mixture of experts: many feed-forward layers, of which each token uses a few.

Tokens are sorted by expert, and no token is dropped.
"""
# B sequences  L tokens  T tokens of a device  D model  F hidden width of an expert  E experts
# K experts of a token  A = K T choices, in order of k, then of t; rows, sorted by expert

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxdiloco.models import router
from maxdiloco.models.config import ModelConfig
from maxdiloco.models.devices import on_each_device, split_axes
from maxdiloco.models.kernels import token_exchange
from maxdiloco.models.kernels.choice import Kernels
from maxdiloco.models.kernels.expert_rows import (
    Rows,
    fork,
    gather_rows,
    rows_of_round,
    sort_by_expert,
    sum_rows,
)
from maxdiloco.models.linear import Names, bias_names, constant, matrix
from maxdiloco.models.mlp import MLP, activation
from maxdiloco.models.params import is_names, leaves, map_weights, names_of
from maxdiloco.models.remat import MLP_IN, ROUTED, keep
from maxdiloco.models.router import Router, Usage
from maxdiloco.parallel.sharding import is_expert

f32 = jnp.float32
# Names of the dimensions of a device's Usage: each leaf has a leading dimension of 1, which is a
# row for each part of the batch.
USAGE_NAMES = [
    ("batch", None) if name in ("counts", "share") else ("batch",) for name in Usage._fields
]


class ExpertLinear(nnx.Module):
    """A linear layer of each expert.

    Attributes:
      kernel: [E, D, F].
      bias: [E, F], or None.
    """

    def __init__(
        self,
        config: ModelConfig,
        in_size: int,
        out_size: int,
        names: Names,
        *,
        gain: float = 1.0,
        rngs: nnx.Rngs,
    ):
        """Create the kernels, and the biases if the config has them.

        Args:
          config: the model.
          in_size: width of the input.
          out_size: width of the output.
          names: logical axis names of both.
          gain: factor on the initial values.
          rngs: draws from the stream `params`.
        """
        E, dtype = config.num_experts, config.weight_dtype
        self.kernel = matrix(
            (E, in_size, out_size),
            ("stored_expert", *names),
            fan_in=in_size,
            gain=gain,
            dtype=dtype,
            rngs=rngs,
        )
        out_names = ("expert", *bias_names(names[1:]))
        self.bias = constant((E, out_size), out_names, dtype=dtype) if config.mlp_bias else None


class Axes(NamedTuple):
    """Mesh axes of several devices over which experts, hidden dimension and length are split."""

    experts: tuple[str, ...]
    hidden: tuple[str, ...]
    length: tuple[str, ...]


class RoutedExperts(nnx.Module):
    """A router and its experts.

    Attributes:
      router: [D] -> [E].
      w_gate: [D] -> [F] of each expert, or None without a gate.
      w_up: [D] -> [F] of each expert.
      w_out: [F] -> [D] of each expert.
      routed_bias: [E], moved by the load after each step (arXiv 2412.19437, section 2.1.2), or
        None. It is float32: bfloat16 has no room for its small steps.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, *, rngs: nnx.Rngs):
        """Create the router and the experts.

        Args:
          config: the model.
          kernels: grouped products and the activation function.
          rngs: draws from the stream `params`.
        """
        self.config, self.kernels = config, kernels
        self.activation = activation(config, kernels)
        D, F = config.emb_dim, config.moe_mlp_dim
        gated = len(config.mlp_activations) == 2
        linear = functools.partial(ExpertLinear, config, rngs=rngs)
        self.router = Router(config, rngs=rngs)
        self.w_gate = linear(D, F, ("embed", "mlp")) if gated else None
        self.w_up = linear(D, F, ("embed", "mlp"))
        self.w_out = linear(F, D, ("mlp", "embed"), gain=config.residual_gain)
        E, has_bias = config.num_experts, config.router.balance_bias
        self.routed_bias = constant((E,), ("router",), dtype=f32) if has_bias else None

    def __call__(
        self, x_BLD: jax.Array, real_BL: jax.Array, *, axes: Axes
    ) -> tuple[jax.Array, Usage]:
        """Send one device's tokens through all experts, on this device and on others.

        Args:
          x_BLD: normed tokens of this device.
          real_BL: tokens that are not padding, bool.
          axes: mesh axes that are manual here.

        Returns:
          [B, L, D], and the Usage by these tokens.
        """
        config = self.config
        x_TD, real_T = x_BLD.reshape(-1, x_BLD.shape[-1]), real_BL.reshape(-1)
        logits_TE = self.router(x_TD)
        routed_bias_E = None if self.routed_bias is None else self.routed_bias[...]
        selection = router.select(config, logits_TE, routed_bias_E)
        experts_TK = jnp.where(real_T[:, None], selection.experts_TK, config.num_experts)
        tokens = x_TD, experts_TK, selection.weights_TK
        if not axes.experts:
            y_TD = self._local(*tokens, first=0)
        elif self.kernels.token_exchange == "all_to_all":
            y_TD = self._exchanged(*tokens, axes=axes.experts)
        else:
            in_rounds = self.kernels.token_exchange == "all_gather_in_rounds"
            even_share = experts_TK.size if in_rounds else None
            tokens = [jax.lax.all_gather(x, axes.experts, tiled=True) for x in tokens]
            first = jax.lax.axis_index(axes.experts) * self.w_up.kernel.shape[0]
            y_TD = self._local(*tokens, first=first, even_share=even_share)
            y_TD = jax.lax.psum_scatter(y_TD, axes.experts, tiled=True)
        if axes.hidden:
            y_TD = jax.lax.psum(y_TD, axes.hidden)
        used = router.usage(selection, logits_TE, real_T)
        if axes.length:
            used = jax.lax.psum(used, axes.length)
        return y_TD.reshape(x_BLD.shape), used

    def _local(self, x_TD, experts_TK, weights_TK, *, first, even_share=None):
        """[T, D]: the weighted sum of the outputs of this device's experts for each token.

        The experts of this device have the numbers from `first` on; choices of others give 0.

        even_share: rows of this device's experts if all experts are used alike. They are computed
        in rounds with room for a little more. None: in one round with room for all choices.
        """
        A, K = experts_TK.size, experts_TK.shape[1]
        _, rows = sort_by_expert(experts_TK, first, self.w_up.kernel.shape[0])
        of_rows = functools.partial(_outputs_of_rows, self.kernels, self.activation, K)
        operands = self._layers(), x_TD, weights_TK
        if even_share is None:
            return of_rows(rows, operands)
        room = token_exchange.buffer_rows(even_share, A // even_share)
        one_round = functools.partial(_outputs_of_round, of_rows, room)
        count = jnp.maximum(1, -(-jnp.sum(rows.sizes_E) // room))
        return token_exchange.sum_rounds(one_round, count, rows, operands)

    def _exchanged(self, x_TD, experts_TK, weights_TK, *, axes):
        """[T, D]: the weighted sum of the outputs of all experts, which are split over `axes`.

        Rows go to the devices of their experts, and the outputs come back.
        """
        K = experts_TK.shape[1]
        _, rows = sort_by_expert(experts_TK, 0, self.config.num_experts)
        x_AD = gather_rows(K, x_TD, rows)
        weights_A = gather_rows(1, weights_TK.T.reshape(-1), rows)
        counts_NE = keep(jax.lax.all_gather(rows.sizes_E, axes), ROUTED)
        room = token_exchange.buffer_rows(len(x_AD), len(counts_NE))
        one_round = functools.partial(_one_round, self.kernels, self.activation, axes, room)
        count = token_exchange.num_rounds(counts_NE, room)
        operands = self._layers(), x_AD, weights_A
        y_AD = token_exchange.sum_rounds(one_round, count, counts_NE, operands)
        return sum_rows(K, y_AD, rows)

    def _layers(self) -> dict[str, tuple[jax.Array, jax.Array | None]]:
        """Kernel and bias of each linear layer."""
        layers = {"w_up": self.w_up, "w_gate": self.w_gate, "w_out": self.w_out}
        return {
            name: (layer.kernel[...], None if layer.bias is None else layer.bias[...])
            for name, layer in layers.items()
            if layer is not None
        }


class MoE(nnx.Module):
    """Routed experts, and shared experts that every token uses.

    Attributes:
      routed: the router and its experts.
      shared: one MLP of the joint width of the shared experts (arXiv 2401.06066, section 3.2), or
        None.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, *, rngs: nnx.Rngs):
        """Create the experts.

        Args:
          config: the model.
          kernels: products and activation functions.
          rngs: draws from the stream `params`.
        """
        self.config = config
        self.routed = RoutedExperts(config, kernels, rngs=rngs)
        width = config.shared_experts * config.moe_mlp_dim
        self.shared = MLP(config, kernels, width, rngs=rngs) if width else None

    def __call__(self, x_BLD: jax.Array, real_BL: jax.Array | None) -> tuple[jax.Array, Usage]:
        """Transform each token.

        Args:
          x_BLD: the normed residual stream.
          real_BL: tokens that are not padding, which the experts ignore. None in generation, where
            no token is padding.

        Returns:
          [B, L, D] to be added to the residual stream, and the Usage by the batch.
        """
        config = self.config
        if real_BL is None:
            real_BL = jnp.ones(x_BLD.shape[:2], bool)
        layer, weights = nnx.split(self.routed, nnx.Param)
        names, axes = names_of(weights), _axes(config)
        to_gather = {of_weight: _axes_to_gather(config, of_weight) for of_weight in leaves(names)}

        def on_device(x_BLD, real_BL, weights):
            weights = map_weights(functools.partial(_gathered, to_gather, axes.hidden), weights)
            experts = nnx.merge(layer, weights)
            y_BLD, used = experts(x_BLD, real_BL, axes=axes)
            return [y_BLD, *(x[None] for x in used)]

        rows = ("batch", "length", None)
        y_BLD, *sums = on_each_device(
            on_device,
            in_names=[rows, rows[:2], jax.tree.map(_as_passed, names, is_leaf=is_names)],
            out_names=[rows, *USAGE_NAMES],
            rules=config.rules,
        )(x_BLD, real_BL, weights)
        if self.shared is not None:
            y_BLD = y_BLD + self.shared(x_BLD)
        return y_BLD, Usage(*(jnp.sum(x_G, axis=0) for x_G in sums))


def _axes(config: ModelConfig) -> Axes:
    """The mesh axes of the context; called while they are not manual yet."""
    return Axes(*(split_axes((name,), config.rules)[0] for name in ("expert", "mlp", "length")))


def _as_passed(names: Names) -> tuple[str | None, ...]:
    """Experts come as they are stored; a router is on every device, see sharding.gather_weight."""
    return names if is_expert(names) else (None,) * len(names)


def _axes_to_gather(config: ModelConfig, names: Names) -> list[tuple[int, tuple[str, ...]]]:
    """Pairs (dimension, mesh axes) that a device lacks of a weight with these names.

    It computes with its part of the experts and of the hidden dimension.
    """
    if "stored_expert" not in names:
        return []
    expert = split_axes(("expert",), config.rules)[0]
    stored = split_axes(names, config.rules)
    stored[names.index("mlp")] = ()
    left = [tuple(axis for axis in over if axis not in expert) for over in stored]
    return [(dim, over) for dim, over in enumerate(left) if over]


def _gathered(to_gather, over_hidden, x, names):
    """A weight as a device computes with it; the gradient of a gather is a reduce-scatter.

    The last bias stays with the first of the partial sums over the hidden dimension.
    """
    for dim, axes in to_gather[names]:
        x = jax.lax.all_gather(x, axes, axis=dim, tiled=True)
    if over_hidden and names == ("expert", "bias"):
        x = jnp.where(jax.lax.axis_index(over_hidden) == 0, x, 0)
    return x


def _apply_experts(kernels, activate, sizes_E, operands):
    """[A, D]: weighted outputs of experts for rows that are sorted by expert.

    Hidden values are weighted instead of the outputs, so that no gradient needs the latter.

    operands: the experts' layers, x_AD, weights_A.
    """
    layers, x_AD, weights_A = operands
    weights_A1 = weights_A[:, None]

    def product(name, x_AD, weights=1):
        kernel, bias = layers[name]
        out = kernels.grouped_product(x_AD, kernel, sizes_E)
        if bias is None:
            return out
        ends_E, row_A = jnp.cumsum(sizes_E), jnp.arange(len(x_AD))
        expert_A = jnp.searchsorted(ends_E, row_A, side="right")
        expert_A = jnp.minimum(expert_A, len(sizes_E) - 1)
        return _plus_bias(out, bias, expert_A, (row_A < ends_E[-1])[:, None], weights)

    for_up_AD, for_gate_AD = fork(x_AD)
    inputs = [keep(product("w_up", for_up_AD), MLP_IN)]
    if "w_gate" in layers:
        inputs.append(keep(product("w_gate", for_gate_AD), MLP_IN))
    hidden_AF = (activate(*inputs) * weights_A1).astype(x_AD.dtype)
    return product("w_out", hidden_AF, weights_A1)


def _outputs_of_rows(kernels, activate, K, rows: Rows, operands):
    """[T, D]: the weighted sum of the outputs of these rows for each token.

    operands: the experts' layers, x_TD, weights_TK.
    """
    layers, x_TD, weights_TK = operands
    x_AD = gather_rows(K, x_TD, rows)
    weights_A = gather_rows(1, weights_TK.T.reshape(-1), rows)
    y_AD = _apply_experts(kernels, activate, rows.sizes_E, (layers, x_AD, weights_A))
    return sum_rows(K, y_AD, rows)


def _outputs_of_round(of_rows, room, number, rows: Rows, operands):
    return of_rows(rows_of_round(rows, number, room), operands)


def _one_round(kernels, activate, axes, room, number, counts_NE, operands):
    """[A, D]: weighted outputs of all experts for the rows of this device in one round."""
    layers, x_AD, weights_A = operands
    me = jax.lax.axis_index(axes)
    out, back = token_exchange.slices_of_round(counts_NE, me, number, room)
    move = functools.partial(token_exchange.exchange, axes)
    sizes = len(x_AD), room
    x_RD, weights_R = (move(sizes, x, out, back) for x in (x_AD, weights_A))
    sizes_E = jnp.sum(back.sizes_NL, axis=0)
    y_RD = _apply_experts(kernels, activate, sizes_E, (layers, x_RD, weights_R))
    return move(sizes[::-1], y_RD, back, out)


def _plus_bias(out, bias_EF, experts, here=True, weights=1):
    """Add each row's bias. experts: index of each row's expert. here: rows that have an expert."""
    bias = jnp.where(here, bias_EF[experts] * weights, 0)
    return out + bias.astype(out.dtype)
