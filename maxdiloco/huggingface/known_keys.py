"""Keys that no family's table has: ours that stay neutral, theirs that change nothing."""

from maxdiloco.flags.base_yml import Table
from maxdiloco.flags.check_experts import OF_WHAT_IS_COMPUTED

# Keys of the group model that say how to train, not what is computed.
OF_TRAINING = ("model_name", "override_model_config", "z_loss_multiplier", "capacity_factor")
# Values of the keys that a family says nothing of.
NEUTRAL = {
    "padded_vocab_size": -1,
    "num_experts": 1,
    **OF_WHAT_IS_COMPUTED,
    "mlp_activations_limit": 0.0,
    "mlp_bias": False,
    "norm_placement": "pre",
    "norm_scale_offset": 0.0,
    "rope_scaling": Table(),
    "embedding_scale": "one",
    "latent_attention": Table(),
    "use_qk_norm": "false",
    "query_pre_attn_scalar": 0.0,
    "attention_bias": "none",
    "attention_sink": False,
    "attn_logits_soft_cap": 0.0,
    "final_logits_soft_cap": 0.0,
    "sliding_window_size": 0,
    "attention_pattern": (),
    "local_rope_max_timescale": -1.0,
}
# Keys of config.json that rules read, or that change nothing of what is computed.
NOTED = {
    "_name_or_path", "_sliding_window_pattern", "architectures", "attention_bias",
    "attention_dropout", "attn_implementation", "attn_logit_softcapping", "auto_map",
    "bos_token_id", "cache_implementation", "dtype", "eos_token_id", "final_logit_softcapping",
    "hidden_act", "hidden_activation", "initial_context_length", "initializer_range", "layer_types",
    "max_position_embeddings", "max_window_layers", "model_type", "moe_intermediate_size",
    "n_group", "n_routed_experts", "num_nextn_predict_layers", "q_lora_rank", "qk_head_dim",
    "topk_group", "aux_loss_alpha", "ep_size", "head_dim", "seq_aux",
    "num_experts", "num_local_experts", "output_router_logits", "pad_token_id",
    "router_aux_loss_coef", "router_jitter_noise",
    "pretraining_tp", "rope_local_base_freq", "rope_parameters", "rope_scaling", "rope_theta",
    "sliding_window", "sliding_window_pattern", "tie_word_embeddings", "torch_dtype",
    "transformers_version", "use_cache", "use_sliding_window",
}  # fmt: skip
