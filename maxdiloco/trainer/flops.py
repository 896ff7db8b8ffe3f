"""The work of a model for one token, by which utilisation is counted."""

import math
from typing import Any

import jax

from maxdiloco.flags.config import Config
from maxdiloco.metrics.speed import training_flops_per_token


def flops_per_token(cfg: Config, params: Any) -> float:
    """Model FLOPs of forward and backward for one token, see speed.training_flops_per_token.

    Of the experts those count that a token uses.
    """
    matmul = sum(
        math.prod(x.shape) * active_share(cfg, path)
        for path, x in jax.tree_util.tree_leaves_with_path(params)
        if len(x.shape) > 1
    )
    if not cfg.logits_via_embedding:
        matmul -= math.prod(params["embedding"].shape)  # it is looked up
    return training_flops_per_token(
        matmul,
        cfg.base_num_decoder_layers,
        cfg.base_num_query_heads * cfg.head_dim,
        cfg.max_target_length,
    )


def active_parameters(cfg: Config, params: Any) -> int:
    """Parameters that one token uses: of the experts num_experts_per_tok in each layer."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return round(sum(math.prod(x.shape) * active_share(cfg, path) for path, x in leaves))


def active_share(cfg: Config, path: tuple[Any, ...]) -> float:
    """Which part of a parameter one token uses. path: of the parameter, from jax.tree_util."""
    names = [entry.key for entry in path]
    of_experts = "moe" in names and names[-1].startswith("w_") and "shared" not in names
    return cfg.num_experts_per_tok / cfg.num_experts if of_experts else 1.0
