"""MaxText's command lines: what is taken, what is dropped with a note, what is refused."""

import pytest

from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml, config, maxtext

KEYS = base_yml.declared()

# The flags of MaxText's script for streaming DiLoCo over slices, in its order and with its values.
SCRIPT = """base.yml run_name=a save_config_to_gcs=true base_output_directory=gs://bucket/logs
    dataset_path=gs://maxtext-dataset dataset_name=c4/en:3.0.1 eval_dataset_name=c4/en:3.0.1
    model_name=qwen3-8b tokenizer_type=huggingface
    tokenizer_path=maxtext/assets/tokenizers/qwen3-tokenizer per_device_batch_size=8
    max_target_length=2048 enable_diloco=true enable_streaming_diloco=true pure_nnx=true
    num_diloco_fragments=37 use_sequential_layers=false num_communication_overlapping_steps=2
    communication_overlapping_alpha=0.0 dcn_diloco_parallelism=2 diloco_sync_period=37
    diloco_outer_lr=0.1 diloco_outer_momentum=0.9 enable_checkpointing=true checkpoint_period=100
    save_checkpoint_on_completion=true async_checkpointing=false profiler=xplane
    skip_first_n_steps_for_profiler=5 profiler_steps=5 upload_all_profiler_results=true
    jax_distributed_initialization_timeout=3600 steps=100""".split()[1:]


def load(*argv):
    """The config, and the notes that were printed."""
    notes = []
    return config.load(argv, {}, warn=notes.append), notes


def refusal(*argv):
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def replaced(argv, **changes):
    """A command line with other values; None leaves the key out."""
    given = dict(one.split("=", 1) for one in argv) | changes
    return [f"{key}={value}" for key, value in given.items() if value is not None]


def test_its_base_yml_is_refused_in_words_whether_it_is_there_or_not(tmp_path):
    """Its commands name MaxText/configs/base.yml first, mostly from a checkout that is not here."""
    remedy = "Put configs/base.yml in its place: the defaults here are this package's"
    line = refusal("MaxText/configs/base.yml", "model_name=llama2-7b")
    assert line.startswith("MaxText/configs/base.yml is no file here; MaxText's commands name one.")
    assert remedy in line and "cannot be read" in refusal("MaxText/configs/other.yml")
    foreign = ["decoder_block: llama2", "scan_layers: true", "quantization: ''", "enable_nnx: true"]
    foreign += [f"sa_block_{i}: 512" for i in range(20)]
    path = tmp_path / "base.yml"
    path.write_text("\n".join(["steps: 150_001", "base_emb_dim: 2048", *foreign]))
    line = refusal(str(path))
    assert f"{path} is MaxText's, whose defaults are not read. {remedy}" in line


def test_a_copy_of_base_yml_is_its_edits_and_leaves_the_model_its_sizes(tmp_path):
    """The installed package's and a checkout's are two files; their sizes were refused beside a
    model, and the remedy, override_model_config=true, made a llama2-7b of a million parameters."""
    path = tmp_path / "base.yml"
    text = (base_yml.config_folder() / "base.yml").read_text(encoding="utf-8")
    path.write_text(text)
    cfg, _ = load(str(path), "model_name=llama2-7b")
    assert cfg == load("model_name=llama2-7b")[0] and cfg.base_emb_dim == 4096
    text = text.replace("\nsteps: 1000", "\nsteps: 7").replace("_dim: 128", "_dim: 256", 1)
    path.write_text(text)
    assert load(str(path))[0] == load("steps=7", "base_emb_dim=256")[0]
    assert "base_emb_dim=256" in refusal(str(path), "model_name=llama2-7b")
    path.write_text("base_emb_dim: 128")  # somebody's own short file of that name
    assert "base_emb_dim=128" in refusal(str(path), "model_name=llama2-7b")


def test_the_script_for_streaming_diloco_is_told_once_what_it_has_to_change():
    """The data set of TFDS, in one line; then the mounted text: two reports of what cannot carry
    over, and all other flags do."""
    line = refusal(*SCRIPT)
    assert line.count(" is MaxText's and not here") == 2
    assert (
        "dataset_name=c4/en:3.0.1 is MaxText's" in line and "Name the text in dataset_path" in line
    )
    without = replaced(SCRIPT, dataset_name=None, eval_dataset_name=None)
    assert "dataset_path=gs://maxtext-dataset is an address" in refusal(*without)
    cfg, notes = load(*replaced(without, dataset_path="/data/text"))
    assert (cfg.num_diloco_fragments, cfg.diloco_outer_lr, cfg.profiler) == (37, 0.1, "xplane")
    (note,) = notes
    for name in ("save_config_to_gcs", "pure_nnx", "upload_all_profiler_results"):
        assert name in note
    assert "do nothing here and may be left out" in note


@pytest.mark.parametrize(
    "argument",
    [
        "use_vertex_tensorboard=false", "enable_goodput_recording=false", "scan_layers=true",
        "enable_single_controller=false", "log_config=false", "dump_hlo=false", "quantization=",
        "reuse_example_batch=0", "mu_dtype=float32", "decoder_block=llama2", "dropout_rate=0.0",
        "sharding_tolerance=0.02", "num_epoch=1", "sa_block_q=1024", "ici_pipeline_parallelism=1",
        "weight_sparsity_n=null", "muon_beta=0.950", "trainable_parameters_mask=[]",
    ],
)  # fmt: skip
def test_a_key_that_does_nothing_is_dropped_with_one_note(argument):
    cfg, notes = load(argument, "steps=7")
    assert cfg.steps == 7
    (note,) = notes
    assert argument.partition("=")[0] in note
    assert config.load([], {f"M_{argument.partition('=')[0].upper()}": "0"[:0]}, warn=notes.append)
    assert len(notes) == 2


def test_a_command_without_maxtexts_keys_has_no_note():
    assert load("steps=7", "learning_rate=1e-3")[1] == []


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("mu_dtype=bfloat16", "moments stay float32"),
        ("quantization=int8", "dtype=bfloat16"),
        ("scan_layer=true", "is no key"),  # not MaxText's either
        ("decoder_block=gemma2", "Give model_name a file"),
        ("attention_type=local_sliding", "Use sliding_window_size=N"),
        ("reuse_example_batch=1", "Use dataset_type=synthetic"),
        ("enable_single_controller=true", "a process on each host"),
        ("num_epoch=2", "Use steps"),
        ("ici_pipeline_parallelism=4", "Use fsdp or tensor parallelism"),
        (
            "remat_policy=qkv_proj_offloaded",
            "no layer's values go to host memory. Use remat_policy",
        ),
        ("remat_policy=custom", "names of single tensors"),
        ("opt_type=adam_pax", "Use opt_type=adamw"),
        ("profiler=nsys", "Use profiler=xplane"),
        ("tokenizer_type=tiktoken", "Use tokenizer_type=huggingface"),
        ("dataset_type=tfds", "Use dataset_type=hf, or text in files"),
        ("per_device_batch_size=0.5", "less than a sequence for each device. "),
        ("abort_on_nan_loss=false", "Use nan_policy=skip"),
    ],
)
def test_what_cannot_be_dropped_is_refused_with_a_remedy(argument, words):
    assert words in refusal(argument)


def test_all_that_is_refused_stands_in_one_line():
    line = refusal("quantization=int8", "steps=3", "num_epoch=2", "remat_policy=custom")
    assert all(word in line for word in ("quantization=int8", "num_epoch=2", "remat_policy=custom"))


@pytest.mark.parametrize(("key", "value"), maxtext.VALUES)
def test_a_value_of_maxtext_is_taken_as_the_nearest_with_a_note(key, value):
    """Written as MaxText's base.yml has it."""
    written = {"0": "0.0", "none": "None"}.get(value, value)
    cfg, (note,) = load(f"{key}={written}")
    own, _ = maxtext.VALUES[key, value]
    assert str(vars(cfg)[key]) == own
    assert note.startswith(f"note: {key}={written} of MaxText is {key}={own} here, ")


def test_values_that_are_replaced_or_refused_are_of_keys_and_none_of_ours():
    """What base.yml allows is never replaced; what replaces it is allowed."""
    from maxdiloco.flags import checks

    for key, value in [*maxtext.VALUES, *maxtext.REFUSED]:
        allowed = KEYS[key].allowed
        assert not allowed.startswith("one of ") or value not in checks.choices(allowed)
    for (key, _), (own, _) in maxtext.VALUES.items():
        allowed = KEYS[key].allowed
        assert not allowed.startswith("one of ") or own in checks.choices(allowed)


def test_a_key_of_base_yml_is_never_taken_for_one_of_maxtext():
    """A pattern may reach further than it was meant to."""
    value = config.Given("x", "here")
    assert maxtext.taken(dict.fromkeys(KEYS, value), KEYS, lambda line: None).keys() == set(KEYS)


def test_grain_is_its_file_type():
    """MaxText needs both; alone it means arrayrecord there."""
    path = "grain_train_files=/data/a"
    cfg, _ = load("dataset_type=grain", "grain_file_type=parquet", path)
    assert (cfg.dataset_type, cfg.dataset_path) == ("parquet", "/data/a")
    assert load("dataset_type=grain", path)[0].dataset_type == "arrayrecord"


def test_one_epoch_is_another_length_in_maxtext():
    _, (note,) = load("steps=-1", "learning_rate_schedule_steps=100")
    assert note.startswith("note: steps=-1 is one epoch of the text here; in MaxText")
    assert load("steps=-1")[1] == []


MODEL = "base_emb_dim: 64\nbase_num_decoder_layers: 2\n"


def test_a_model_is_a_file_too(tmp_path):
    path = tmp_path / "my.yml"
    path.write_text(MODEL + "decoder_block: llama2\n")
    cfg, (note,) = load(f"model_name={path}")
    assert (cfg.base_emb_dim, cfg.base_num_decoder_layers) == (64, 2)
    assert "decoder_block" in note
    assert "differs from base_emb_dim=64" in refusal(f"model_name={path}", "base_emb_dim=32")
    changed = load(f"model_name={path}", "base_emb_dim=32", "override_model_config=true")[0]
    assert changed.base_emb_dim == 32


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is no file here. Give a path"),
        ("steps: 5\n", "sets steps=5, but a model file sets keys of the group model alone"),
        ("base_emb_dims: 5\n", "base_emb_dims=5"),
        ("just text\n", "holds no keys"),
        ("interleave_moe_layer_step: 2\n", "after first_num_dense_layers"),
    ],
)
def test_a_file_that_is_no_model_is_refused(tmp_path, content, words):
    path = tmp_path / "my.yml"
    if content is not None:
        path.write_text(content)
    line = refusal(f"model_name={path}")
    assert words in line
