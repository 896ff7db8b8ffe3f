"""The decoder's options: each alone, and together as families have them, all on the tiny model.

A rotation of base 50 in heads of 8 features turns its pairs 10.2, 3.8, 1.4 and 0.5 times in a text
of 64 tokens: some pairs are kept, some divided and some between.
"""

BASE_50 = dict(head_dim=8, rope_max_timescale=50.0)


def scaled(rope_type, **entries):
    """Of a text of 64 tokens, by 4."""
    length = {} if rope_type == "linear" else {"original_max_position_embeddings": 64}
    return dict(rope_scaling={"rope_type": rope_type, "factor": 4.0} | length | entries)


YARN = BASE_50 | scaled("yarn", beta_fast=2.0)
LLAMA = BASE_50 | scaled("llama3")
TWO_KINDS = dict(base_num_decoder_layers=2, attention_pattern=("local", "global"))
# Five layers: a block of three and two more.
LOCAL_AND_GLOBAL = dict(
    attention_pattern=("local", "global", "local"), sliding_window_size=3,
    base_num_decoder_layers=5, use_qk_norm="false",
)  # fmt: skip
OWN_BASE = LOCAL_AND_GLOBAL | dict(local_rope_max_timescale=20.0) | scaled("linear", factor=8.0)
SIZES = dict(kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3)
LATENT = dict(latent_attention=SIZES, head_dim=6, base_num_kv_heads=4, use_qk_norm="false")
CLAMPED = dict(mlp_activations=("quick_gelu", "plus_one"), mlp_activations_limit=0.6)
BIASED = dict(attention_bias="all", mlp_bias=True)
TIED_UNSCALED = dict(logits_via_embedding=True, embedding_scale="one")

EACH = {
    "local and global layers": LOCAL_AND_GLOBAL,
    "local layers with a rotation of their own": OWN_BASE,
    "two blocks of layers, recomputed": TWO_KINDS
    | dict(sliding_window_size=2, base_num_decoder_layers=4, remat_policy="full"),
    "linear rotation": BASE_50 | scaled("linear"),
    "Llama 3.1 rotation": LLAMA,
    "YaRN": YARN,
    "YaRN of gpt-oss and DeepSeek": BASE_50
    | scaled("yarn", beta_fast=2.0, truncate=False, attention_factor=1.0),
    "sandwich norms": dict(norm_placement="sandwich"),
    "norms of the output": dict(norm_placement="post"),
    "scale added to one": dict(norm_scale_offset=1.0),
    "norm of all heads": dict(use_qk_norm="projection"),
    "query scale": dict(query_pre_attn_scalar=2.5),
    "sinks": dict(attention_sink=True),
    "biases of queries, keys and values": dict(attention_bias="qkv"),
    "biases everywhere": BIASED,
    "latent keys and values": LATENT,
    "latent queries": LATENT | dict(latent_attention=SIZES | {"q_lora_rank": 5}),
    "clamped activations": CLAMPED,
    "tied without scaling": TIED_UNSCALED,
    "untied with scaling": dict(embedding_scale="sqrt_emb_dim"),
}
TOGETHER = {
    "as Gemma": OWN_BASE
    | dict(
        norm_placement="sandwich", norm_scale_offset=1.0, attn_logits_soft_cap=0.7,
        final_logits_soft_cap=0.9, query_pre_attn_scalar=2.5, logits_via_embedding=True,
        use_qk_norm="head",
    ),
    "as gpt-oss": YARN | LOCAL_AND_GLOBAL | BIASED | CLAMPED
    | dict(attention_sink=True) | scaled("yarn", beta_fast=2.0, truncate=False),
    "as DeepSeek": LATENT | BASE_50 | scaled("yarn", beta_fast=2.0, attention_factor=1.0)
    | dict(
        latent_attention=SIZES | dict(q_lora_rank=5, qk_nope_head_dim=8, qk_rope_head_dim=8),
        head_dim=16, query_pre_attn_scalar=2.5,
    ),
    "as OLMo 2 and Llama 3.1": LLAMA | TIED_UNSCALED
    | dict(norm_placement="post", use_qk_norm="projection"),
}  # fmt: skip
