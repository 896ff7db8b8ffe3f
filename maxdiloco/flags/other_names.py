"""Names of keys that base.yml once had: some have another name now, others are gone."""

from collections.abc import Mapping
from typing import Any, NamedTuple

# MaxText had them too.
RENAMED = {"cosine_learning_rate_final_fraction": "learning_rate_final_fraction"}


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
    "warmup_steps": Removed(-1, "Use warmup_steps_fraction, the steps over those of the schedule."),
    "eval_sets": Removed(
        {},
        "Use eval_dataset_path={name: path}: the first text is that of eval/loss, and an empty "
        "path is the part of the training text that is held out.",
    ),
    "eval_per_device_batch_size": Removed(
        -1, "Leave it out: an evaluation reads per_device_batch_size sequences on each device."
    ),
    "checkpoint_timeout_seconds": Removed(1200, "Leave it out: a save has an hour."),
    "exchange_port": Removed(0, "Use peer_port: process i listens on the i-th port after it."),
    # Options of programs, so neither a file nor the environment sets them.
    "compile_data_parallel": Removed(
        False, "Give the option compile_data_parallel=true to maxdiloco.train_compile alone."
    ),
    "dcn_bandwidth_gbps": Removed(
        25.0, "Give the option dcn_bandwidth_gbps=25 to maxdiloco.train_compile or plan alone."
    ),
    "max_exposed_fraction": Removed(
        1.0, "Give the option max_exposed_fraction=0.05 to maxdiloco.train_compile alone."
    ),
    "report": Removed(
        "", "Give the option report=FILE to maxdiloco.train_compile, plan or evaluate alone."
    ),
}


def current(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored config by the names that keys have now, without removed ones at their default."""
    return {
        RENAMED.get(name, name): value
        for name, value in stored.items()
        if name not in REMOVED or value != REMOVED[name].default
    }
