"""Values of the command line that are refused, the keys that the error names, and their limits."""

import re

import pytest
from run import names_key

from maxdiloco.config import config
from maxdiloco.config.values import show

# A row: key=value and others | the keys that the error names. Names in capitals stand for keys and
# values of SHORT.
REFUSED = """
# unknown keys: only a slip or words of a key are taken for that key
some_dtype=1 | some_dtype
enable_tensorbord=1 | enable_tensorbord enable_tensorboard
stepz=1 | stepz steps
outer_lr=1 | outer_lr diloco_outer_lr
# names that other trainers have
lr=1 | lr learning_rate
grad_clip=1 | grad_clip gradient_clipping_threshold
num_layers=1 | num_layers base_num_decoder_layers
max_to_keep=1 | max_to_keep max_num_checkpoints_to_keep
Max-Steps=1 | Max-Steps steps
wandb=true | wandb enable_wandb
# wrong types
learning_rate=abc | learning_rate
learning_rate=nan | learning_rate
learning_rate=1e999 | learning_rate
steps=1e-4 | steps
steps=10.5 | steps
steps=1e999999999 | steps
enable_diloco=2 | enable_diloco
mlp_activations=silu | mlp_activations
mlp_activations=[silu | mlp_activations
mlp_activations=[{gelu: 1}] | mlp_activations
eval_dataset_path={a/b: c} | eval_dataset_path
eval_dataset_path={a: [b]} | eval_dataset_path
# limits of one value, see OUTSIDE
steps=0 | steps
diloco_outer_lr=-0.1 | diloco_outer_lr
# names
hardware=gpus | hardware
nan_policy=ignore | nan_policy
mlp_activations=[silu, liner] | mlp_activations
dataset_type=parquet | dataset_type dataset_path
profiler=trace | profiler
model_name=35n | model_name
run_name=a/b | run_name
run_name=.. | run_name
base_output_directory=hdfs://b/runs | base_output_directory
base_output_directory=gs:// | base_output_directory
load_parameters_path=https://h/runs/a | load_parameters_path
load_parameters_path=memory://b/runs | load_parameters_path
# pairs with a default
base_num_kv_heads=3 | base_num_kv_heads base_num_query_heads
head_dim=33 | head_dim
mlp_activations=[] | mlp_activations
mlp_activations=[silu, gelu, linear] | mlp_activations
vocab_size=256 | vocab_size tokenizer_type
tokenizer_type=huggingface | tokenizer_type tokenizer_path
tokenizer_path=a.model | tokenizer_path tokenizer_type
tokenizer_path=hdfs://b/tok tokenizer_type=huggingface | tokenizer_path
tokenizer_path=gs:// tokenizer_type=huggingface | tokenizer_path
tokenizer_path=https://h/a?b=c tokenizer_type=huggingface | tokenizer_path
add_bos=false | add_bos tokenizer_type
dataset_path=hdfs://b/text | dataset_path
dataset_path=gs:// | dataset_path
eval_dataset_path=ftp://b/*.txt | eval_dataset_path
dcn_fsdp_parallelism=-1 | dcn_fsdp_parallelism dcn_diloco_parallelism
ici_data_parallelism=-1 | ici_data_parallelism ici_fsdp_parallelism
logical_axis_rules=[embed] | logical_axis_rules
logical_axis_rules=[[embed, [fsdp, fsdp]]] | logical_axis_rules
logical_axis_rules=[[embed, [fdsp]]] | logical_axis_rules
logical_axis_rules=[{embed: fsdp}] | logical_axis_rules
num_diloco_fragments=2 | num_diloco_fragments enable_streaming_diloco
num_communication_overlapping_steps=100 | num_communication_overlapping_steps diloco_sync_period
profiler=xplane steps=5 | profiler steps
steps=all SYNTHETIC | steps dataset_type
grain_packing_type=best_fit packing=false | grain_packing_type packing
num_slices=3 dcn_diloco_parallelism=2 | num_slices
num_slices=3 dcn_data_parallelism=2 | num_slices
# fragments, overlap, replicas; the model has four layers, and one fragment for the rest
FIVE diloco_sync_period=4 | num_diloco_fragments diloco_sync_period
num_diloco_fragments=6 STREAMING | num_diloco_fragments num_nonlayer_fragments
num_nonlayer_fragments=2 num_diloco_fragments=2 STREAMING | num_nonlayer_fragments
num_nonlayer_fragments=3 FIVE vocab_size=2 SYNTHETIC | num_nonlayer_fragments vocab_size
num_communication_overlapping_steps=1 EAGER | diloco_round_overlap
load_parameters_path=a load_full_state_path=b | load_parameters_path load_full_state_path
num_diloco_replicas=3 SLOTS | num_diloco_replicas
# evaluation
sample_prompt=a eval_interval=-1 | sample_prompt eval_interval
sample_prompt=a eval_interval=5 SYNTHETIC | sample_prompt dataset_type
eval_dataset_path={a: hf://b/c} | eval_dataset_path
eval_dataset_path={"a":"b"} SYNTHETIC | eval_dataset_path dataset_type
eval_steps=-1 SYNTHETIC eval_interval=10 | eval_steps dataset_type
eval_fraction=0 eval_interval=9 | eval_fraction eval_interval
# arguments that are not key=value, and a key of the named model
steps | steps
base_emb_dim=64 model_name=1b | base_emb_dim override_model_config model_name
# layers and attention
attention_pattern=[local, global] | attention_pattern sliding_window_size
attention_pattern=[near] | attention_pattern
attention_pattern=[local, local] base_num_decoder_layers=1 WINDOW | attention_pattern
sliding_window_size=8 attention_pattern=[global] | sliding_window_size attention_pattern
local_rope_max_timescale=100 | local_rope_max_timescale attention_pattern
# entries of tables
rope_scaling=8 | rope_scaling
rope_scaling={factor: 8} | rope_scaling factor rope_type
rope_scaling={rope_type: yarn, factor: 8} | rope_scaling original_max_position_embeddings
rope_scaling={kind: yarn} | rope_scaling kind rope_type
rope_scaling={rope_type: longrope} | rope_scaling rope_type
rope_scaling={rope_type: linear, factor: 0.5} | rope_scaling factor
rope_scaling={rope_type: linear, factor: a} | rope_scaling factor
rope_scaling={rope_type: linear, factor: 8, truncate: false} | rope_scaling truncate
rope_scaling={rope_type: linear, factor: 8, beta_slow: 2} | rope_scaling rope_type
rope_scaling={LLAMA, low_freq_factor: 4} | rope_scaling high_freq_factor
rope_scaling={YARN} rope_max_timescale=1 | rope_scaling rope_type rope_max_timescale
rope_scaling={YARN, beta_slow: 32} | rope_scaling beta_slow beta_fast
latent_attention={q_lora_rank: 4} | latent_attention kv_lora_rank
latent_attention=MLA base_num_kv_heads=4 | latent_attention use_qk_norm
latent_attention=MLA head_dim=64 | latent_attention head_dim
latent_attention=MLA use_qk_norm=false | latent_attention base_num_kv_heads
latent_attention={ODD} | latent_attention qk_rope_head_dim
use_qk_norm=heads | use_qk_norm
padded_vocab_size=383 | padded_vocab_size vocab_size
# experts
num_experts_per_tok=2 | num_experts_per_tok num_experts
num_experts_per_tok=5 num_experts=4 | num_experts_per_tok num_experts
first_num_dense_layers=4 num_experts=4 | first_num_dense_layers num_experts
capacity_factor=1.25 num_experts=4 | capacity_factor
router={balance_bias: true} | router num_experts
router={num_groups: 3} num_experts=4 | router num_groups num_experts
router={groups_per_token: 2} num_experts=4 | router num_groups
num_experts_per_tok=3 GROUPS | num_experts_per_tok router
num_experts=8 ici_expert_parallelism=3 | num_experts ici_expert_parallelism
# the schedule of the learning rate
wsd_decay_style=cosine | wsd_decay_style lr_schedule_type
wsd_decay_steps_fraction=0.2 | wsd_decay_steps_fraction
warmup_steps_fraction=0.5 WSD wsd_decay_steps_fraction=0.6 | warmup_steps_fraction
# exchanges
diloco_error_feedback=always | diloco_error_feedback diloco_exchange_dtype
diloco_aggregation=radial_directional_mean EAGER | diloco_aggregation diloco_round_overlap
diloco_aggregation=radial_directional_mean enable_diloco=false | diloco_aggregation enable_diloco
# islands
island_name=a | island_name enable_islands
islands_global_batch_size=8 | islands_global_batch_size enable_islands
ISLAND islands_global_batch_size=0 | islands_global_batch_size
ISLAND islands_global_batch_size=8 gradient_accumulation_steps=2 | islands_global_batch_size
enable_islands=true island_name=a | enable_islands islands_store
enable_islands=true islands_store=a | enable_islands island_name
enable_islands=true islands_store=a island_name=a/b | island_name
ISLAND enable_diloco=false | enable_islands enable_diloco
ISLAND num_diloco_replicas=2 | enable_islands num_diloco_replicas
ISLAND dcn_diloco_parallelism=2 | enable_islands dcn_diloco_parallelism
ISLAND ici_diloco_parallelism=2 | enable_islands ici_diloco_parallelism
ISLAND diloco_round_overlap=delayed | enable_islands diloco_round_overlap
ISLAND diloco_collective=reduce_scatter | enable_islands diloco_collective
ISLAND diloco_transport=host | enable_islands diloco_transport
ISLAND EAGER | enable_islands diloco_round_overlap
ISLAND diloco_outer_optimizer=adam | enable_islands diloco_outer_optimizer
ISLAND load_full_state_path=a | enable_islands load_parameters_path load_full_state_path
ISLAND grain_worker_count=1 | enable_islands grain_worker_count
# a mixture of sources
dataset_mixture=web | dataset_mixture
dataset_mixture=[web] | dataset_mixture
dataset_mixture=[{path: /a}] | dataset_mixture name
dataset_mixture=[{name: a}] | dataset_mixture path
dataset_mixture=[{name: a, path: }] | dataset_mixture path
dataset_mixture=[{name: a, path: /a, wait: 1}] | dataset_mixture wait
dataset_mixture=[{name: a, path: /a, dataset_type: csv}] | dataset_mixture csv
dataset_mixture=[{name: a/b, path: /a}] | dataset_mixture a/b
dataset_mixture=[{name: a, path: hf://b/c}] | dataset_mixture
dataset_mixture=[{name: a, path: /a, weight: -1}] | dataset_mixture weight
dataset_mixture=[{name: a, path: /a, weight: 1/3}] | dataset_mixture weight
dataset_mixture=[{name: a, path: /a, weight: nan}] | dataset_mixture weight
dataset_mixture=[{name: a, path: /a, weight: 0}] | dataset_mixture weight
dataset_mixture=[{name: a, path: /a}, {name: a, path: /b}] | dataset_mixture
dataset_mixture=[{name: [a], path: /a}] | dataset_mixture
dataset_mixture=[[{name: a, path: /a}]] | dataset_mixture
SOURCE dataset_path=/c | dataset_mixture dataset_path
SOURCE SYNTHETIC | dataset_mixture dataset_type
dataset_per_replica=true | dataset_per_replica dataset_mixture
WEIGHED dataset_per_replica=true | dataset_mixture dataset_per_replica
# keys and values of MaxText
remat_policy=minimal_with_context | remat_policy
use_qk_norm=true | use_qk_norm
attention_bias=false | attention_bias
hardware=gpu_multiprocess | hardware
quantization=fp8_full | quantization
dataset_type=grain grain_file_type=parquet | grain_file_type dataset_type
dataset_type=grain | dataset_type grain_file_type
kv_lora_rank=8 | kv_lora_rank latent_attention
norm_topk_prob=true | norm_topk_prob router normalise_weights
grad_dtype=bfloat16 | grad_dtype
quantization=intmp | quantization
quantization=int8 num_experts=4 | quantization num_experts
decoder_block=gemma2 | decoder_block model_name
attention_type=local_sliding | attention_type sliding_window_size
rope_factor=8 rope_type=yarn | rope_factor rope_type rope_scaling factor
routed_bias=true | routed_bias router balance_bias
reuse_example_batch=1 | reuse_example_batch dataset_type
enable_single_controller=true | enable_single_controller
num_epoch=2 | num_epoch steps
ici_pipeline_parallelism=4 | ici_pipeline_parallelism
remat_policy=qkv_proj_offloaded | remat_policy
remat_policy=custom | remat_policy
opt_type=adam_pax | opt_type
profiler=nsys | profiler
tokenizer_type=tiktoken | tokenizer_type
dataset_type=tfds | dataset_type
per_device_batch_size=0.5 | per_device_batch_size
abort_on_nan_loss=false | abort_on_nan_loss nan_policy
grad_dtype=bfloat16 steps=3 num_epoch=2 remat_policy=custom | grad_dtype num_epoch
hf_path=a dataset_path=b | hf_path dataset_path
train_data_columns=[a,b] | train_data_columns text_column
"""

SHORT = {
    "STREAMING": "enable_streaming_diloco=true",
    "FIVE": "num_diloco_fragments=5 enable_streaming_diloco=true",
    "SLOTS": "dcn_diloco_parallelism=2 ici_diloco_parallelism=1",
    "SYNTHETIC": "dataset_type=synthetic",
    "EAGER": "diloco_round_overlap=eager",
    "ISLAND": "enable_islands=true islands_store=a island_name=a",
    "WINDOW": "sliding_window_size=8",
    "ODD": "kv_lora_rank: 4, qk_nope_head_dim: 9, qk_rope_head_dim: 7, v_head_dim: 4",
    "YARN": "rope_type: yarn, factor: 2, original_max_position_embeddings: 64",
    "LLAMA": "rope_type: llama3, factor: 2, original_max_position_embeddings: 64",
    "MLA": "{kv_lora_rank: 4, qk_nope_head_dim: 24, qk_rope_head_dim: 8, v_head_dim: 4}",
    "GROUPS": "num_experts=4 router={num_groups: 2}",
    "WSD": "lr_schedule_type=wsd",
    "SOURCE": "dataset_mixture=[{name: a, path: /a}]",
    "WEIGHED": "dataset_mixture=[{name: a, path: /a}, {name: b, path: /b, weight: 3}]",
}

# For each key a value just outside its limits, or a word that it does not allow.
OUTSIDE = """
    steps=-2 num_communication_overlapping_steps=-1 communication_overlapping_alpha=1.5
    communication_overlapping_alpha=-0.1 diloco_sync_period=0 num_diloco_fragments=0
    num_nonlayer_fragments=0 num_diloco_replicas=0 learning_rate=-1.0
    learning_rate_final_fraction=-0.1 adam_b2=1.0 gradient_clipping_threshold=-1.0 base_emb_dim=-128
    base_num_kv_heads=0 vocab_size=0 per_device_batch_size=0 gradient_accumulation_steps=0
    log_period=0 eval_interval=0 eval_steps=0 checkpoint_period=0 max_num_checkpoints_to_keep=0
    dcn_data_parallelism=0 ici_tensor_parallelism=-2 num_slices=0 peer_timeout_seconds=0
    jax_distributed_initialization_timeout=0
    dtype=bf16 weight_dtype=float16 attention=flush remat_policy=minimum matmul_precision=low
    opt_type=adam lr_schedule_type=linear norm_placement=peri diloco_outer_optimizer=nestrov
    diloco_round_overlap=early diloco_exchange_dtype=fp4 diloco_outer_memory=host
    diloco_aggregation=median diloco_error_feedback=on dataset_type=grains tokenizer_type=bytes
    diloco_outer_momentum=1.0 warmup_steps_fraction=1.1 adam_eps=0.0 max_target_length=1
""".split()

# The other side of the limits above.
ACCEPTED = """
FIVE
num_diloco_fragments=6 num_nonlayer_fragments=2 STREAMING
num_diloco_fragments=4 diloco_sync_period=4 STREAMING
num_diloco_fragments=3 num_nonlayer_fragments=2 STREAMING
num_communication_overlapping_steps=99
communication_overlapping_alpha=1
diloco_round_overlap=delayed FIVE
num_diloco_replicas=4 dcn_diloco_parallelism=2
# the number of slices is not known yet
num_diloco_replicas=3
enable_diloco=false dcn_diloco_parallelism=2 diloco_sync_period=7
vocab_size=100 SYNTHETIC
vocab_size=257 profiler=xplane steps=6
profiler=xplane steps=all
steps=2147483647
dcn_data_parallelism=-1 dcn_diloco_parallelism=1
num_slices=4 dcn_data_parallelism=2
run_name=a-b_c.1 load_parameters_path=runs/a
eval_fraction=0
eval_fraction=0 eval_interval=9 eval_dataset_path=/data
num_experts=8 num_experts_per_tok=2 router={num_groups: 4, groups_per_token: 2}
num_experts=8 first_num_dense_layers=1 ici_expert_parallelism=2
eval_fraction=0 eval_interval=9 eval_dataset_path={a: /data}
WSD warmup_steps_fraction=0.5 wsd_decay_steps_fraction=0.5
WSD wsd_decay_style=cosine
diloco_error_feedback=always diloco_exchange_dtype=int8
diloco_aggregation=radial_directional_mean diloco_round_overlap=delayed
"""


def rows(table):
    return [line for line in table.splitlines() if line and not line.startswith("# ")]


def arguments(flags):
    for name, meant in SHORT.items():
        flags = flags.replace(name, meant)
    return re.split(r" (?=\w+=)", flags)


@pytest.mark.parametrize("row", rows(REFUSED))
def test_a_refused_value_names_its_keys(refusal, row):
    flags, keys = row.split(" | ")
    line = refusal(*arguments(flags))
    assert [key for key in keys.split() if not names_key(line, key)] == []


@pytest.mark.parametrize("flag", OUTSIDE)
def test_a_value_outside_its_limits_is_refused(refusal, flag):
    assert refusal(flag).startswith(f"{flag} ")


@pytest.mark.parametrize("flags", rows(ACCEPTED))
def test_the_last_value_within_the_limits_is_accepted(flags):
    cfg = config.load(arguments(flags), {})
    for name, value in (one.split("=", 1) for one in arguments(flags)):
        assert show(vars(cfg)[name]).removesuffix(".0") == value


@pytest.mark.parametrize(
    ("argument", "nearest"),
    [
        ("stepz=1", "steps"),
        ("hardware=gpus", "gpu"),
        ("mlp_activations=[silu, liner]", "linear"),
        ("model_name=35n", "35m"),
        ("use_qk_norm=heads", "head"),
    ],
)
def test_the_nearest_key_or_value_is_suggested(refusal, argument, nearest):
    assert f" {nearest}?" in refusal(argument)
