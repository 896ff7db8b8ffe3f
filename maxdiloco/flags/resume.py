"""Which keys may differ between the run that wrote a checkpoint and the run that resumes it."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from maxdiloco.errors import CheckpointError

# key: why a resumed run may have another value. Every other key is refused, also one that is
# added to base.yml later.
FREE_KEYS: dict[str, str] = {
    **dict.fromkeys(
        ("run_name", "base_output_directory", "load_parameters_path", "load_full_state_path"),
        "says where a run starts and writes, not what it computes",
    ),
    **dict.fromkeys(
        ("steps", "log_period", "eval_interval", "eval_steps", "eval_dataset_path"),
        "ends or watches the run",
    ),
    **dict.fromkeys(
        (
            "enable_checkpointing",
            "async_checkpointing",
            "checkpoint_period",
            "checkpoint_timeout_seconds",
            "max_num_checkpoints_to_keep",
            "save_checkpoint_on_completion",
        ),
        "says when the state is saved",
    ),
    **dict.fromkeys(
        (
            "learning_rate",
            "warmup_steps_fraction",
            "cosine_learning_rate_final_fraction",
            "learning_rate_schedule_steps",
            "diloco_outer_lr",
        ),
        "a learning rate: changing it under way is a wanted experiment",
    ),
    "num_diloco_replicas": "M: replicas may join and leave",
    "nan_policy": "matters at a loss that is not finite, where the old value has ended the run",
    **dict.fromkeys(
        (
            "hardware",
            "num_slices",
            "logical_axis_rules",
            *(
                f"{tier}_{axis}_parallelism"
                for tier in ("dcn", "ici")
                for axis in ("diloco", "data", "fsdp", "expert", "context", "tensor")
            ),
        ),
        "lays the same arrays out on other devices; sums round differently",
    ),
    **dict.fromkeys(
        ("per_device_batch_size", "gradient_accumulation_steps"),
        "counts together with the mesh, as sequences_per_replica",
    ),
    **dict.fromkeys(
        ("attention", "remat_policy", "diloco_outer_memory"),
        "another way to compute or keep the same values; sums round differently",
    ),
    **dict.fromkeys(
        (
            "enable_tensorboard",
            "profiler",
            "skip_first_n_steps_for_profiler",
            "profiler_steps",
            "jax_cache_dir",
            "grain_worker_count",
            "show_fragments",
            "show_memory",
            "jax_distributed_initialization_timeout",
            "peer_timeout_seconds",
            "compile_topology",
            "compile_topology_num_slices",
            "compiled_trainstep_file",
            "compile_data_parallel",
            "dcn_bandwidth_gbps",
            "max_exposed_fraction",
            "report",
        ),
        "a tool beside the training",
    ),
}

# The keys that shape the parameters.
MODEL_KEYS = (
    "base_emb_dim",
    "base_num_decoder_layers",
    "base_mlp_dim",
    "base_num_query_heads",
    "base_num_kv_heads",
    "head_dim",
    "vocab_size",
    "mlp_activations",
    "logits_via_embedding",
    "use_qk_norm",
)

# Values that follow from several keys; a caller puts them into both mappings.
_DERIVED = {
    "sequences_per_replica": (
        "per_device_batch_size * devices of a mesh slot * gradient_accumulation_steps"
    ),
}


def changed_keys(
    saved: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any],
    free: Collection[str] = FREE_KEYS,
) -> dict[str, tuple[Any, Any]]:
    """{key: (saved value, new value)} of the keys that differ and are not free, in order of name.

    saved: the config in a checkpoint, as JSON gives it back (lists for tuples). A key it lacks
    is younger than the checkpoint and had the value of defaults. A key that only saved has is
    gone from the program and counts as changed to None.
    """
    changes = {}
    for key in sorted({*saved, *new} - set(free)):
        before = saved.get(key, defaults.get(key))
        after = new.get(key)
        if _listed(before) != _listed(after):
            changes[key] = (before, after)
    return changes


def refuse_changes(
    saved: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any],
    free: Collection[str] = FREE_KEYS,
) -> None:
    """Refuse to resume with keys that alter the result, all named. Arguments: changed_keys.

    Raises CheckpointError.
    """
    changes = changed_keys(saved, new, defaults=defaults, free=free)
    if not changes:
        return
    named = ", ".join(
        f"{key}={after} (the checkpoint has {before})" for key, (before, after) in changes.items()
    )
    meaning = "".join(f" {key} is {_DERIVED[key]}." for key in changes if key in _DERIVED)
    raise CheckpointError(
        f"{named}: a resumed run must compute what the interrupted one would have.{meaning} Set "
        f"{'it' if len(changes) == 1 else 'them'} back, or set another run_name to start anew."
    )


def model_remedy(new: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], str]:
    """For restore_from's remedy: says which model keys differ from those in the meta's config."""

    def remedy(meta: Mapping[str, Any]) -> str:
        changes = changed_keys(
            {key: meta["config"].get(key) for key in MODEL_KEYS},
            {key: new[key] for key in MODEL_KEYS},
            defaults=new,
        )
        if not changes:
            return "The model keys agree: the checkpoint is of another program."
        return f"Set {', '.join(f'{key}={before}' for key, (before, _) in changes.items())}."

    return remedy


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value
