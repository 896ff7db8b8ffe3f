"""Checks of the keys of a mixture of experts, without JAX or devices."""

from typing import Any

from maxdiloco.errors import ConfigError
from maxdiloco.flags import idle_keys

# Keys that only experts read, and the value that leaves them off: of what is computed, and all.
OF_WHAT_IS_COMPUTED = {
    "num_experts_per_tok": 1,
    "base_moe_mlp_dim": -1,
    "shared_experts": 0,
    "first_num_dense_layers": 0,
    "routed_score_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "routed_bias": False,
    "n_routing_groups": -1,
    "topk_routing_group": -1,
    "router_bias": False,
}
NEED_EXPERTS = {
    **OF_WHAT_IS_COMPUTED,
    "capacity_factor": -1.0,
    "load_balance_loss_weight": 0.0,
    "router_z_loss_weight": 0.0,
    "dcn_expert_parallelism": 1,
    "ici_expert_parallelism": 1,
}


def check(cfg: Any) -> None:
    """Raise ConfigError for the first key of a mixture of experts that cannot work."""
    if cfg.num_experts == 1:
        idle_keys.refuse(
            cfg,
            NEED_EXPERTS,
            beside="num_experts=1, a dense model",
            remedy=", or set num_experts",
        )
        return
    if cfg.num_experts_per_tok > cfg.num_experts:
        raise ConfigError(
            f"num_experts_per_tok={cfg.num_experts_per_tok} is more than num_experts="
            f"{cfg.num_experts}: a token uses each expert once. Use {cfg.num_experts} or fewer."
        )
    if cfg.first_num_dense_layers >= cfg.base_num_decoder_layers:
        raise ConfigError(
            f"first_num_dense_layers={cfg.first_num_dense_layers} leaves none of "
            f"base_num_decoder_layers={cfg.base_num_decoder_layers} to the experts. Use "
            f"{cfg.base_num_decoder_layers - 1} or fewer, or num_experts=1."
        )
    _groups(cfg)
    _axis(cfg)


def _groups(cfg: Any) -> None:
    groups, used = cfg.n_routing_groups, cfg.topk_routing_group
    if (groups == -1) != (used == -1):
        unset = "topk_routing_group" if used == -1 else "n_routing_groups"
        raise ConfigError(
            f"n_routing_groups={groups} topk_routing_group={used}: a choice of groups needs both. "
            f"Set {unset}, or leave both -1."
        )
    if groups == -1:
        return
    if cfg.num_experts % groups:
        raise ConfigError(
            f"n_routing_groups={groups} does not divide num_experts={cfg.num_experts}: groups are "
            f"equal. Use a divisor of {cfg.num_experts}."
        )
    if used > groups:
        raise ConfigError(
            f"topk_routing_group={used} is more than n_routing_groups={groups}. Use {groups} or "
            f"fewer."
        )
    eligible = used * cfg.num_experts // groups
    if cfg.num_experts_per_tok > eligible:
        raise ConfigError(
            f"num_experts_per_tok={cfg.num_experts_per_tok} exceeds topk_routing_group {used} * "
            f"{cfg.num_experts // groups} experts of a group = {eligible}. Raise "
            f"topk_routing_group, or use {eligible} or fewer."
        )


def _axis(cfg: Any) -> None:
    """Sizes that are open are checked with the devices, in parallel.sharding."""
    dcn, ici = cfg.dcn_expert_parallelism, cfg.ici_expert_parallelism
    if min(dcn, ici) > 0 and cfg.num_experts % (dcn * ici):
        raise ConfigError(
            f"num_experts={cfg.num_experts} does not divide by dcn_expert_parallelism {dcn} * "
            f"ici_expert_parallelism {ici} = {dcn * ici}: every device has equally many. Use a "
            f"divisor of {cfg.num_experts}."
        )
