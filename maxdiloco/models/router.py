"""The router: the selection of each token's experts, their weights, and the balance of their use.

The selections of DeepSeek-V3 (arXiv 2412.19437), Qwen3-MoE (arXiv 2505.09388), Mixtral (arXiv
2401.04088) and gpt-oss (arXiv 2508.10925) are options of one router.
"""
# T tokens  D model  E experts  K experts of a token  G groups of experts  l layers

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxdiloco.models.config import ModelConfig
from maxdiloco.models.linear import add_bias, constant, matrix

f32 = jnp.float32
SMALLEST = 1e-20  # added to the sum of the chosen scores, as DeepSeek-V3 does
# Names in the aux of the loss: its terms, and the tokens of each expert.
LOAD_BALANCE_LOSS, ROUTER_Z_LOSS = "load_balance_loss", "router_z_loss"
LOSSES = (LOAD_BALANCE_LOSS, ROUTER_Z_LOSS)
COUNTS = "expert_counts"
GROUP_SCORES = 2  # a group's score is the sum of its two best experts (arXiv 2412.19437, 2.1.2)


class Router(nnx.Module):
    """Logits of the experts for each token.

    Attributes:
      kernel: [D, E].
      bias: [E], or None.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Create the kernel, and the bias if the config has one.

        Args:
          config: the model.
          rngs: draws from the stream `params`.
        """
        D, E = config.emb_dim, config.num_experts
        dtype = config.weight_dtype
        self.kernel = matrix((D, E), ("embed", "router"), fan_in=D, dtype=dtype, rngs=rngs)
        has_bias = config.router.logit_bias
        self.bias = constant((E,), ("router",), dtype=dtype) if has_bias else None

    def __call__(self, x_TD: jax.Array) -> jax.Array:
        """Compute logits in float32: a selection must not depend on the rounding of bfloat16.

        Args:
          x_TD: normed tokens.

        Returns:
          [T, E], float32.
        """
        factors = x_TD.astype(f32), self.kernel[...].astype(f32)
        return add_bias(jnp.einsum("td,de->te", *factors, precision="highest"), self.bias)


class Selection(NamedTuple):
    """Experts of each token.

    Attributes:
      experts_TK: their numbers, int32.
      weights_TK: their weights in the token's sum, float32.
      share_TE: share of each expert in the token's scores, float32.
    """

    experts_TK: jax.Array
    weights_TK: jax.Array
    share_TE: jax.Array


class Usage(NamedTuple):
    """Sums over the tokens that are not padding, float32.

    Attributes:
      counts: tokens of each expert, [..., E].
      share: sum of Selection.share_TE, [..., E].
      squared_lse: sum of the squared log normaliser of the logits.
      entropy: sum of the entropies of the shares [nats].
    """

    counts: jax.Array
    share: jax.Array
    squared_lse: jax.Array
    entropy: jax.Array


def select(config: ModelConfig, logits_TE: jax.Array, routed_bias_E: jax.Array | None) -> Selection:
    """Select the K experts of each token.

    The score function computes scores from the logits, in float32. The best K experts are selected,
    with their scores as weights; `normalise_weights` divides the weights by their sum. A softmax
    over the K best logits (Mixtral, gpt-oss) equals softmax, selection and division. With groups,
    only the experts of the `groups_per_token` best groups are eligible (arXiv 2412.19437, section
    2.1.2).

    Args:
      config: the model; `config.router` has the options.
      logits_TE: float32.
      routed_bias_E: added to the scores for the selection only, or None.

    Returns:
      Experts, weights and shares.
    """
    router = config.router
    if router.score_function == "sigmoid":
        scores_TE = jax.nn.sigmoid(logits_TE)
        share_TE = scores_TE / (jnp.sum(scores_TE, axis=-1, keepdims=True) + SMALLEST)
    else:
        share_TE = scores_TE = jax.nn.softmax(logits_TE, axis=-1)
    rank_TE = jax.lax.stop_gradient(scores_TE)
    if routed_bias_E is not None:
        rank_TE = rank_TE + jax.lax.stop_gradient(routed_bias_E).astype(f32)
    if router.num_groups > 1:
        rank_TE = _in_best_groups(rank_TE, router.num_groups, router.groups_per_token)
    experts_TK = jax.lax.top_k(rank_TE, config.num_experts_per_tok)[1]
    weights_TK = jnp.take_along_axis(scores_TE, experts_TK, axis=-1)
    if router.normalise_weights:
        weights_TK = weights_TK / (jnp.sum(weights_TK, axis=-1, keepdims=True) + SMALLEST)
    return Selection(experts_TK, weights_TK * router.scaling_factor, share_TE)


def _in_best_groups(rank_TE, num_groups, kept):
    """Return rank_TE with minus infinity outside the best groups of consecutive experts."""
    T, E = rank_TE.shape
    rank_TGE = rank_TE.reshape(T, num_groups, -1)
    best = jax.lax.top_k(rank_TGE, min(GROUP_SCORES, E // num_groups))[0]
    groups = jax.lax.top_k(jnp.sum(best, axis=-1), kept)[1]
    eligible_TG = jnp.any(groups[..., None] == jnp.arange(num_groups), axis=-2)
    return jnp.where(eligible_TG[..., None], rank_TGE, -jnp.inf).reshape(T, E)


def usage(selection: Selection, logits_TE: jax.Array, real_T: jax.Array) -> Usage:
    """Sum up how the experts are used.

    Args:
      selection: experts of each token.
      logits_TE: the logits of the selection.
      real_T: tokens that are not padding, bool.

    Returns:
      The sums.
    """
    E = logits_TE.shape[-1]
    chosen_TE = jnp.sum(selection.experts_TK[..., None] == jnp.arange(E), axis=-2)
    share_TE = selection.share_TE
    lse_T = jax.nn.logsumexp(logits_TE, axis=-1)
    entropy_T = -jnp.sum(share_TE * jnp.log(jnp.maximum(share_TE, SMALLEST)), axis=-1)
    return Usage(
        counts=jnp.sum(jnp.where(real_T[:, None], chosen_TE, 0), axis=0).astype(f32),
        share=jnp.sum(jnp.where(real_T[:, None], share_TE, 0), axis=0),
        squared_lse=jnp.sum(jnp.where(real_T, jnp.square(lse_T), 0)),
        entropy=jax.lax.stop_gradient(jnp.sum(jnp.where(real_T, entropy_T, 0))),
    )


def losses(config: ModelConfig, used: Usage) -> dict[str, jax.Array]:
    """Compute the routers' losses, means over the layers times their weights.

    The load balance loss is E sum_e f_e P_e (arXiv 2101.03961, equation 4). f_e is the number of
    choices of expert e per token, and P_e its mean share. The loss is K if all experts are used
    equally. The router z-loss is the mean squared log normaliser of the logits (arXiv 2202.08906,
    equation 5).

    Args:
      config: the model, which has the weights.
      used: leaves [layers, ...].

    Returns:
      The losses by name, without losses of weight 0.
    """
    tokens_l = jnp.maximum(jnp.sum(used.counts, axis=-1) / config.num_experts_per_tok, 1)
    found = {}
    if config.load_balance_loss_weight:
        f_lE, P_lE = used.counts / tokens_l[:, None], used.share / tokens_l[:, None]
        balance = jnp.mean(jnp.sum(jax.lax.stop_gradient(f_lE) * P_lE, axis=-1))
        found[LOAD_BALANCE_LOSS] = config.load_balance_loss_weight * (config.num_experts * balance)
    if config.router_z_loss_weight:
        found[ROUTER_Z_LOSS] = config.router_z_loss_weight * jnp.mean(used.squared_lse / tokens_l)
    return found


def sums(config: ModelConfig, used: Usage) -> dict[str, jax.Array]:
    """Collect the sums that the metrics need, which add up over micro-batches.

    Args:
      config: the model.
      used: leaves [layers, ...].

    Returns:
      Entries of the loss's aux.
    """
    return {COUNTS: used.counts, "router_entropy": jnp.mean(used.entropy)}


def metrics(aux: dict[str, jax.Array], num_experts_per_tok: int) -> dict[str, jax.Array]:
    """Compute the metrics moe/* of a step.

    Args:
      aux: the loss's aux, with the entries of `sums`.
      num_experts_per_tok: K.

    Returns:
      Float32 scalars. max_expert_share and min_expert_share: tokens of the most and the least used
      expert over the mean of all experts, averaged over the layers; 1 if all are used equally.
      router_entropy: mean entropy of a token [nats].
    """
    counts_lE = aux[COUNTS]
    mean_l1 = jnp.maximum(jnp.mean(counts_lE, axis=-1, keepdims=True), SMALLEST)
    choices_l = jnp.sum(counts_lE, axis=-1)
    return {
        "moe/max_expert_share": jnp.mean(jnp.max(counts_lE / mean_l1, axis=-1)),
        "moe/min_expert_share": jnp.mean(jnp.min(counts_lE / mean_l1, axis=-1)),
        "moe/router_entropy": aux["router_entropy"]
        / jnp.maximum(jnp.mean(choices_l) / num_experts_per_tok, 1),
    }
