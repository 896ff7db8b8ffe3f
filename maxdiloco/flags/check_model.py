"""Checks of the keys of the group `model`."""

import math
from typing import Any

from maxdiloco.errors import ConfigError
from maxdiloco.flags import idle_keys
from maxdiloco.flags.base_yml import show

LONGER_TEXTS = ("llama3.1", "yarn")  # rope types that look at original_max_position_embeddings
# Key, its value without effect, and the rope types that read it.
_ROPE_KEYS = (
    ("rope_factor", 1.0, ("linear", *LONGER_TEXTS)),
    ("original_max_position_embeddings", 0, LONGER_TEXTS),
    ("rope_attention_factor", 0.0, ("yarn",)),
    ("rope_truncate", True, ("yarn",)),
)


def check(cfg: Any) -> None:
    """Raise ConfigError for the first of the model's values that cannot work together."""
    _sizes(cfg)
    _vocabulary(cfg)
    _pattern(cfg)
    _rope(cfg)
    _latent(cfg)
    if cfg.qk_norm_scope != "head" and not cfg.use_qk_norm:
        raise ConfigError(
            f"qk_norm_scope={cfg.qk_norm_scope} does nothing with use_qk_norm=false. Use "
            f"qk_norm_scope=head or use_qk_norm=true."
        )


def _sizes(cfg: Any) -> None:
    if cfg.base_num_query_heads % cfg.base_num_kv_heads:
        raise ConfigError(
            f"base_num_query_heads={cfg.base_num_query_heads} is not a multiple of "
            f"base_num_kv_heads={cfg.base_num_kv_heads}: query heads share key and value heads "
            f"evenly. Use base_num_kv_heads={_divisor(cfg)}."
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


def _vocabulary(cfg: Any) -> None:
    rows = cfg.padded_vocab_size
    if -1 != rows < cfg.vocab_size:
        raise ConfigError(
            f"padded_vocab_size={rows} is below vocab_size={cfg.vocab_size}: every token has a "
            f"row, the rows after them are padding. Use at least {cfg.vocab_size}, or -1 for none."
        )


def _divisor(cfg: Any) -> int:
    """A number of kv heads, no larger than the given one, that divides the query heads."""
    return math.gcd(cfg.base_num_query_heads, cfg.base_num_kv_heads)


def _latent(cfg: Any) -> None:
    if cfg.attention_type != "mla":
        return
    rotated, head_dim = cfg.qk_rope_head_dim, cfg.qk_nope_head_dim + cfg.qk_rope_head_dim
    if rotated % 2:
        raise ConfigError(
            f"qk_rope_head_dim={rotated} is odd: rotary embedding rotates pairs of features. Use "
            f"qk_rope_head_dim={rotated + 1}."
        )
    needed = {
        "head_dim": head_dim,  # qk_nope_head_dim + qk_rope_head_dim
        "base_num_kv_heads": cfg.base_num_query_heads,
        "use_qk_norm": False,
        "attention_bias": "none",
    }
    for key, value in needed.items():
        if vars(cfg)[key] != value:
            raise ConfigError(
                f"{key}={show(vars(cfg)[key])} does not fit attention_type=mla, whose heads have "
                f"{cfg.qk_nope_head_dim} + {rotated} features, keys of their own, a norm of the "
                f"low rank and no bias. Use {key}={show(value)}."
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


def _rope(cfg: Any) -> None:
    kind = cfg.rope_type
    for key, without, types in _ROPE_KEYS:
        if kind not in types:
            idle_keys.refuse(
                cfg,
                {key: without},
                beside=f"rope_type={kind}",
                remedy=f", or rope_type={' or '.join(types)}",
            )
    if kind in LONGER_TEXTS and not cfg.original_max_position_embeddings:
        raise ConfigError(
            f"rope_type={kind} needs the length of the texts of the first training, but "
            f"original_max_position_embeddings=0. Set it."
        )
    if kind == "llama3.1" and cfg.rope_low_freq_factor >= cfg.rope_high_freq_factor:
        raise ConfigError(
            f"rope_low_freq_factor={cfg.rope_low_freq_factor} is not below rope_high_freq_factor="
            f"{cfg.rope_high_freq_factor}: frequencies between them are partly divided. Lower it."
        )
    if kind == "yarn" and cfg.beta_slow >= cfg.beta_fast:
        raise ConfigError(
            f"beta_slow={cfg.beta_slow} is not below beta_fast={cfg.beta_fast}: frequencies "
            f"between them are partly divided. Lower it."
        )
