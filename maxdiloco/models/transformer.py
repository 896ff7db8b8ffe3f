"""The decoder-only transformer: parameters as a plain nested dict, layers stacked and scanned."""
# B sequences  L tokens  D model  N query heads  K key/value heads  H head dim  V vocabulary
# `layers` is the leading dim of stacked parameters  p layers of a block

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxdiloco.diloco.fragments import Stacked, Vocabulary
from maxdiloco.models import attention, devices, layers, router
from maxdiloco.models.layers import norm_table, rms_norm
from maxdiloco.models.loss import next_tokens, token_losses
from maxdiloco.models.moe import moe, moe_table
from maxdiloco.models.remat import checkpointed
from maxdiloco.models.rope import rotation
from maxdiloco.models.spec import ModelSpec
from maxdiloco.models.weights import initial
from maxdiloco.parallel.sharding import constrain, gathered, is_vector

Params = dict[str, Any]
LAYERS = "layers"  # the stack's key among the parameters; all layers but the first dense ones


class Stack(NamedTuple):
    """Layers of equal shapes, whose parameters have one leading dim and the key `name`.

    layers: their numbers in the model, rising. table: the weights of one.
    """

    name: str
    layers: tuple[int, ...]
    table: layers.Table


def layer_table(spec: ModelSpec, has_experts: bool) -> layers.Table:
    """Weights of decoder_layer. Its blocks' inputs (pre), outputs (post) or both are normed."""
    table = {"attention": layers.attention_table(spec)}
    if has_experts:
        table["moe"] = moe_table(spec)
    else:
        table["mlp"] = layers.feed_forward_table(spec, spec.mlp_dim)
    norms = ["attention_norm", "mlp_norm"] if spec.norm_placement != "post" else []
    if spec.norm_placement != "pre":
        norms += ["post_attention_norm", "post_mlp_norm"]
    return table | {name: norm_table(spec, spec.emb_dim) for name in norms}


def decoder_layer(spec, w, x_BLD, rope, attend, real_BL=None):
    """The residual stream after a layer, the cache that attend returned, use of experts or None.

    rope: Rotation of the positions. attend: see layers.attention. real_BL: see moe.
    """

    def normed(name, y_BLD):
        return rms_norm(spec, w[name], y_BLD) if name in w else y_BLD

    y_BLD = normed("attention_norm", x_BLD)
    y_BLD, cache = layers.attention(spec, w["attention"], y_BLD, rope, attend)
    x_BLD = x_BLD + normed("post_attention_norm", y_BLD)
    y_BLD, used = normed("mlp_norm", x_BLD), None
    if "moe" in w:
        y_BLD, used = moe(spec, w["moe"], y_BLD, real_BL)
    else:
        y_BLD = layers.mlp(spec, w["mlp"], y_BLD)
    x_BLD = x_BLD + normed("post_mlp_norm", y_BLD)
    return constrain(x_BLD, ("batch", "length", "embed_act"), spec.rules), cache, used


@dataclass(frozen=True, eq=False)  # hashed by identity: a static argument of jax.jit
class Model:
    """One replica's view of a decoder: functions of a nested dict of parameters."""

    spec: ModelSpec

    @functools.cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """Runs of layers of equal shapes, in their order."""
        spec, n = self.spec, self.spec.first_num_dense_layers
        runs = ("dense_layers", range(n), False), (LAYERS, range(n, spec.num_layers), True)
        return tuple(
            Stack(name, tuple(numbers), layer_table(spec, has_experts and spec.num_experts > 1))
            for name, numbers, has_experts in runs
            if numbers
        )

    @functools.cached_property
    def ends(self) -> layers.Table:
        """Weights outside the layers."""
        return layers.ends_table(self.spec)

    @property
    def logical_axes(self) -> Params:
        """Like the parameters, a tuple of logical names per leaf."""
        return jax.tree.map(lambda w: w.names, self.ends) | {
            stack.name: jax.tree.map(lambda w: ("layers", *w.names), stack.table)
            for stack in self.stacks
        }

    @property
    def layer_axis(self) -> Params:
        """Like the parameters, the dim that counts layers, with their numbers where these are not
        all; Vocabulary(dim) or None outside of the layers.
        """
        tree = jax.tree.map(
            lambda w: Vocabulary(w.names.index("vocab")) if "vocab" in w.names else None, self.ends
        )
        for name, numbers, table in self.stacks:
            axis = 0 if len(numbers) == self.spec.num_layers else Stacked(0, numbers)
            tree[name] = jax.tree.map(lambda _, axis=axis: axis, table)
        return tree

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters in spec.weight_dtype; the same key gives the same on any mesh."""
        key_ends, key_layers = jax.random.split(key)
        keys = jax.random.split(key_layers, self.spec.num_layers)
        params = initial(self.spec, self.ends, key_ends)
        for name, numbers, table in self.stacks:
            of_stack = keys[numbers[0] : numbers[-1] + 1]
            params[name] = jax.vmap(functools.partial(initial, self.spec, table))(of_stack)
        return params

    def loss(self, params: Params, batch: dict[str, jax.Array]):
        """Sum of the token losses of one replica's batch, and its parts: Algorithm 2, line 4.

        batch: "tokens" and "segment_ids", int32 [B, L].
        Returns (total, aux); aux, without gradient: float32 sums "tokens" (targets that count) and
        the terms of the total "cross_entropy", "z_loss" and, with experts, those of router.losses
        (means over the batch's tokens times the targets); also router.sums.
        """
        spec, segment_ids_BL = self.spec, batch["segment_ids"]
        rows = (batch["tokens"], *next_tokens(batch["tokens"], segment_ids_BL))
        tokens_BL, targets_BL, counts_BL = (devices.spread(x_BL, spec.rules) for x_BL in rows)
        segment_ids_BL = devices.whole(segment_ids_BL, spec.rules)
        x_BLD, used = self._hidden_states(params, tokens_BL, segment_ids_BL)
        total, (cross_entropy, z_loss) = token_losses(
            spec, x_BLD, head_weight(spec, params), targets_BL, counts_BL
        )
        tokens = jnp.sum(counts_BL, dtype=jnp.float32)
        aux = {"tokens": tokens, "cross_entropy": cross_entropy, "z_loss": z_loss}
        if used is not None:
            terms = {name: mean * tokens for name, mean in router.losses(spec, used).items()}
            total += sum(terms.values())
            aux |= terms | router.sums(spec, used)
        return total, jax.lax.stop_gradient(aux)

    def _hidden_states(self, params, tokens_BL, segment_ids_BL):
        """After the last layer and the final norm, [B, L, D]; and the use of experts."""
        spec = self.spec

        def attend(kind, _, q_BLNH, k_BLKH, v_BLKH, sinks_N):
            arrays = q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, sinks_N
            return attention.attend(spec, kind.window, *arrays), None

        x_BLD, _, used = self.through_layers(
            params,
            tokens_BL,
            devices.positions_here(tokens_BL.shape[1], spec.rules)[None],
            attend,
            real_BL=devices.spread(segment_ids_BL != 0, spec.rules),
            policy=spec.remat_policy,
            unrolled=spec.unrolled,
        )
        return rms_norm(spec, params["final_norm"], x_BLD), used

    def through_layers(
        self, params, tokens_BL, positions_BL, attend, caches=None, *, real_BL=None, policy="none",
        unrolled=False,
    ):  # fmt: skip
        """The residual stream after the last layer, the caches that attend returned, experts' use.

        positions: one row serves all sequences. attend: (LayerKind, cache, q, k, v, sinks) ->
        (context, cache), see layers.attention. caches: of each stack a pytree of [layers, ...] or
        None, as the second result. real_BL: see moe. policy: see remat.checkpointed. unrolled: see
        over_layers; layers whose weights are gathered stay a loop. Use of experts: router.Usage
        [layers with experts, ...], None without.
        """
        spec, out, used = self.spec, [], None
        scattered = spec.scattered_gradients
        gather = functools.partial(gathered, rules=spec.rules, scattered=scattered)
        x_BLD = layers.look_up(spec, params["embedding"], tokens_BL)
        x_BLD = constrain(x_BLD, ("batch", "length", "embed_act"), spec.rules)
        ropes = {
            kind.rope: rotation(positions_BL, spec.rotated_dim, kind.rope) for kind in spec.pattern
        }
        for i, stack in enumerate(self.stacks):

            def body(kind, x_BLD, entry, table=stack.table):
                w, cache = entry
                w = jax.tree.map(lambda x, weight: gather(x, weight.names), w, table)
                here = functools.partial(attend, kind, cache)
                x_BLD, *rest = decoder_layer(spec, w, x_BLD, ropes[kind.rope], here, real_BL)
                return x_BLD, tuple(rest)

            weights = jax.tree.map(self._for_compute, params[stack.name], stack.table)
            stacked = weights, None if caches is None else caches[i]
            kinds = [spec.pattern[layer % len(spec.pattern)] for layer in stack.layers]
            # Without a loop XLA:GPU gathers the weights of all layers before it uses them, and adds
            # up whole gradients of all before it scatters one (benchmarks/results).
            names = [one.names for one in jax.tree.leaves(stack.table)]
            at_once = unrolled and not any(devices.is_gathered(n, spec.rules) for n in names)
            x_BLD, (cache, used) = over_layers(
                body, x_BLD, stacked, kinds, policy=policy, unrolled=at_once
            )
            out.append(cache)
        return x_BLD, tuple(out), used  # the last stack is the one with experts

    def _for_compute(self, x, entry):
        """Stacked weights in spec.dtype, cast before the scan so that gathers move the small type.

        Norm scales are applied in float32, a router chooses in it; they stay as they are, like
        biases and sinks.
        """
        kept = is_vector(entry.names) or "router" in entry.names
        return x if kept else x.astype(self.spec.dtype)

    def rebalanced(self, params: Params, counts_lE: jax.Array) -> Params:
        """The parameters with the routed biases of the next step (arXiv 2412.19437, 2.1.2).

        Up where an expert had fewer tokens than the mean, down where it had more; no auxiliary
        loss. counts_lE: choices of each expert in the step, over the whole batch of the replica.
        """
        stack, rate = params[LAYERS], self.spec.routed_bias_update_rate
        bias_lE = stack["moe"]["routed_bias"]
        mean_l1 = jnp.mean(counts_lE, axis=-1, keepdims=True)
        bias_lE = bias_lE + rate * jnp.sign(mean_l1 - counts_lE).astype(bias_lE.dtype)
        return params | {LAYERS: stack | {"moe": stack["moe"] | {"routed_bias": bias_lE}}}


def count_parameters(model: Model) -> int:
    """Parameters of the model; nothing is allocated."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def head_weight(spec: ModelSpec, params: Params) -> jax.Array:
    """[D, V], or the embedding [V, D] when tied."""
    return params["embedding" if spec.tied_head else "head"]


def over_layers(
    body: Callable, x, stacked, kinds: Sequence[Any], *, policy: str, unrolled: bool = False
):
    """x after every layer, and what the layers gave beside it, stacked.

    body: (kind, x, entry) -> (x, y); entry: of the layer, from `stacked`, a pytree [layers, ...].
    kinds: hashable, of each layer. Layers of one kind are a scan of one layer; kinds that repeat
    are a scan of the shortest block that does, and what the blocks leave over runs after it.
    policy: see checkpointed. unrolled: the program has every iteration, without a loop.
    """
    sizes = range(1, len(kinds) + 1)
    period = next(p for p in sizes if all(k == kinds[i % p] for i, k in enumerate(kinds)))
    if period == 1:
        layer = checkpointed(functools.partial(body, kinds[0]), policy, in_loop=not unrolled)
        return jax.lax.scan(layer, x, stacked, unroll=unrolled)
    blocks, rest = divmod(len(kinds), period)
    whole, over = _split(stacked, [blocks * period, rest])
    whole = jax.tree.map(lambda w: w.reshape(blocks, period, *w.shape[1:]), whole)
    # A loop of one iteration is no loop to the compiler.
    first = _block(body, kinds[:period], policy, in_loop=blocks > 1 and not unrolled)
    x, y = jax.lax.scan(first, x, whole, unroll=unrolled)
    y = jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), y)
    if not rest:
        return x, y
    x, y_over = _block(body, kinds[:rest], policy, in_loop=False)(x, over)
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), y, y_over)


def _block(body, kinds, policy, *, in_loop):
    """(x, entries [p, ...]) -> (x, y [p, ...])."""

    def block(x, entries):
        ys = []
        for kind, entry in zip(kinds, _split(entries, [1] * len(kinds)), strict=True):
            layer = checkpointed(functools.partial(body, kind), policy, in_loop=in_loop)
            x, y = layer(x, jax.tree.map(lambda w: w[0], entry))
            ys.append(y)
        return x, jax.tree.map(lambda *y: jnp.stack(y), *ys)

    return block


def _split(tree, sizes):
    """The tree in parts of the first dim; the gradient joins them again, which costs one copy."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [jax.lax.split(leaf, sizes, axis=0) for leaf in leaves]
    return [structure.unflatten([part[i] for part in parts]) for i in range(len(sizes))]
