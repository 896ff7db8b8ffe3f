"""MaxText's command line: keys and values that base.yml does not have, and what becomes of them.

From MaxText's configs/base.yml and its scripts for streaming DiLoCo, read in 2026.
docs/maxtext.md is the same for its users; a test compares the two.
"""

import pathlib
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from maxdiloco.errors import ConfigError
from maxdiloco.flags.base_yml import show


class Foreign(NamedTuple):
    """Keys of MaxText that base.yml does not have.

    names: a regular expression. harmless: the values that are dropped with a note, likewise; an
    empty value is always harmless. why: why nothing is lost then. instead: the remedy for others.
    """

    names: str
    harmless: str
    why: str
    instead: str = ""


_ANY = r"(?s:.*)"
_OFF = r"false|0|0\.0*|-1|-1\.0*|none|null|\[\]|\{\}|0\.|disabled"
FOREIGN = (
    # -- not needed
    Foreign("pure_nnx|pure_nnx_decoder|enable_nnx", _ANY, "it chooses between modules of Flax"),
    Foreign(
        "scan_layers|param_scan_axis|scan_layers_per_stage|force_unroll",
        _ANY,
        "layers are always scanned",
    ),
    Foreign(
        "save_config_to_gcs|log_config|gcs_metrics|metrics_file",
        _ANY,
        "the run's folder has the metrics, and each checkpoint the config",
    ),
    Foreign(
        "upload_all_profiler_results|profile_cleanly|hide_profiler_step_metric|tpu_num_.*|xprof_.*|"
        "enable_tpu_profiling_options|profile_power_events|profiler_max_num_hosts|"
        "enable_jax_profiler|jax_profiler_port",
        _ANY,
        "a profile has no options but profiler_steps and skip_first_n_steps_for_profiler",
    ),
    Foreign(
        "enable_goodput_recording|monitor_goodput|goodput_.*|enable_pathways_goodput|"
        "monitor_step_time_deviation|step_deviation_.*|enable_gcp_.*|"
        "report_\\w+_for_gcp_monitoring|heartbeat_.*|managed_mldiagnostics.*|record_internal_nn.*",
        _ANY,
        "metrics.jsonl has perf/*; nothing is reported to a cloud's monitoring",
    ),
    Foreign(
        "checkpoint_storage_.*|enable_orbax_v1|enable_single_replica_ckpt_restoring|"
        "checkpoint_todelete_.*|enable_checkpoint_cloud_logger|enable_continuous_checkpointing|"
        "enable_autocheckpoint|save_checkpoint_on_start|colocated_python_checkpointing",
        _ANY,
        "checkpoints are written one way, and SIGTERM saves first",
    ),
    Foreign(
        "local_checkpoint_.*|multi_tier_checkpointing_.*|mtc_.*",
        _ANY,
        "a checkpoint is one folder that all hosts see",
    ),
    Foreign(
        "(local_)?sa_.*|(local_)?use_splash_scheduler|use_(tokamax|jax)_splash|cost_estimate_.*|"
        "use_max_logit_estimate|dq_reduction_steps|force_q_layout|ring_scan_unroll|"
        "enable_padding_causal_mask|max_segments_per_seq|use_ragged_attention|ragged_block_size",
        _ANY,
        "attention computes the same values; its tiles are chosen here",
    ),
    Foreign(
        "shardy|remove_size_one_mesh_axis_from_type|allow_split_physical_axes|sharding_tolerance|"
        "optimize_mesh_for_tpu_v6e|debug_sharding|mesh_axes|data_sharding|custom_mesh|check_vma|"
        "input_data_sharding_logical_axes|context_sharding|ulysses_context_sharding|shard_mode|"
        "override_logical_axis_rules|context_parallel_.*|compile_xla_flags|use_iota_embed|"
        "max_inflight_computations|max_corpus_chars|num_vocab_tiling|max_checkify|"
        "diloco_bucketize_non_scanned|internal_compile.*|skip_jax_distributed_system|"
        "jax_debug_log_modules|colocated_python_data_input|grain_num_threads.*|"
        "grain_prefetch_buffer_size.*|grain_per_worker_.*|grain_ram_.*|grain_worker_count_eval|"
        "generate_padding_batch_.*|expansion_factor_real_data|write_estimator_result",
        _ANY,
        "it says how to compute or read the same values",
    ),
    Foreign(
        "wandb_project_name|wandb_run_name|vertex_tensorboard_.*|dump_hlo_.*|dump_jaxpr_.*|"
        "dump_step|skip_step_interval|skip_step_scaling_factor|per_device_batch_size_.*|"
        "global_rampup_samples|dcn_bandwidth_(burst|latency|interface)|chat_template.*",
        _ANY,
        "it belongs to a key that is not here",
    ),
    Foreign(
        "inference_.*|prefill_.*|decode_sampling_.*|max_prefill_predict_length|prompt|"
        "load_from_prefill_dir|autoregressive_decode_assert|generate_slice|kv_quant_.*|"
        "stack_prefill_result_cache|(ar_cache|compute|prefill_cache)_axis_order|reshape_q|"
        "prometheus_port|return_log_prob|multi_sampling|enable_model_warmup|vllm_.*|"
        "enable_prefix_caching|prefix_caching_.*|use_chunked_prefill|model_call_mode",
        _ANY,
        "training reads none of it; see maxdiloco.generate",
    ),
    Foreign("enable_dropout", _ANY, "there is no dropout"),
    # -- needed for more than the values here
    Foreign("decoder_block", "llama2", "the decoder is llama2's",
            "Give model_name a file that sets this package's keys"),
    Foreign("use_post_attn_norm|use_post_ffw_norm", _OFF, "a block's output is not normed",
            "Use norm_placement=sandwich, for both blocks of a layer"),
    Foreign("rope_linear_scaling_factor", r"1|1\.0*", "it is off here too",
            "Use rope_type=linear rope_factor=N"),
    Foreign("rope_interleave", _OFF, "pairs are taken from the two halves of a head",
            "Leave it out: pairs are taken from the two halves of a head"),
    Foreign("rope_use_scale|rope_attention_scaling|mscale", _ANY,
            "it belongs to rope_type; see rope_attention_factor"),
    Foreign("max_position_embeddings", _ANY, "rotary embedding has no end"),
    Foreign("use_vertex_tensorboard", _OFF, "", "TensorBoard's files are in the run's folder"),
    Foreign("dump_hlo|dump_jaxpr", _OFF, "", "Set XLA_FLAGS=--xla_dump_to=FOLDER"),
    Foreign("reuse_example_batch", _OFF, "", "Use dataset_type=synthetic"),
    Foreign("mu_dtype|grad_dtype", "float32", "gradients and moments are float32",
            "Gradients and Adam's moments stay float32"),
    Foreign("dropout_rate", _OFF, "there is no dropout", "Leave it out: there is no dropout"),
    Foreign("adam_eps_root", _OFF, "it is 0", "Leave it out: it is 0"),
    Foreign("adamw_mask|trainable_parameters_mask", _OFF, "",
            "Norm scales do not decay, and all parameters train"),
    Foreign("muon_beta", r"0\.950*", "it is 0.95", "Leave it out: it is 0.95"),
    Foreign("muon_consistent_rms", r"0\.20*", "it is 0.2", "Leave it out: it is 0.2"),
    Foreign("muon_weight_decay", "$^", "", "Use adam_weight_decay, which counts with muon too"),
    Foreign("quantization", _OFF, "", "Products are in bfloat16: dtype=bfloat16"),
    Foreign("abort_on_(nan|inf)_loss", "true", "nan_policy=stop ends the run",
            "Use nan_policy=skip to skip such steps"),
    Foreign("skip_step_on_spikes", _OFF, "", "Use nan_policy=skip for what is not finite"),
    Foreign("num_epoch", "1|1.0", "steps counts", "Use steps, or steps=-1 for one epoch"),
    Foreign("enable_single_controller", _OFF, "a process runs on each host",
            "Start a process on each host: scripts/xpk_run.sh"),
    Foreign("enable_non_spmd_diloco|enable_threaded_diloco", _OFF, "",
            "Use exchange_carrier=host, which sends beside the step"),
    Foreign("enable_emergency_checkpoint|enable_multi_tier_checkpointing", _OFF, "",
            "Lower checkpoint_period"),
    Foreign("source_checkpoint_layout|checkpoint_conversion_fn", "orbax|none", "",
            "Checkpoints of other programs are not read"),
    Foreign("dcn_bandwidth_limit", "$^", "", "Use benchmarks/thin_link.py to train on a slow link"),
    Foreign("enable_rampup_batch_size", _OFF, "", "Start again with a larger batch and "
            "load_parameters_path"),
    Foreign("tokenize_(train|eval)_data", "true", "text is tokenised",
            "Use dataset_type=arrayrecord for what maxdiloco.prepare has tokenised"),
    Foreign("use_truncation", _OFF, "a document is split, never cut off",
            "A document is split over sequences, never cut off"),
    Foreign("eval_start_step|target_eval_loss", _OFF, "", "Set eval_interval and stop by hand"),
    Foreign("(dcn|ici)_(fsdp_transpose|sequence|context_usp_ulysses|context_autoregressive|"
            "tensor_transpose|tensor_sequence|pipeline|autoregressive)_parallelism", "1",
            "the mesh has no such axis", "Use fsdp or tensor parallelism"),
    Foreign("dataset_name|eval_dataset_name|train_split|eval_split", "$^", "",
            "Name the text in dataset_path, and a held-out one in eval_dataset_path"),
    Foreign("hf_name|hf_data_dir|hf_eval_split|hf_access_token", "$^", "",
            "Use dataset_type=hf dataset_path=NAME:CONFIG:SPLIT and the hub's own login"),
    Foreign("grain_train_mixture_config_path", "$^", "", "Use dataset_mixture"),
    Foreign("(wi|wo)_tile_.*|megablox|sparse_matmul|use_ring_of_experts|use_(tokamax_)?gmm.*|"
            "moe_.*|num_moe_.*|float32_gate_logits",
            _ANY, "experts' products compute the same values"),
    Foreign("shard_exp_on_fsdp", _OFF, "",
            "Use logical_axis_rules=[[stored_expert, [expert, fsdp]]]"),
    Foreign("interleave_moe_layer_step", "1", "every layer has experts",
            "Layers with experts follow one another, after first_num_dense_layers"),
    Foreign("use_random_routing", _OFF, "", "Leave it out: the router chooses"),
    Foreign("use_multimodal|use_audio|use_sft|use_dpo|elastic_enabled|use_indexer|moba|use_mrope|"
            "use_qk_clip|fused_qkv|fused_mlp|quantize_kvcache|mtp_num_layers|"
            "use_untrainable_positional_embedding|"
            "temperature_tuning|parameter_memory_host_offload|"
            "shard_optimizer_over_data|chunk_attn_window_size|float32_qk_product|"
            "share_kv_projections|use_batch_split_schedule|weight_sparsity_n|weight_sparsity_m",
            _OFF, "it is off here too", "Leave it out: there is no such thing here"),
    Foreign(r".*_for_vit|.*_for_audio|.*_mm|distill_.*|elastic_.*|engram_.*|gdn_.*|indexer_.*|"
            "video_.*|audio_.*|image_.*|mtp_.*|moba_.*|mhc_.*|num_pipeline_.*|pipeline_.*",
            _ANY, "it belongs to something that is not here"),
)  # fmt: skip

# Values of keys that base.yml has. (key, value): (our value, what differs).
VALUES = {
    ("remat_policy", "minimal_with_context"): ("minimal", "which keeps the same"),
    ("remat_policy", "save_dot_with_context_except_mlp"): (
        "save_qkv_context", "which recomputes the output product of attention too"),
    ("remat_policy", "save_dot_except_mlp"): (
        "save_qkv_context", "which keeps attention's result in place of its output product"),
    ("remat_policy", "save_dot_except_mlpwi"): (
        "save_qkv_context", "which keeps attention's result in place of output products"),
    ("remat_policy", "save_qkv_proj"): ("save_qkv_context", "which keeps attention's result too"),
    ("remat_policy", "save_out_proj"): (
        "save_context", "which keeps attention's result in place of its output product"),
    ("attention", "cudnn_flash_te"): ("flash", "which is a Triton kernel on a GPU"),
    ("attention", "cudnn_flash_jax"): ("flash", "which is a Triton kernel on a GPU"),
    ("hardware", "gpu_multiprocess"): ("gpu", "for one process and for several"),
    ("grain_packing_type", "first_fit"): ("best_fit", "which cuts no document that fits either"),
    ("eval_per_device_batch_size", "0"): ("-1", "which is per_device_batch_size"),
    ("max_num_checkpoints_to_keep", "none"): ("2147483647", "so all are kept"),
    ("num_diloco_fragments", "none"): ("1", "which is MaxText's too"),
    ("attention_type", "full"): ("global", "which is causal"),
    ("attention_bias", "true"): ("qkv", "which is of queries, keys and values"),
    ("attention_bias", "false"): ("none", "the same"),
    ("mlp_activations_limit", "-1"): ("0.0", "which is no limit too"),
}  # fmt: skip
# (key, value): what to do, since nothing here is near it.
REFUSED = {
    ("remat_policy", "qkv_proj_offloaded"): "no layer's values go to host memory. Use "
    "remat_policy=save_qkv_context, or full where memory is short",
    ("remat_policy", "minimal_offloaded"): "no layer's values go to host memory. Use "
    "remat_policy=minimal, or full where memory is short",
    ("remat_policy", "custom"): "names of single tensors are not taken. Use minimal, "
    "save_qkv_context, save_context or full",
    ("attention_type", "local_sliding"): "a window is a key of its own. Use sliding_window_size=N, "
    "with attention_pattern for some of the layers",
    ("attention_type", "chunk"): "chunks are not here. Use sliding_window_size=N",
    ("opt_type", "adam_pax"): "it places eps and the decay otherwise. Use opt_type=adamw",
    ("profiler", "nsys"): "NVIDIA's profiler is not switched from here. Use profiler=xplane",
    ("tokenizer_type", "tiktoken"): "its files are not read. Use tokenizer_type=huggingface with a "
    "tokenizer.json of the same tokenizer",
    ("dataset_type", "tfds"): "TFDS is not read. Use dataset_type=hf, or text in files",
    ("dataset_type", "olmo_grain"): "its index is not read. Use maxdiloco.prepare, then "
    "dataset_type=arrayrecord",
    ("dataset_type", "c4_mlperf"): "TFDS is not read. Use dataset_type=hf, or text in files",
}


FRACTION = (
    "would be less than a sequence for each device. Here every device adds whole sequences to the "
    "batch, and those that share sequences by context parallelism add them together. Use 1 with "
    "fewer devices in a slice, or with ici_context_parallelism."
)


BASE = "base.yml"  # its file of defaults, which its command lines name first; ours too
_MOST_FOREIGN = 20  # keys of MaxText alone in a copy of our base.yml: our choice; its own has 700
_IN_ITS_PLACE = (
    "Put configs/base.yml in its place: the defaults here are this package's, and docs/maxtext.md "
    "lists those that differ."
)


def refuse_missing_base(path: pathlib.Path) -> None:
    """Raise ConfigError for a base.yml that is not there, as on a command line of MaxText."""
    if not path.is_file():
        raise ConfigError(f"{path} is no file here; MaxText's commands name one. {_IN_ITS_PLACE}")


def refuse_base(path: pathlib.Path, given: Collection[str], keys: Collection[str]) -> None:
    """Raise ConfigError for MaxText's own base.yml. given: its keys; keys: of ours."""
    if sum(name not in keys and foreign(name) is not None for name in given) > _MOST_FOREIGN:
        raise ConfigError(f"{path} is MaxText's, whose defaults are not read. {_IN_ITS_PLACE}")


def foreign(name: str) -> Foreign | None:
    """What is known of a key of MaxText that base.yml does not have."""
    return next((entry for entry in FOREIGN if re.fullmatch(entry.names, name)), None)


def taken(
    given: Mapping[str, Any], keys: Collection[str], warn: Callable[[str], None]
) -> dict[str, Any]:
    """What was given without MaxText's keys, and with its values as this package names them.

    given: {name: values.Given}, names as other_names.translate leaves them. keys: of base.yml; one
    of them is never taken for MaxText's. warn: called with a line on what was dropped, and on each
    value that was replaced. Raises ConfigError, one line for all that cannot be dropped.
    """
    kept, dropped, refused = {}, {}, []
    for name, value in given.items():
        text = _text(value.raw)
        entry = None if name in keys else foreign(name)
        where = (name, _plain(text))
        if entry is not None and (text == "" or re.fullmatch(entry.harmless, _plain(text))):
            dropped.setdefault(entry.why or "off here too", []).append(name)
        elif entry is not None:
            refused.append(f"{name}={text} is MaxText's and not here. {entry.instead}.")
        elif name == "per_device_batch_size" and re.fullmatch(r"0?\.0*[1-9]\d*", text):
            refused.append(f"{name}={text} {FRACTION}")
        elif where in REFUSED:
            refused.append(f"{name}={text} is MaxText's: {REFUSED[where]}.")
        elif where in VALUES:
            own, what = VALUES[where]
            warn(f"note: {name}={text} of MaxText is {name}={own} here, {what}.")
            kept[name] = value._replace(raw=own)
        else:
            kept[name] = value
    steps = given.get("steps")
    if steps is not None and steps.raw == "-1" and "learning_rate_schedule_steps" in kept:
        warn(
            "note: steps=-1 is one epoch of the text here; in MaxText it is "
            "learning_rate_schedule_steps."
        )
    if refused:
        raise ConfigError(" ".join(refused) + " See docs/maxtext.md.")
    if dropped:
        reasons = "; ".join(f"{', '.join(names)}: {why}" for why, names in dropped.items())
        warn(f"note: keys of MaxText that do nothing here and may be left out: {reasons}.")
    return kept


def _text(raw: Any) -> str:
    return raw if isinstance(raw, str) else show(raw)


def _plain(text: str) -> str:
    """A value in one spelling: 0.0 and 0 are the same, and so are None and null."""
    small = text.lower()
    if small in ("none", "null"):
        return "none"
    return re.sub(r"(\d)\.0*$", r"\1", small)
