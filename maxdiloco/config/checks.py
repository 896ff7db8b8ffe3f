"""Checks that the groups of keys share with each other and with the programs."""

import re
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from maxdiloco.config.values import show
from maxdiloco.errors import ConfigError

BUCKETS = ("gs", "s3", "az")  # URL schemes that storage.store supports
# {(key, a value of it): names of keys that have no effect then, and so must have their defaults}.
WITHOUT_EFFECT = MappingProxyType(
    {
        ("eval_interval", -1): "sample_prompt",
        ("num_experts", 1): "num_experts_per_tok base_moe_mlp_dim shared_experts router "
        "first_num_dense_layers load_balance_loss_weight router_z_loss_weight "
        "dcn_expert_parallelism ici_expert_parallelism",
        ("opt_type", "sgd"): "mu_dtype",
        ("lr_schedule_type", "cosine"): "wsd_decay_steps_fraction wsd_decay_style",
        ("enable_diloco", False): "num_diloco_replicas enable_streaming_diloco "
        "num_communication_overlapping_steps communication_overlapping_alpha diloco_round_overlap "
        "diloco_exchange_dtype diloco_error_feedback diloco_aggregation diloco_collective "
        "diloco_outer_memory diloco_transport",
        ("enable_streaming_diloco", False): "num_diloco_fragments num_nonlayer_fragments "
        "use_sequential_layers",
        ("enable_islands", False): "islands_store island_name islands_min_members "
        "islands_global_batch_size islands_period_seconds islands_dead_seconds islands_key",
        ("packing", False): "grain_packing_type",
        ("dataset_mixture", ()): "dataset_per_replica",
        ("tokenizer_type", "byte"): "tokenizer_path add_bos",
    }
)


def _shown(cfg: Any, names: str) -> str:
    """Return `key=value and key=value` of some keys, whose names are separated by spaces."""
    return " and ".join(f"{name}={show(getattr(cfg, name))}" for name in names.split())


def require_default(cfg: Any, names: str, because: str) -> None:
    """Raise ConfigError for the first key that has no effect but is not at its default.

    Args:
      cfg: a Config.
      names: the keys that have no effect, separated by spaces.
      because: the keys with whose values they have no effect.
    """
    for name in names.split():
        default = type(cfg).model_fields[name].default
        if getattr(cfg, name) != default:
            use = f"Use {name}={show(default)}" if default != "" else f"Leave {name} out"
            other = getattr(cfg, because)
            is_switch = isinstance(other, bool)
            use += f" or {because}={show(not other)}" if is_switch else f", or change {because}"
            raise ConfigError(
                f"{_shown(cfg, name)} has no effect with {_shown(cfg, because)}. {use}."
            )


def require(cfg: Any, name: str, allowed: Sequence[Any], because: str, reason: str) -> None:
    """Raise ConfigError unless a key has one of the values that other keys allow.

    Args:
      cfg: a Config.
      name: the key.
      allowed: the values that can be combined with the other keys; the first is the remedy.
      because: the other keys, separated by spaces.
      reason: why they allow no other values.
    """
    if getattr(cfg, name) not in allowed:
        use = show(allowed[0])
        raise ConfigError(
            f"{_shown(cfg, name)} cannot be combined with {_shown(cfg, because)}: {reason}. "
            f"{f'Use {name}={use}' if use else f'Leave {name} out'}."
        )


def expect(cfg: Any, met: Any, name: str, what: str, because: str = "") -> None:
    """Raise ConfigError unless a condition is met.

    Args:
      cfg: a Config.
      met: whether the values of a key and of other keys can be combined.
      name: the key.
      what: the values that can, such as `at most 5`.
      because: the other keys, separated by spaces.
    """
    if not met:
        others = f" with {_shown(cfg, because)}" if because else ""
        change = " or ".join(f"{name} {because}".split())
        raise ConfigError(f"{_shown(cfg, name)}: expected {what}{others}. Change {change}.")


def refuse_store(key: str, value: str) -> None:
    """Raise ConfigError when a path is on an object store that is not one of BUCKETS.

    The lock of a run needs conditional writes, and a run reads objects right after it wrote them.
    BUCKETS have both.
    """
    scheme, separator, rest = value.partition("://")
    if separator and not (scheme in BUCKETS and re.match(r"[A-Za-z0-9]", rest)):
        raise ConfigError(
            f"{key}={value} is not a place for runs, which need locks. Use a folder on a mounted "
            f"file system, or {', '.join(f'{bucket}://bucket/folder' for bucket in BUCKETS)}."
        )
