"""Checks of the keys of a mixture of experts, without JAX or devices."""

from collections.abc import Mapping
from typing import Any

from maxdiloco.errors import ConfigError
from maxdiloco.flags import idle_keys
from maxdiloco.flags.base_yml import Key, Table

# Keys that only experts read, and the value that leaves them off: of what is computed, and all.
OF_WHAT_IS_COMPUTED = {
    "num_experts_per_tok": 1,
    "base_moe_mlp_dim": -1,
    "shared_experts": 0,
    "first_num_dense_layers": 0,
    "router": Table(),
}
NEED_EXPERTS = {
    **OF_WHAT_IS_COMPUTED,
    "capacity_factor": -1.0,
    "load_balance_loss_weight": 0.0,
    "router_z_loss_weight": 0.0,
    "dcn_expert_parallelism": 1,
    "ici_expert_parallelism": 1,
}


def check(cfg: Any, keys: Mapping[str, Key]) -> None:
    """Raise ConfigError for the first key of a mixture of experts that cannot work.

    keys: base.yml's.
    """
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
    _groups(cfg, keys["router"].whole(cfg.router))
    _axis(cfg)


def _groups(cfg: Any, router: Mapping[str, Any]) -> None:
    groups, used = router["num_groups"], router["groups_per_token"]
    if cfg.num_experts % groups:
        raise ConfigError(
            f"num_groups: {groups} of router does not divide num_experts={cfg.num_experts}: groups "
            f"are equal. Use a divisor of {cfg.num_experts}."
        )
    if used > groups:
        raise ConfigError(
            f"groups_per_token: {used} of router is more than num_groups: {groups}. Use {groups} "
            f"or fewer."
        )
    eligible = used * cfg.num_experts // groups
    if cfg.num_experts_per_tok > eligible:
        raise ConfigError(
            f"num_experts_per_tok={cfg.num_experts_per_tok} exceeds groups_per_token {used} * "
            f"{cfg.num_experts // groups} experts of a group = {eligible}. Raise "
            f"groups_per_token, or use {eligible} or fewer."
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
