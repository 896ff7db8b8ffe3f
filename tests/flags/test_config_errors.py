"""Every refusal is one line with key, value, why and remedy."""

import pytest

from maxdiloco.errors import ConfigError
from maxdiloco.flags import config

STREAMING = "enable_streaming_diloco=true"
SYNTHETIC = "dataset_type=synthetic"


def refusal(argv, environ=()) -> str:
    """The line that load refuses with; exit code 2 belongs to it."""
    with pytest.raises(ConfigError) as caught:
        config.load(argv, dict(environ))
    line = str(caught.value)
    assert "\n" not in line
    assert caught.value.exit_code == 2
    return line


# key=value, remedy (or why) that the line has to hold; several words where both are wanted.
ONE_FLAG = [
    # unknown keys, wrong types
    ("learnin_rate=1", "Did you mean learning_rate?"),
    ("zzz=1", "is no key. --help lists every key"),
    ("learning_rate=abc", "is not a number", "like the default, learning_rate=0.0004"),
    ("learning_rate=", "is not a number"),
    ("learning_rate=nan", "is not a number"),
    ("learning_rate=1e999", "is too large", "learning_rate=0.0004"),
    ("steps=1e-4", "is not a whole number", "steps=1000"),
    ("steps=10.5", "is not a whole number", "steps=1000"),
    ("steps=many", "is not a whole number", "steps=1000"),
    ("log_period=null", "is not a whole number"),
    ("learning_rate=null", "is not a number"),
    ("steps=1e999999999", "is too large. Write it like the default, steps=1000"),
    ("enable_diloco=2", "is neither true nor false", "enable_diloco=true"),
    ("enable_diloco=", "is neither true nor false", "enable_diloco=true"),
    ("mlp_activations=silu", "is not a list", "mlp_activations=[silu, linear]"),
    ("mlp_activations=[silu", "is not a list", "mlp_activations=[silu, linear]"),
    ("eval_sets=/data", "is not a table", "eval_sets={}"),
    ("eval_sets={a/b: c}", "a/b: c is not name: path", "Write {wiki: /data/wiki}"),
    ("eval_sets={a: [b]}", "a: [b] is not name: path"),
    ("eval_sets={a: }", "a:  is not name: path"),
    # limits of one value, see OUTSIDE
    ("steps=0", "must be -1 or >= 1 (inner steps)", "default is steps=1000"),
    ("diloco_outer_lr=-0.1", "must be -1 or >= 0", "diloco_outer_lr=-1.0"),
    ("diloco_outer_momentum=1", "must be -1 or 0 to below 1"),
    ("warmup_steps_fraction=1.1", "must be 0 to 1 (fraction)"),
    ("adam_eps=0", "must be > 0"),
    ("max_target_length=1", "must be >= 2 (tokens)"),
    # names
    ("hardware=gpus", "must be one of: auto, cpu, gpu, tpu. Did you mean gpu?"),
    ("nan_policy=ignore", "must be one of: stop, skip. Use one of these"),
    ("mlp_activations=[silu, liner]", "Did you mean linear?"),
    ("dataset_type=parquet", "dataset_path is empty, but dataset_type=parquet", "Set dataset_path"),
    ("profiler=trace", "must be one of: empty, xplane"),
    ("model_name=35n", "Did you mean 35m?", "Use default, 10b, "),
    ("model_name=bert", "has no file in configs/models. Use default, 10b, "),
    ("run_name=a/b", "cannot name a folder", "Use letters, digits"),
    ("run_name=..", "cannot name a folder"),
    ("base_output_directory=s3://b/runs", "is on s3://", "Use gs://bucket/folder, or a folder on"),
    ("base_output_directory=gs://", "names no bucket", "Use gs://bucket/folder"),
    ("load_parameters_path=az://b/runs", "is on az://", "cannot become visible at once"),
    ("load_full_state_path=hdfs://b/runs", "is on hdfs://", "a run cannot be locked"),
    # pairs with a default
    ("base_num_kv_heads=3", "base_num_query_heads=4 is not a multiple", "base_num_kv_heads=1"),
    ("head_dim=33", "is odd", "head_dim=34"),
    ("mlp_activations=[]", "has 0 entries", "Use [gelu] or [silu, linear]"),
    ("mlp_activations=[silu, gelu, linear]", "has 3 entries", "Use [gelu] or [silu, linear]"),
    ("vocab_size=256", "tokenizer_type=byte needs 257", "Use vocab_size=257 or more"),
    ("tokenizer_type=huggingface", "tokenizer_path is empty", "or use tokenizer_type=byte"),
    ("tokenizer_path=a.model", "does nothing with", "Set tokenizer_type=sentencepiece"),
    ("add_bos=false", "does nothing with tokenizer_type=byte", "Leave add_bos out"),
    ("dataset_path=gs://b/text", "is an address, but text is read from files", "Mount the bucket"),
    ("eval_dataset_path=s3://b/*.txt", "is an address", "or copy the text to every host"),
    ("dcn_fsdp_parallelism=-1", "dcn_diloco_parallelism=-1 and", "Set dcn_diloco_parallelism"),
    ("ici_data_parallelism=-1", "ici_fsdp_parallelism=-1", "Set ici_data_parallelism to a number"),
    ("logical_axis_rules=[embed]", "embed is not [logical axis", "Mesh axes: diloco, data, fsdp"),
    ("logical_axis_rules=[[embed, [fdsp]]]", "[embed, [fdsp]] is not", "fsdp, expert, context"),
    ("num_diloco_fragments=2", "does nothing with enable_streaming_diloco=false", "Use num_diloc"),
    ("num_nonlayer_fragments=2", "enable_streaming_diloco=false", "or enable_streaming_diloco=tr"),
    ("use_sequential_layers=true", "enable_streaming_diloco=false", "use_sequential_layers=false"),
    ("num_communication_overlapping_steps=100", "below diloco_sync_period=100", "Use 0 to 99"),
    ("profiler=xplane steps=5", "would end after step 6", "use steps=6 or more"),
    ("steps=-1 dataset_type=synthetic", "dataset_type=synthetic has no end", "Set steps"),
    ("grain_packing_type=best_fit packing=false", "with packing=false", "or use packing=true"),
    ("num_slices=3 dcn_diloco_parallelism=2", "diloco 2 = 2", "Leave num_slices=-1"),
    ("num_slices=3 dcn_data_parallelism=2", "data 2 = 2", "change a dcn_*_parallelism key"),
    # fragments, overlap, replicas
    (
        f"num_diloco_fragments=5 diloco_sync_period=4 {STREAMING}",
        " from 1 to diloco_sync_period=4: ",
        "Use 1 to 4.",
    ),
    (
        f"num_diloco_fragments=6 {STREAMING}",  # 4 layers and one for the rest
        "num_diloco_fragments=6 exceeds layers 4 + num_nonlayer_fragments 1 = 5",
        "Use 5 or",
    ),
    (
        f"num_nonlayer_fragments=2 num_diloco_fragments=2 {STREAMING}",
        "leaves none of num_diloco_fragments=2",
        "=3 or more",
    ),
    (
        f"num_nonlayer_fragments=3 num_diloco_fragments=5 {STREAMING} vocab_size=2 {SYNTHETIC}",
        "exceeds vocab_size=2",
        "Use 2 or fewer",
    ),
    (
        "num_communication_overlapping_steps=1 diloco_outer_overlap=eager",
        "diloco_outer_overlap=eager",
        "Use num_communication_overlapping_steps=0",
    ),
    ("load_parameters_path=a load_full_state_path=b", "load_full_state_path=b", "Set one of them"),
    (
        "num_diloco_replicas=3 dcn_diloco_parallelism=2 ici_diloco_parallelism=1",
        "dcn diloco 2 * ici diloco 1 = 2",
        "Use a multiple of 2",
    ),
    # evaluation
    ("sample_prompt=a eval_interval=-1", "is continued at each evaluation", "Set eval_interval"),
    (f"sample_prompt=a eval_interval=5 {SYNTHETIC}", "is text", "Leave sample_prompt out"),
    ("eval_sets={a: gs://b/c}", "eval_sets.a=gs://b/c is an address", "Mount the bucket"),
    (f'eval_sets={{"a":"b"}} {SYNTHETIC}', "{a: b} are texts", "reads none", "Leave eval_sets"),
    (f"eval_steps=-1 {SYNTHETIC} eval_interval=10", "has no end", "Set eval_steps"),
    # what is no key=value
    ("steps", "steps is not key=value", "Write key=value"),
    ("-steps=1", "-steps=1 has a dash", "Write steps=1"),
    (
        "base_emb_dim=64 model_name=1b",
        "base_emb_dim=64 (command line) differs from base_emb_dim=2048 of model_name=1b",
        "Leave base_emb_dim out, or add override_model_config=true",
    ),
]

# Of each key a value just outside its limits, or a word that is none of its.
OUTSIDE = """
    steps=-2 num_communication_overlapping_steps=-1 communication_overlapping_alpha=1.5
    communication_overlapping_alpha=-0.1 diloco_sync_period=0 num_diloco_fragments=0
    num_nonlayer_fragments=0 num_diloco_replicas=0 learning_rate=-1.0 warmup_steps=-2
    learning_rate_final_fraction=-0.1 adam_b2=1.0 gradient_clipping_threshold=-1.0 base_emb_dim=-128
    base_num_kv_heads=0 vocab_size=0 per_device_batch_size=0 gradient_accumulation_steps=0
    log_period=0 eval_interval=0 eval_steps=0 checkpoint_period=0 max_num_checkpoints_to_keep=0
    dcn_data_parallelism=0 ici_tensor_parallelism=-2 num_slices=0 peer_timeout_seconds=0
    jax_distributed_initialization_timeout=0
    dtype=bf16 weight_dtype=float16 attention=flush remat_policy=minimum matmul_precision=low
    opt_type=adam lr_schedule_type=linear norm_placement=peri diloco_outer_optimizer=nestrov
    diloco_outer_overlap=early diloco_exchange_dtype=fp4 diloco_outer_memory=host
    diloco_merge=median diloco_error_feedback=on dataset_type=grains tokenizer_type=bytes
""".split()


@pytest.mark.parametrize("flags, words", [(one[0], one[1:]) for one in ONE_FLAG])
def test_a_value_that_cannot_work_is_refused_in_one_line(flags, words):
    argv = flags.split(" ") if flags.count("=") > 1 else [flags]
    line = refusal(argv)
    assert argv[0].partition("=")[0] in line
    assert [word for word in words if word not in line] == []


@pytest.mark.parametrize("flag", OUTSIDE)
def test_a_value_outside_what_base_yml_allows_is_refused(flag):
    assert refusal([flag]).startswith(f"{flag} must be ")


@pytest.mark.parametrize(
    "flag",
    [
        "num_diloco_replicas=2",
        "enable_streaming_diloco=true",
        "num_communication_overlapping_steps=1",
        "communication_overlapping_alpha=0.5",
        "diloco_outer_overlap=eager",
        "diloco_exchange_dtype=int8",
        "diloco_outer_memory=pinned_host",
    ],
)
def test_data_parallel_refuses_what_only_diloco_does(flag):
    """Flags that would be ignored in silence: users believe they compare something."""
    line = refusal(["enable_diloco=false", flag])
    assert f"{flag} does nothing with enable_diloco=false" in line
    assert "or enable_diloco=true" in line


@pytest.mark.parametrize(
    "flags",
    [
        f"num_diloco_fragments=5 {STREAMING}",
        f"num_diloco_fragments=6 num_nonlayer_fragments=2 {STREAMING}",
        f"num_diloco_fragments=4 diloco_sync_period=4 {STREAMING}",
        f"num_diloco_fragments=3 num_nonlayer_fragments=2 {STREAMING}",
        "num_communication_overlapping_steps=99",
        "communication_overlapping_alpha=1",
        f"diloco_outer_overlap=delayed num_diloco_fragments=5 {STREAMING}",
        "num_diloco_replicas=4 dcn_diloco_parallelism=2",
        "num_diloco_replicas=3",  # the number of slices is not known yet
        "enable_diloco=false dcn_diloco_parallelism=2 diloco_sync_period=7",
        f"vocab_size=100 {SYNTHETIC}",
        "vocab_size=257 profiler=xplane steps=6",
        "profiler=xplane steps=-1",
        "steps=2147483647",
        "dcn_data_parallelism=-1 dcn_diloco_parallelism=1",
        "num_slices=4 dcn_data_parallelism=2",
        "run_name=a-b_c.1 load_parameters_path=runs/a",
    ],
)
def test_the_last_value_that_works_is_taken(flags):
    """The other side of the limits above."""
    cfg = config.load(flags.split(), {})
    for name, value in (one.split("=", 1) for one in flags.split()):
        assert config.show(vars(cfg)[name]).removesuffix(".0") == value


@pytest.mark.parametrize(
    "environ, words",
    [
        ({"M_LEARNIN_RATE": "1"}, ["M_LEARNIN_RATE=1 is no key", "Did you mean M_LEARNING_RATE?"]),
        ({"M_learning_rate": "1"}, ["M_learning_rate=1 is no key", "mean M_LEARNING_RATE?"]),
        ({"M_QQQ": "1", "M_STEPZ": "2"}, ["M_QQQ=1 is no key. Unset it.", "mean M_STEPS?"]),
        ({"M_STEPS": "x"}, ["steps=x (environment M_STEPS)", "steps=1000"]),
    ],
)
def test_a_wrong_variable_of_the_environment_is_named(environ, words):
    line = refusal([], environ)
    assert [word for word in words if word not in line] == []


@pytest.mark.parametrize(
    "content, words",
    [
        (b"steps: [1\n", ["is not a yml file: line ", "Write one `key: value` a line"]),
        (b"a: b: c\n", ["is not a yml file: line 1: ", "Write one"]),
        (b"\xff\xfe\xfa", ["is not a yml file: it is not text", "Write one"]),
        (b"\x00", ["is not a yml file: it is not text", "Write one"]),
        (b"- steps\n", ["holds no keys", "Write one"]),
        (b"steps: 1\nlog_period: 2\nsteps: 3\n", ["steps twice, in lines 1 and 3", "Keep one"]),
        (b"steps:\n  inner: 1\n", ["steps={inner: 1}", "is a table", "keys are not nested"]),
        (b"eval_sets: [a]\n", ["eval_sets=[a]", "is not a table", "eval_sets={}"]),
        (b"eval_sets: {a: b, a: c}\n", ["a stands twice in one {table}", "Keep one"]),
        (b"steps: [1]\n", ["steps=[1]", "run.yml) is a list", "steps=1000"]),
        (b"mlp_activations: silu\n", ["mlp_activations=silu", "is not a list"]),
        (b"step: 5\n", ["step=5", "run.yml) is no key", "Did you mean steps?"]),
        (b"base_emb_dim: 64\nmodel_name: 1b\n", ["base_emb_dim=64", "override_model_config=true"]),
    ],
)
def test_a_yml_file_that_does_not_work_is_named(tmp_path, content, words):
    path = tmp_path / "run.yml"
    path.write_bytes(content)
    line = refusal([str(path)])
    assert str(path) in line
    assert [word for word in words if word not in line] == []


def test_a_yml_file_that_cannot_be_read_or_comes_late_is_named(tmp_path):
    missing = tmp_path / "missing.yml"
    line = refusal([str(missing)])
    assert f"{missing} cannot be read: No such file" in line
    assert "Give the path of a yml file" in line
    (tmp_path / "folder.yml").mkdir()
    assert "folder.yml cannot be read: Is a directory" in refusal([str(tmp_path / "folder.yml")])
    line = refusal(["steps=1", "run.yml"])
    assert "run.yml is not key=value" in line and "a yml file comes first" in line


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("steps", "5", ["steps=5 (stored config) is not of type int", "steps=1000"]),
        ("steps", True, ["steps=true (stored config) is not of type int"]),
        ("learning_rate", "1", ["learning_rate=1 (stored config) is not of type float"]),
        ("enable_diloco", 1, ["enable_diloco=1 (stored config) is not of type bool"]),
        ("run_name", 5, ["run_name=5 (stored config) is not of type text"]),
        ("mlp_activations", "silu", ["mlp_activations=silu (stored config) is not of type list"]),
        ("stepz", 5, ["stepz=5 (stored config) is no key", "Did you mean steps?"]),
    ],
)
def test_a_stored_config_of_another_kind_is_refused(name, value, words):
    with pytest.raises(ConfigError) as caught:
        config.from_dict({name: value})
    assert [word for word in words if word not in str(caught.value)] == []
