"""Which experts a token goes to, with which weights; and how evenly they are used.

The choices that DeepSeek-V3 (arXiv 2412.19437), Qwen3-MoE (arXiv 2505.09388), Mixtral (arXiv
2401.04088) and gpt-oss (arXiv 2508.10925) make are options of one router.
"""
# T tokens  E experts  K experts of a token  G groups of experts

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxdiloco.models.spec import ModelSpec

f32 = jnp.float32
SMALLEST = 1e-20  # added to the sum of the chosen scores, as DeepSeek-V3 does
# Names in the aux of the loss: its terms, and the tokens of each expert.
LOSSES = ("load_balance_loss", "router_z_loss")
COUNTS = "expert_counts"
GROUP_SCORES = 2  # a group's score is the sum of so many best experts (arXiv 2412.19437, 2.1.2)


class Choice(NamedTuple):
    """experts_TK: int32. weights_TK, float32. share_TE: of each expert in a token's scores."""

    experts_TK: jax.Array
    weights_TK: jax.Array
    share_TE: jax.Array


class Usage(NamedTuple):
    """Sums over the tokens that are not padding, float32.

    counts: [..., E], choices of each expert, dropped ones included. share: [..., E], of Choice.
    squared_lse: of the squared log normaliser of the logits. entropy: of the shares [nats].
    dropped: choices without a place in their expert.
    """

    counts: jax.Array
    share: jax.Array
    squared_lse: jax.Array
    entropy: jax.Array
    dropped: jax.Array


def choose(spec: ModelSpec, logits_TE: jax.Array, routed_bias_E: jax.Array | None) -> Choice:
    """The K experts of each token.

    score_function makes scores of the logits, in float32. The best K count, with their scores
    as weights; normalise_weights divides the weights by their sum. A softmax over the K best logits
    (Mixtral, gpt-oss) is the same as softmax, choice and division.
    routed_bias: added to the scores for the choice alone. num_groups: only the experts of the
    groups_per_token best groups are eligible (arXiv 2412.19437, section 2.1.2).
    """
    router = spec.router
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
    experts_TK = jax.lax.top_k(rank_TE, spec.num_experts_per_tok)[1]
    weights_TK = jnp.take_along_axis(scores_TE, experts_TK, axis=-1)
    if router.normalise_weights:
        weights_TK = weights_TK / (jnp.sum(weights_TK, axis=-1, keepdims=True) + SMALLEST)
    return Choice(experts_TK, weights_TK * router.scaling_factor, share_TE)


def _in_best_groups(rank_TE, num_groups, kept):
    """rank_TE, minus infinity outside the best groups of consecutive experts."""
    T, E = rank_TE.shape
    rank_TGE = rank_TE.reshape(T, num_groups, -1)
    best = jax.lax.top_k(rank_TGE, min(GROUP_SCORES, E // num_groups))[0]
    groups = jax.lax.top_k(jnp.sum(best, axis=-1), kept)[1]
    eligible_TG = jnp.any(groups[..., None] == jnp.arange(num_groups), axis=-2)
    return jnp.where(eligible_TG[..., None], rank_TGE, -jnp.inf).reshape(T, E)


def usage(choice: Choice, logits_TE: jax.Array, real_T: jax.Array, dropped: jax.Array) -> Usage:
    """The sums over the tokens that real_T marks. dropped: their choices without a place."""
    E = logits_TE.shape[-1]
    chosen_TE = jnp.sum(choice.experts_TK[..., None] == jnp.arange(E), axis=-2)
    share_TE = choice.share_TE
    lse_T = jax.nn.logsumexp(logits_TE, axis=-1)
    entropy_T = -jnp.sum(share_TE * jnp.log(jnp.maximum(share_TE, SMALLEST)), axis=-1)
    return Usage(
        counts=jnp.sum(jnp.where(real_T[:, None], chosen_TE, 0), axis=0).astype(f32),
        share=jnp.sum(jnp.where(real_T[:, None], share_TE, 0), axis=0),
        squared_lse=jnp.sum(jnp.where(real_T, jnp.square(lse_T), 0)),
        entropy=jax.lax.stop_gradient(jnp.sum(jnp.where(real_T, entropy_T, 0))),
        dropped=dropped.astype(f32),
    )


def losses(spec: ModelSpec, used: Usage) -> dict[str, jax.Array]:
    """Mean over the layers of the two losses, times their weights; those of weight 0 left out.

    used: leaves [layers, ...]. load_balance_loss: E sum_e f_e P_e (arXiv 2101.03961, eq. 4), where
    f_e counts choices per token and P_e is the mean share of expert e; K where all are used alike.
    router_z_loss: mean squared log normaliser of the logits (arXiv 2202.08906, eq. 5).
    """
    tokens_l = jnp.maximum(jnp.sum(used.counts, axis=-1) / spec.num_experts_per_tok, 1)
    found = {}
    if spec.load_balance_loss_weight:
        f_lE, P_lE = used.counts / tokens_l[:, None], used.share / tokens_l[:, None]
        balance = jnp.mean(jnp.sum(jax.lax.stop_gradient(f_lE) * P_lE, axis=-1))
        found[LOSSES[0]] = spec.load_balance_loss_weight * (spec.num_experts * balance)
    if spec.router_z_loss_weight:
        found[LOSSES[1]] = spec.router_z_loss_weight * jnp.mean(used.squared_lse / tokens_l)
    return found


def sums(spec: ModelSpec, used: Usage) -> dict[str, jax.Array]:
    """What the metrics need, sums that add up over micro-batches. used: leaves [layers, ...]."""
    found = {COUNTS: used.counts, "router_entropy": jnp.mean(used.entropy)}
    if spec.capacity_factor > 0:
        found["dropped_tokens"] = jnp.sum(used.dropped)
    return found


def metrics(aux: dict[str, jax.Array], num_experts_per_tok: int) -> dict[str, jax.Array]:
    """The metrics moe/* of a step, float32 scalars. aux: with what `sums` gave.

    max_expert_share, min_expert_share: tokens of the fullest and of the emptiest expert over the
    mean of all, averaged over the layers; 1 where all are used alike. router_entropy: of a token
    [nats]. dropped_tokens: part of the choices without a place, with a capacity alone.
    """
    counts_lE = aux[COUNTS]
    mean_l1 = jnp.maximum(jnp.mean(counts_lE, axis=-1, keepdims=True), SMALLEST)
    choices_l = jnp.sum(counts_lE, axis=-1)
    found = {
        "moe/max_expert_share": jnp.mean(jnp.max(counts_lE / mean_l1, axis=-1)),
        "moe/min_expert_share": jnp.mean(jnp.min(counts_lE / mean_l1, axis=-1)),
        "moe/router_entropy": aux["router_entropy"]
        / jnp.maximum(jnp.mean(choices_l) / num_experts_per_tok, 1),
    }
    if "dropped_tokens" in aux:
        found["moe/dropped_tokens"] = aux["dropped_tokens"] / jnp.maximum(jnp.sum(choices_l), 1)
    return found
