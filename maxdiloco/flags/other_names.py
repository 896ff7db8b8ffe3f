"""Names that base.yml does not have: MaxText's, and older ones of our own.

Some mean the same as a key of base.yml, others are gone.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml

# Our own before MaxText's change of name; MaxText had it too.
RENAMED = {"cosine_learning_rate_final_fraction": "learning_rate_final_fraction"}
OTHER_NAMES = {
    **RENAMED,
    "hf_path": "dataset_path",
    "hf_train_files": "dataset_path",
    "hf_eval_files": "eval_dataset_path",
    "grain_train_files": "dataset_path",
    "grain_eval_files": "eval_dataset_path",
    "grain_file_type": "dataset_type",
    "train_data_columns": "text_column",
}


class Removed(NamedTuple):
    """A key that base.yml once had: its default then, and the remedy of the error for it.

    VALUE in the remedy stands for what was given.
    """

    default: Any
    instead: str


# CHANGELOG.md names each.
REMOVED = {
    "rope_type": Removed(
        "default", "Use rope_scaling={rope_type: VALUE}; its types are linear, llama3, yarn."
    ),
    "attention_type": Removed(
        "global",
        "Use latent_attention={kv_lora_rank: 512, qk_nope_head_dim: 128, qk_rope_head_dim: 64, "
        "v_head_dim: 128} for mla, sliding_window_size=N for a window; else leave it out.",
    ),
    "qk_norm_scope": Removed("head", "Use use_qk_norm=VALUE."),
    "rope_factor": Removed(1.0, "Use rope_scaling={factor: VALUE}."),
    "original_max_position_embeddings": Removed(
        0, "Use rope_scaling={original_max_position_embeddings: VALUE}."
    ),
    "rope_low_freq_factor": Removed(1.0, "Use rope_scaling={low_freq_factor: VALUE}."),
    "rope_high_freq_factor": Removed(4.0, "Use rope_scaling={high_freq_factor: VALUE}."),
    "beta_fast": Removed(32.0, "Use rope_scaling={beta_fast: VALUE}."),
    "beta_slow": Removed(1.0, "Use rope_scaling={beta_slow: VALUE}."),
    "rope_truncate": Removed(True, "Use rope_scaling={truncate: VALUE}."),
    "rope_attention_factor": Removed(0.0, "Use rope_scaling={attention_factor: VALUE}."),
    "q_lora_rank": Removed(0, "Use latent_attention={q_lora_rank: VALUE}."),
    "kv_lora_rank": Removed(512, "Use latent_attention={kv_lora_rank: VALUE}."),
    "qk_nope_head_dim": Removed(128, "Use latent_attention={qk_nope_head_dim: VALUE}."),
    "qk_rope_head_dim": Removed(64, "Use latent_attention={qk_rope_head_dim: VALUE}."),
    "v_head_dim": Removed(128, "Use latent_attention={v_head_dim: VALUE}."),
    "routed_score_func": Removed("softmax", "Use router={score_function: VALUE}."),
    "norm_topk_prob": Removed(False, "Use router={normalise_weights: VALUE}."),
    "routed_scaling_factor": Removed(1.0, "Use router={scaling_factor: VALUE}."),
    "routed_bias": Removed(False, "Use router={balance_bias: VALUE}."),
    "n_routing_groups": Removed(-1, "Use router={num_groups: VALUE}."),
    "topk_routing_group": Removed(-1, "Use router={groups_per_token: VALUE}."),
    "router_bias": Removed(False, "Use router={logit_bias: VALUE}."),
    "checkpoint_timeout_seconds": Removed(1200, "Leave it out: a save has an hour."),
}


class Written(Protocol):
    """A value as it was written (values.Given)."""

    raw: Any

    def _replace(self, **fields: Any) -> "Written":
        """A copy with other fields."""


def translate(given: Mapping[str, Written]) -> dict[str, Any]:
    """The same values by the names of base.yml; given: those of one layer, such as a file.

    Raises ConfigError when a value is there by two names, and for more than one column.
    """
    names: dict[str, str] = {}
    given = _without_grain(given)
    for name in given:
        own = OTHER_NAMES.get(name, name)
        if own in names:
            raise ConfigError(
                f"{name}={given[name].raw} and {names[own]}={given[names[own]].raw} both mean "
                f"{own}. Give {own} alone."
            )
        names[own] = name
    return {own: _value(name, given[name]) for own, name in names.items()}


def _without_grain(given: Mapping[str, Written]) -> dict[str, Written]:
    """MaxText's dataset_type=grain says no more than grain_file_type, which is arrayrecord."""
    kind = given.get("dataset_type")
    if kind is None or kind.raw != "grain":
        return dict(given)
    rest = {name: value for name, value in given.items() if name != "dataset_type"}
    return {"grain_file_type": kind._replace(raw="arrayrecord")} | rest


def current(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored config by the names that keys have now, without removed ones at their default."""
    return {
        RENAMED.get(name, name): value
        for name, value in stored.items()
        if name not in REMOVED or value != REMOVED[name].default
    }


def _value(name: str, given: Written) -> Written:
    if name != "train_data_columns":
        return given
    raw = given.raw
    columns = base_yml.parse_list(raw, f"{name}={raw}") if isinstance(raw, str) else raw
    if columns is None:
        return given
    if len(columns) != 1:
        raise ConfigError(
            f"{name}={base_yml.show(columns)} names {len(columns)} columns, but text is in one. "
            "Use text_column=NAME."
        )
    return given._replace(raw=columns[0])
