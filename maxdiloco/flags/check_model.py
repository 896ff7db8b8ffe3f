"""Checks of the keys of the group `model`, and of those that only experts read."""

import math
from collections.abc import Mapping
from typing import Any

from maxdiloco.errors import ConfigError
from maxdiloco.flags import idle_keys
from maxdiloco.flags.base_yml import Key, Table, show

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
# Of a table: an entry that has to be below another one, since frequencies between the two are
# partly divided.
_BELOW = (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast"))


def check(cfg: Any, keys: Mapping[str, Key]) -> None:
    """Raise ConfigError for the first of the model's values that cannot work together.

    keys: base.yml's.
    """
    _sizes(cfg)
    _pattern(cfg)
    scaling = keys["rope_scaling"].whole(cfg.rope_scaling)
    for lower, upper in _BELOW:
        if scaling[lower] >= scaling[upper]:
            raise ConfigError(
                f"{lower}: {scaling[lower]} of rope_scaling is not below {upper}: "
                f"{scaling[upper]}; frequencies between them are partly divided. Lower it."
            )
    if cfg.latent_attention:
        _latent(cfg, dict(cfg.latent_attention))
    _experts(cfg, keys["router"].whole(cfg.router))


def _sizes(cfg: Any) -> None:
    if cfg.base_num_query_heads % cfg.base_num_kv_heads:
        divisor = math.gcd(cfg.base_num_query_heads, cfg.base_num_kv_heads)
        raise ConfigError(
            f"base_num_query_heads={cfg.base_num_query_heads} is not a multiple of "
            f"base_num_kv_heads={cfg.base_num_kv_heads}: query heads share key and value heads "
            f"evenly. Use base_num_kv_heads={divisor}."
        )
    if cfg.head_dim % 2:
        raise ConfigError(
            f"head_dim={cfg.head_dim} is odd: rotary embedding rotates pairs of features. Use "
            f"head_dim={cfg.head_dim + 1}."
        )
    if len(cfg.mlp_activations) not in (1, 2):
        raise ConfigError(
            f"mlp_activations={show(cfg.mlp_activations)} has {len(cfg.mlp_activations)} entries: "
            f"a plain layer has one, a gated one two. Use [gelu] or [silu, linear]."
        )
    if -1 != cfg.padded_vocab_size < cfg.vocab_size:
        raise ConfigError(
            f"padded_vocab_size={cfg.padded_vocab_size} is below vocab_size={cfg.vocab_size}: "
            f"every token has a row, the rows after them are padding. Use at least "
            f"{cfg.vocab_size}, or -1 for none."
        )


def _latent(cfg: Any, latent: Mapping[str, Any]) -> None:
    plain, rotated = latent["qk_nope_head_dim"], latent["qk_rope_head_dim"]
    if rotated % 2:
        raise ConfigError(
            f"qk_rope_head_dim: {rotated} of latent_attention is odd: rotary embedding rotates "
            f"pairs of features. Use qk_rope_head_dim: {rotated + 1}."
        )
    needed = {
        "head_dim": plain + rotated,
        "base_num_kv_heads": cfg.base_num_query_heads,
        "use_qk_norm": "false",
        "attention_bias": "none",
    }
    for key, value in needed.items():
        if vars(cfg)[key] != value:
            raise ConfigError(
                f"{key}={vars(cfg)[key]} does not fit latent_attention, whose heads have {plain} + "
                f"{rotated} features, keys of their own, a norm of the low rank and no bias. Use "
                f"{key}={value}."
            )


def _pattern(cfg: Any) -> None:
    pattern, layers = cfg.attention_pattern, cfg.base_num_decoder_layers
    shown = f"attention_pattern={show(pattern)}"
    if len(pattern) > layers:
        raise ConfigError(
            f"{shown} has {len(pattern)} entries for base_num_decoder_layers={layers}. Use "
            f"{layers} or fewer, which repeat over the layers."
        )
    if "local" in pattern and not cfg.sliding_window_size:
        raise ConfigError(
            f"{shown} has local layers, but sliding_window_size=0 gives them no window. Set "
            f"sliding_window_size."
        )
    if pattern and "local" not in pattern and cfg.sliding_window_size:
        raise ConfigError(
            f"sliding_window_size={cfg.sliding_window_size} does nothing with {shown}: no layer is "
            f"local. Leave the pattern empty for a window in every layer."
        )
    if cfg.local_rope_max_timescale != -1 and "local" not in pattern:
        raise ConfigError(
            f"local_rope_max_timescale={cfg.local_rope_max_timescale} does nothing with {shown}: "
            f"no layer is local. Set rope_max_timescale, or local layers in attention_pattern."
        )


def _experts(cfg: Any, router: Mapping[str, Any]) -> None:
    if cfg.num_experts == 1:
        alone, remedy = "num_experts=1, a dense model", ", or set num_experts"
        idle_keys.refuse(cfg, NEED_EXPERTS, beside=alone, remedy=remedy)
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
    # Sizes that are open are checked with the devices, in parallel.sharding.
    dcn, ici = cfg.dcn_expert_parallelism, cfg.ici_expert_parallelism
    if min(dcn, ici) > 0 and cfg.num_experts % (dcn * ici):
        raise ConfigError(
            f"num_experts={cfg.num_experts} does not divide by dcn_expert_parallelism {dcn} * "
            f"ici_expert_parallelism {ici} = {dcn * ici}: every device has equally many. Use a "
            f"divisor of {cfg.num_experts}."
        )
