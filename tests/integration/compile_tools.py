"""A small run for train_compile, and what it exchanges, by hand.

A decoder of two layers of width 128 and a vocabulary of 256: 32768 values in the embedding, tied; a
layer has 4 * 128 * 128 of attention, 2 * 128 * 256 of feed-forward and 2 * 128 of norms, and there
is a last norm.
"""

# sgd compiles in half the time, and does not change what is exchanged.
FLAGS = (
    "base_emb_dim=128 base_num_decoder_layers=2 base_mlp_dim=256 base_num_query_heads=2 "
    "base_num_kv_heads=2 head_dim=64 use_qk_norm=false vocab_size=256 mlp_activations=[gelu] "
    "dataset_type=synthetic max_target_length=256 per_device_batch_size=8 attention=dot_product "
    "opt_type=sgd adam_weight_decay=0 gradient_clipping_threshold=0 diloco_sync_period=8 "
    "compile_topology_num_slices=2"
)
KEYS = dict(flag.split("=") for flag in FLAGS.split())
ENDS = 256 * 128 + 128
LAYER = 4 * 128 * 128 + 2 * 128 * 256 + 2 * 128
PARAMETERS = ENDS + 2 * LAYER
# Bytes of one value, with its share of the scale of a block of 256.
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / 256, "float4_e3m0": 0.5 + 1 / 256}
