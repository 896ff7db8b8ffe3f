"""Mixture of experts: a feed-forward layer of many, of which each token uses a few."""
# B sequences  L tokens  D model  E experts  K experts of a token  F hidden width of an expert
# T tokens of a device

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxdiloco.models import experts, router
from maxdiloco.models.each_device import automatic_spec, on_each_device
from maxdiloco.models.layers import MLP, activated
from maxdiloco.models.remat import MLP_IN, keep
from maxdiloco.models.router import Usage
from maxdiloco.models.weights import residual_gain, weight
from maxdiloco.parallel.sharding import axes_of, is_expert

f32 = jnp.float32

NAMES = {  # logical axis names of each weight
    "router": ("embed", "router"),
    "router_bias": ("router",),
    "routed_bias": ("router",),
    "w_gate": ("stored_expert", "embed", "mlp"),
    "w_up": ("stored_expert", "embed", "mlp"),
    "w_out": ("stored_expert", "mlp", "embed"),
    "w_gate_bias": ("expert", "mlp"),
    "w_up_bias": ("expert", "mlp"),
    "w_out_bias": ("expert", "bias"),
}
# Usage of a device has a leading dim of 1, a row for each part of the batch.
SUMS = {
    name: ("batch", None) if name in ("counts", "share") else ("batch",) for name in Usage._fields
}


class MoE(nnx.Module):
    """A router, E experts alike an MLP, and shared experts that every token uses.

    The shared experts are one MLP of their joint width (arXiv 2401.06066, section 3.2).
    """

    def __init__(self, spec, rngs):
        D, E, F = spec.emb_dim, spec.num_experts, spec.moe_mlp_dim
        self.spec = spec
        gated = len(spec.mlp_activations) == 2
        self.router = self._weight(rngs, "router", (D, E), D)
        if gated:
            self.w_gate = self._weight(rngs, "w_gate", (E, D, F), D)
        self.w_up = self._weight(rngs, "w_up", (E, D, F), D)
        self.w_out = self._weight(rngs, "w_out", (E, F, D), F, gain=residual_gain(spec.num_layers))
        if spec.router.logit_bias:
            self.router_bias = _zeros("router_bias", (E,), spec.weight_dtype)
        if spec.mlp_bias:
            if gated:
                self.w_gate_bias = _zeros("w_gate_bias", (E, F), spec.weight_dtype)
            self.w_up_bias = _zeros("w_up_bias", (E, F), spec.weight_dtype)
            self.w_out_bias = _zeros("w_out_bias", (E, D), spec.weight_dtype)
        if spec.router.balance_bias:  # float32: bfloat16 has no room for its small steps
            self.routed_bias = _zeros("routed_bias", (E,), f32)
        if spec.shared_experts:
            self.shared = MLP(dataclasses.replace(spec, mlp_dim=spec.shared_experts * F), rngs)

    def _weight(self, rngs, name, shape, fan_in, **options):
        return weight(rngs.params(), shape, NAMES[name], fan_in=fan_in, spec=self.spec, **options)

    def __call__(self, x_BLD, real_BL):
        """([B, L, D], Usage of the batch); x is normed. Padding gets nothing from the experts.

        real_BL: which tokens are not padding; None in generation: all are, and none is dropped.
        """
        spec = self.spec
        dropless = real_BL is None or spec.capacity_factor == -1
        if real_BL is None:
            real_BL = jnp.ones(x_BLD.shape[:2], bool)
        weights = nnx.to_pure_dict(nnx.state(self))
        shared = weights.pop("shared", None)
        rows = ("batch", "length", None)
        y_BLD, *sums = on_each_device(
            functools.partial(_on_device, spec, _splits(spec), dropless, tuple(weights)),
            in_names=(rows, rows[:2], *(_as_passed(NAMES[name]) for name in weights)),
            out_names=[rows, *(SUMS[name] for name in Usage._fields)],
            rules=spec.rules,
        )(x_BLD, real_BL, *weights.values())
        if shared is not None:
            y_BLD = y_BLD + self.shared(x_BLD)
        return y_BLD, Usage(*(jnp.sum(x_G, axis=0) for x_G in sums))


def _zeros(name, shape, dtype):
    return nnx.Param(jnp.zeros(shape, dtype), names=NAMES[name])


class Splits(NamedTuple):
    """Mesh axes of more than one device over which dims of these names are split."""

    expert: tuple[str, ...]
    mlp: tuple[str, ...]
    length: tuple[str, ...]
    whole: dict[str, list[tuple[int, tuple[str, ...]]]]  # weight -> dims to gather, over which axes


def _splits(spec) -> Splits:
    """Called outside the function of one device, where the axes are not manual yet."""

    def axes(names):
        return [axes_of(entry) for entry in automatic_spec(names, spec.rules, split_only=True)]

    expert, mlp, length = (axes((name,))[0] for name in ("expert", "mlp", "length"))
    whole = {}
    for name, names in NAMES.items():
        if "stored_expert" in names:
            stored = axes(names)
            stored[names.index("mlp")] = ()
            left = [tuple(axis for axis in over if axis not in expert) for over in stored]
            whole[name] = [(dim, over) for dim, over in enumerate(left) if over]
    return Splits(expert, mlp, length, whole)


def _as_passed(names):
    """The experts come as they are stored; a router is gathered, see sharding.gathered."""
    return names if is_expert(names) else (None,) * len(names)


def _on_device(spec, splits, dropless, names, x_BLD, real_BL, *weights):
    """One device's tokens through all experts, its own and those of other devices."""
    w = _gathered(dict(zip(names, weights, strict=True)), splits)
    x_TD, real_T = x_BLD.reshape(-1, x_BLD.shape[-1]), real_BL.reshape(-1)
    logits_TE = _logits(x_TD, w)
    choice = router.choose(spec, logits_TE, w.get("routed_bias"))
    tokens = (x_TD, jnp.where(real_T[:, None], choice.experts_TK, spec.num_experts))
    tokens += (choice.weights_TK,)
    hidden, dropped = functools.partial(_hidden, spec), jnp.int32(0)
    if not dropless:
        y_TD, dropped = experts.in_slots(spec, hidden, w, *tokens, splits.expert)
        y_TD = y_TD.astype(x_BLD.dtype)
    elif not splits.expert:
        y_TD = experts.dropless(spec, hidden, w, *tokens, 0).astype(x_BLD.dtype)
    else:
        tokens = [jax.lax.all_gather(x, splits.expert, tiled=True) for x in tokens]
        first = jax.lax.axis_index(splits.expert) * w["w_up"].shape[0]
        y_TD = experts.dropless(spec, hidden, w, *tokens, first).astype(x_BLD.dtype)
        y_TD = jax.lax.psum_scatter(y_TD, splits.expert, tiled=True)
    if splits.mlp:
        y_TD = jax.lax.psum(y_TD, splits.mlp)
    used = router.usage(choice, logits_TE, real_T, dropped)
    if splits.length:
        used = jax.lax.psum(used, splits.length)
    return y_TD.reshape(x_BLD.shape), *(x[None] for x in used)


def _gathered(w, splits):
    """The experts' weights, whole but for the split over experts and over the hidden dim.

    The gradient of the gather is a reduce-scatter. The last bias is with the first of the partial
    sums over the hidden dim.
    """
    w = dict(w)
    for name in w.keys() & splits.whole.keys():
        for dim, axes in splits.whole[name]:
            w[name] = jax.lax.all_gather(w[name], axes, axis=dim, tiled=True)
    if splits.mlp and "w_out_bias" in w:
        w["w_out_bias"] = jnp.where(jax.lax.axis_index(splits.mlp) == 0, w["w_out_bias"], 0)
    return w


def _logits(x_TD, w):
    """[T, E] float32: a choice between experts must not hang on bfloat16's rounding."""
    logits_TE = jnp.einsum(
        "td,de->te", x_TD.astype(f32), w["router"].astype(f32), precision="highest"
    )
    return logits_TE + w["router_bias"].astype(f32) if "router_bias" in w else logits_TE


def _hidden(spec, product):
    """The hidden values of tokens; product(name) is a token's product with its expert's matrix."""
    names = ("w_up", "w_gate")[: len(spec.mlp_activations)]
    return activated(spec, *(keep(product(name), MLP_IN) for name in names))
