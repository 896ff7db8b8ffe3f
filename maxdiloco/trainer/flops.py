"""The work of a model for one token, by which utilisation is counted."""

import math
from typing import Any

import jax

from maxdiloco.flags.config import Config


def flops_per_token(cfg: Config, params: Any) -> float:
    """Model FLOPs of forward and backward for one token, without recomputation.

    PaLM (arXiv 2204.02311) App. B: 6 N + 12 L H Q T, with attention counted as if it were not
    causal, so that figures compare with those of others. N: parameters that take part in a matrix
    product; a tied embedding counts once, an untied input embedding not at all, and of the experts
    those that a token uses.
    """
    matmul = sum(
        math.prod(x.shape) * active_share(cfg, path)
        for path, x in jax.tree_util.tree_leaves_with_path(params)
        if len(x.shape) > 1
    )
    if not cfg.logits_via_embedding:
        matmul -= math.prod(params["embedding"].shape)  # it is looked up
    attention = cfg.base_num_query_heads * cfg.head_dim * cfg.max_target_length
    return 6.0 * matmul + 12.0 * cfg.base_num_decoder_layers * attention


def active_parameters(cfg: Config, params: Any) -> int:
    """Parameters that one token uses: of the experts num_experts_per_tok in each layer."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return round(sum(math.prod(x.shape) * active_share(cfg, path) for path, x in leaves))


def active_share(cfg: Config, path: tuple[Any, ...]) -> float:
    """Which part of a parameter one token uses. path: of the parameter, from jax.tree_util."""
    names = [entry.key for entry in path]
    of_experts = "moe" in names and names[-1].startswith("w_") and "shared" not in names
    return cfg.num_experts_per_tok / cfg.num_experts if of_experts else 1.0
