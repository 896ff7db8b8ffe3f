"""Every value of the command line that is refused is one line: key, value, why and remedy."""

import re

import pytest

from maxdiloco.flags import config

# A row: key=value and others | why and remedy that the line has to hold | more of them.
# Names in capitals stand for keys and values of SHORT.
REFUSED = """
# unknown keys: only a slip or words of a key are taken for that key
some_dtype=1 | some_dtype=1 (command line) is no key. --help lists every key.
enable_tensorbord=1 | (command line) is no key. Did you mean enable_tensorboard? --help lists
stepz=1 | is no key. Did you mean steps? --help lists every key.
outer_lr=1 | is no key. Did you mean diloco_outer_lr? --help lists every key.
# names that other trainers have
lr=1 | is no key. Did you mean learning_rate? --help lists every key.
grad_clip=1 | Did you mean gradient_clipping_threshold?
num_layers=1 | Did you mean base_num_decoder_layers?
max_to_keep=1 | Did you mean max_num_checkpoints_to_keep?
Max-Steps=1 | Did you mean steps?
wandb=true | Did you mean enable_wandb?
# wrong types
learning_rate=abc | is not a number | like the default, learning_rate=0.0004
learning_rate= | is not a number
learning_rate=nan | is not a number
learning_rate=1e999 | is too large | learning_rate=0.0004
steps=1e-4 | is not a whole number | steps=1000
steps=10.5 | is not a whole number | steps=1000
steps=1e999999999 | is too large. Write it like the default, steps=1000
enable_diloco=2 | is neither true nor false | enable_diloco=true
mlp_activations=silu | is not a list | mlp_activations=[silu, linear]
mlp_activations=[silu | is not a list | mlp_activations=[silu, linear]
mlp_activations=[{gelu: 1}] | must be one of
eval_dataset_path={a/b: c} | a/b: c is not name: path | Write {wiki: /data/wiki}
eval_dataset_path={a: [b]} | a: [b] is not name: path
# limits of one value, see OUTSIDE
steps=0 | must be -1 or >= 1 (inner steps) | default is steps=1000
diloco_outer_lr=-0.1 | must be -1 or >= 0 | diloco_outer_lr=-1.0
# names
hardware=gpus | must be one of: auto, cpu, gpu, tpu. Did you mean gpu?
nan_policy=ignore | must be one of: stop, skip. Use one of these
mlp_activations=[silu, liner] | Did you mean linear?
dataset_type=parquet | dataset_path is empty, but dataset_type=parquet | Set dataset_path
profiler=trace | must be one of: empty, xplane
model_name=35n | Did you mean 35m? | Use default, 10b,
model_name=bert | has no file in configs/models. Use default, 10b,
run_name=a/b | cannot name a folder | Use letters, digits
run_name=.. | cannot name a folder
base_output_directory=hdfs://b/runs | is on hdfs:// | Use gs://, s3://, az://, or a folder on
base_output_directory=gs:// | names no bucket | Use gs://bucket/folder
base_output_directory=s3:// | names no bucket | Use s3://bucket/folder
load_parameters_path=https://h/runs/a | cannot be on https://, which gives single files | Use gs://
load_parameters_path=memory://b/runs | is on memory:// | cannot become visible at once
# pairs with a default
base_num_kv_heads=3 | base_num_query_heads=4 is not a multiple | base_num_kv_heads=1
head_dim=33 | is odd | head_dim=34
mlp_activations=[] | has 0 entries | Use [gelu] or [silu, linear]
mlp_activations=[silu, gelu, linear] | has 3 entries | Use [gelu] or [silu, linear]
vocab_size=256 | tokenizer_type=byte needs 257 | Use vocab_size=257 or more
tokenizer_type=huggingface | tokenizer_path is empty | or use tokenizer_type=byte
tokenizer_path=a.model | does nothing with | Set tokenizer_type=sentencepiece
tokenizer_path=hdfs://b/tok tokenizer_type=huggingface | no address that is read | Use gs://, s3://
tokenizer_path=gs:// tokenizer_type=huggingface | no address that is read | az://bucket/folder
tokenizer_path=https://h/a?b=c tokenizer_type=huggingface | without a question mark
add_bos=false | does nothing with tokenizer_type=byte | Leave add_bos out
dataset_path=hdfs://b/text | is an address that is not read | Use gs://, s3:// or az:// with a
dataset_path=gs:// | dataset_path=gs:// is an address that is not read | with a bucket and a folder
eval_dataset_path=ftp://b/*.txt | is an address | or mount the text on every host
dcn_fsdp_parallelism=-1 | dcn_diloco_parallelism=-1 and | Set dcn_diloco_parallelism
ici_data_parallelism=-1 | ici_fsdp_parallelism=-1 | Set ici_data_parallelism to a number
logical_axis_rules=[embed] | embed is not [logical axis | Mesh axes: diloco, data, fsdp
logical_axis_rules=[[embed, [fsdp, fsdp]]] | fsdp]] is not [logical axis | each once
logical_axis_rules=[[embed, [fdsp]]] | [embed, [fdsp]] is not | fsdp, expert, context
logical_axis_rules=[{embed: fsdp}] | {embed: fsdp} is not [logical axis
num_diloco_fragments=2 | does nothing with enable_streaming_diloco=false | Use num_diloc
num_communication_overlapping_steps=100 | below diloco_sync_period=100 | Use 0 to 99
profiler=xplane steps=5 | would end after step 6 | use steps=6 or more
steps=-1 SYNTHETIC | dataset_type=synthetic has no end | Set steps
grain_packing_type=best_fit packing=false | with packing=false | or use packing=true
num_slices=3 dcn_diloco_parallelism=2 | diloco 2 = 2 | Leave num_slices=-1
num_slices=3 dcn_data_parallelism=2 | data 2 = 2 | change a dcn_*_parallelism key
# fragments, overlap, replicas; the model has four layers, and one fragment for the rest
FIVE diloco_sync_period=4 | from 1 to diloco_sync_period=4: | Use 1 to 4.
num_diloco_fragments=6 STREAMING | =6 exceeds layers 4 + num_nonlayer_fragments 1 = 5 | Use 5 or
num_nonlayer_fragments=2 num_diloco_fragments=2 STREAMING | leaves none of num_diloco | =3 or more
num_nonlayer_fragments=3 FIVE vocab_size=2 SYNTHETIC | exceeds vocab_size=2 | Use 2 or fewer
num_communication_overlapping_steps=1 EAGER | diloco_outer_overlap=eager | Use num_comm
load_parameters_path=a load_full_state_path=b | load_full_state_path=b | Set one of them
num_diloco_replicas=3 SLOTS | dcn diloco 2 * ici diloco 1 = 2 | Use a multiple of 2
# evaluation
sample_prompt=a eval_interval=-1 | is continued at each evaluation | Set eval_interval
sample_prompt=a eval_interval=5 SYNTHETIC | is text | Leave sample_prompt out
eval_dataset_path={a: hf://b/c} | eval_dataset_path.a=hf://b/c is an address | mount the text
eval_dataset_path={"a":"b"} SYNTHETIC | {a: b} is text | reads none | Leave eval_d
eval_steps=-1 SYNTHETIC eval_interval=10 | has no end | Set eval_steps
eval_fraction=0 eval_interval=9 | eval_fraction=0 holds nothing out, but eval_interval=9
# what is no key=value, and a layer beside a model
steps | steps is not key=value | Write key=value
-steps=1 | -steps=1 has a dash | Write steps=1
base_emb_dim=64 model_name=1b | (command line) differs from base_emb_dim=2048 of model_name=1b
base_emb_dim=64 model_name=1b | Leave base_emb_dim out, or add override_model_config=true
# layers and attention
attention_pattern=[local, global] | sliding_window_size=0 gives | Set sliding_window_size
attention_pattern=[near] | must be one of: local, global
attention_pattern=[local, local] base_num_decoder_layers=1 WINDOW | has 2 entries | Use 1 or
sliding_window_size=8 attention_pattern=[global] | no layer is local | Leave the pattern
local_rope_max_timescale=100 | no layer is local | Set rope_max_timescale
# entries of tables
rope_scaling=8 | is not a table | rope_scaling={}
rope_scaling={factor: 8} | {factor: 8.0} lacks rope_type | Add it, such as rope_type: linear.
rope_scaling={rope_type: yarn, factor: 8} | lacks original_max_position_embeddings. Add it, such
rope_scaling={kind: yarn} | (command line): kind is no entry. Use rope_type, factor, original_max
rope_scaling={rope_type: longrope} | rope_type=longrope must be one of: linear, llama3, yarn
rope_scaling={rope_type: linear, factor: 0.5} | must be >= 1 | an example is rope_scaling.factor=8.0
rope_scaling={rope_type: linear, factor: a} | is not a number | Write it like rope_scaling.factor=8
rope_scaling={rope_type: linear, factor: 8, truncate: false} | : truncate does nothing with rope_t
rope_scaling={rope_type: linear, factor: 8, beta_slow: 2} | or use rope_type: yarn.
rope_scaling={LLAMA, low_freq_factor: 4} | is not below high_freq_factor: 4.0 | Lower it
rope_scaling={YARN} rope_max_timescale=1 | does not go with rope_type: yarn | Use more than 1
rope_scaling={YARN, beta_slow: 32} | beta_slow: 32.0 of rope_scaling is not below beta_fast: 32.0
latent_attention={q_lora_rank: 4} | lacks kv_lora_rank. Add it, such as kv_lora_rank: 512
latent_attention=MLA base_num_kv_heads=4 | use_qk_norm=head does not fit | Use use_qk_norm=false
latent_attention=MLA head_dim=64 | head_dim=64 does not fit latent_attention | Use head_dim=32
latent_attention=MLA use_qk_norm=false | base_num_kv_heads=2 does not | Use base_num_kv_heads=4
latent_attention={kv_lora_rank: 4, qk_nope_head_dim: 9, qk_rope_head_dim: 7, v_head_dim: 4} | is odd
use_qk_norm=heads | must be one of: false, head, projection. Did you mean head?
padded_vocab_size=383 | is below vocab_size=384 | Use at least 384, or -1 for none
# experts
num_experts_per_tok=2 | does nothing with num_experts=1, a dense | or set num_experts
num_experts_per_tok=5 num_experts=4 | more than num_experts=4 | Use 4 or fewer
first_num_dense_layers=4 num_experts=4 | leaves none of base_num_decoder | Use 3 or fewer
capacity_factor=0 num_experts=4 | must be -1 or > 0 | capacity_factor=-1
router={balance_bias: true} | does nothing with num_experts=1, a dense | Use router={}, or
router={num_groups: 3} num_experts=4 | num_groups: 3 of router does not divide num | divisor of 4
router={groups_per_token: 2} num_experts=4 | is more than num_groups: 1 | Use 1 or fewer
num_experts_per_tok=3 GROUPS | exceeds groups_per_token 1 * 2 experts | or use 2 or fewer
num_experts=8 ici_expert_parallelism=3 | num_experts=8 does not divide by | divisor of 8
# the schedule of the learning rate
wsd_decay_style=cosine | does nothing with lr_schedule_type=cosine | lr_schedule_type=wsd
wsd_decay_steps_fraction=0.2 | does nothing | or leave wsd_decay_steps_fraction out
warmup_steps_fraction=0.5 WSD wsd_decay_steps_fraction=0.6 | =0.5 and wsd_decay | Lower one
# what an exchange carries
diloco_error_feedback=always | diloco_exchange_dtype=float32 | Use | =auto or
diloco_merge=rda EAGER | does not go with | Use diloco_m
diloco_merge=rda enable_diloco=false | =false. Use diloco_merge=mean or enable_diloco=true.
# islands
island=a | does nothing with islands=none. Use island= or islands=elastic
islands=elastic island=a | lacks islands_store | Set it to s3://bucket/folder
islands=elastic islands_store=a | island= cannot name | Give each its own name of letters
islands=elastic islands_store=a island=a/b | island=a/b cannot name an island
ISLAND enable_diloco=false | does not go with enable_diloco=false | Use enable_diloco=true
ISLAND num_diloco_replicas=2 | an island is one replica | Leave it out, and start more islands
ISLAND dcn_diloco_parallelism=2 | dcn_diloco_parallelism=2 does not go with | start more islands
ISLAND ici_diloco_parallelism=2 | ici_diloco_parallelism=2 does not go with | start more islands
ISLAND diloco_outer_overlap=delayed | diloco_outer_overlap=delayed does not | Use diloco_outer
ISLAND diloco_exchange=owners | does nothing with islands=elastic | or islands=none
ISLAND exchange_carrier=host | does nothing with islands=elastic | Use exchange_carrier=auto
ISLAND EAGER | a record of the log is applied once | Use diloco_outer_overlap=none
ISLAND diloco_outer_optimizer=adam | hosts take the outer step | Use nesterov or sgd
ISLAND load_full_state_path=a | the log has the state | Use load_parameters_path
ISLAND grain_worker_count=1 | is leased in this process | Use grain_worker_count=0
# a mixture of sources
dataset_mixture=web | is not a list
dataset_mixture=[web] | web is not a source. Write dataset_mixture=[{path
dataset_mixture=[{path: /a}] | source {path: /a} has no name. Write
dataset_mixture=[{name: a}] | has no path
dataset_mixture=[{name: a, path: }] | has no path
dataset_mixture=[{name: a, path: /a, wait: 1}] | has wait, which is no key of it
dataset_mixture=[{name: a, path: /a, dataset_type: csv}] | csv of source a is none
dataset_mixture=[{name: a/b, path: /a}] | name a/b cannot be part of a metric's name
dataset_mixture=[{name: a, path: hf://b/c}] | mount the text
dataset_mixture=[{name: a, path: /a, weight: -1}] | weight -1 of source a is not a
dataset_mixture=[{name: a, path: /a, weight: nan}] | Give its share, such as 0.7
dataset_mixture=[{name: a, path: /a, weight: 0}] | no weight above 0. Give a source
dataset_mixture=[{name: a, path: /a}, {name: a, path: /b}] | 2 sources named a
dataset_mixture=[{name: [a], path: /a}] | is not a source
dataset_mixture=[[{name: a, path: /a}]] | is not a source
SOURCE dataset_path=/c | dataset_path=/c is given beside
SOURCE SYNTHETIC | Leave one of them out
dataset_per_replica=true | does nothing without dataset_mixture
WEIGHED dataset_per_replica=true | do nothing with dataset_per_replica=true
# keys and values of MaxText, and names that it shares with ours
grad_dtype=bfloat16 | Gradients stay float32
quantization=intmp | Use quantization=int8
quantization=int8 num_experts=4 | does not go with num_experts=4: the products of experts
decoder_block=gemma2 | Give model_name a file
attention_type=local_sliding | is no key any more | sliding_window_size=N for a window
rope_factor=8 rope_type=yarn | Use rope_scaling={factor: 8}. | Use rope_scaling={rope_type: yarn};
routed_bias=true | Use router={balance_bias: true}.
reuse_example_batch=1 | Use dataset_type=synthetic
enable_single_controller=true | a process on each host
num_epoch=2 | Use steps
ici_pipeline_parallelism=4 | Use fsdp or tensor parallelism
remat_policy=qkv_proj_offloaded | no layer's values go to host memory. Use remat_policy
remat_policy=custom | names of single tensors
opt_type=adam_pax | Use opt_type=adamw
profiler=nsys | Use profiler=xplane
tokenizer_type=tiktoken | Use tokenizer_type=huggingface
dataset_type=tfds | Use dataset_type=hf, or text in files
per_device_batch_size=0.5 | less than a sequence for each device.
abort_on_nan_loss=false | Use nan_policy=skip
grad_dtype=bfloat16 steps=3 num_epoch=2 remat_policy=custom | num_epoch=2 | remat_policy=custom
hf_path=a dataset_path=b | dataset_path=b and hf_path=a both mean dataset_path
train_data_columns=[a,b] | [a, b] names 2 columns | Use text_column=NAME
"""

SHORT = {
    "STREAMING": "enable_streaming_diloco=true",
    "FIVE": "num_diloco_fragments=5 enable_streaming_diloco=true",
    "SLOTS": "dcn_diloco_parallelism=2 ici_diloco_parallelism=1",
    "SYNTHETIC": "dataset_type=synthetic",
    "EAGER": "diloco_outer_overlap=eager",
    "ISLAND": "islands=elastic islands_store=a island=a",
    "WINDOW": "sliding_window_size=8",
    "YARN": "rope_type: yarn, factor: 2, original_max_position_embeddings: 64",
    "LLAMA": "rope_type: llama3, factor: 2, original_max_position_embeddings: 64",
    "MLA": "{kv_lora_rank: 4, qk_nope_head_dim: 24, qk_rope_head_dim: 8, v_head_dim: 4}",
    "GROUPS": "num_experts=4 router={num_groups: 2}",
    "WSD": "lr_schedule_type=wsd",
    "SOURCE": "dataset_mixture=[{name: a, path: /a}]",
    "WEIGHED": "dataset_mixture=[{name: a, path: /a}, {name: b, path: /b, weight: 3}]",
}

# Of each key a value just outside its limits, or a word that is none of its.
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
    diloco_outer_overlap=early diloco_exchange_dtype=fp4 diloco_outer_memory=host
    diloco_merge=median diloco_error_feedback=on dataset_type=grains tokenizer_type=bytes
    diloco_outer_momentum=1.0 warmup_steps_fraction=1.1 adam_eps=0.0 max_target_length=1
""".split()

# The other side of the limits above.
TAKEN = """
FIVE
num_diloco_fragments=6 num_nonlayer_fragments=2 STREAMING
num_diloco_fragments=4 diloco_sync_period=4 STREAMING
num_diloco_fragments=3 num_nonlayer_fragments=2 STREAMING
num_communication_overlapping_steps=99
communication_overlapping_alpha=1
diloco_outer_overlap=delayed FIVE
num_diloco_replicas=4 dcn_diloco_parallelism=2
# the number of slices is not known yet
num_diloco_replicas=3
enable_diloco=false dcn_diloco_parallelism=2 diloco_sync_period=7
vocab_size=100 SYNTHETIC
vocab_size=257 profiler=xplane steps=6
profiler=xplane steps=-1
steps=2147483647
dcn_data_parallelism=-1 dcn_diloco_parallelism=1
num_slices=4 dcn_data_parallelism=2
run_name=a-b_c.1 load_parameters_path=runs/a
eval_fraction=0
eval_fraction=0 eval_interval=9 eval_dataset_path=/data
num_experts=8 num_experts_per_tok=2 router={num_groups: 4, groups_per_token: 2} capacity_factor=1.25
num_experts=8 first_num_dense_layers=1 ici_expert_parallelism=2
eval_fraction=0 eval_interval=9 eval_dataset_path={a: /data}
WSD warmup_steps_fraction=0.5 wsd_decay_steps_fraction=0.5
WSD wsd_decay_style=cosine
diloco_error_feedback=always diloco_exchange_dtype=int8
diloco_merge=rda diloco_outer_overlap=delayed
"""


def rows(table):
    return [line for line in table.splitlines() if line and not line.startswith("# ")]


def arguments(flags):
    for name, meant in SHORT.items():
        flags = flags.replace(name, meant)
    return re.split(r" (?=\w+=)", flags)


@pytest.mark.parametrize("row", rows(REFUSED))
def test_a_value_that_cannot_work_is_refused_in_one_line(refusal, row):
    flags, *words = row.split(" | ")
    argv = arguments(flags)
    line = refusal(*argv)
    assert argv[0].partition("=")[0] in line
    assert [word for word in words if word not in line] == []


@pytest.mark.parametrize("flag", OUTSIDE)
def test_a_value_outside_what_base_yml_allows_is_refused(refusal, flag):
    assert refusal(flag).startswith(f"{flag} must be ")


@pytest.mark.parametrize("flags", rows(TAKEN))
def test_the_last_value_that_works_is_taken(flags):
    cfg = config.load(arguments(flags), {})
    for name, value in (one.split("=", 1) for one in arguments(flags)):
        assert config.show(vars(cfg)[name]).removesuffix(".0") == value
