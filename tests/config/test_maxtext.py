"""MaxText's command lines: what is accepted and what is ignored.

docs/howto/migrate-from-maxtext.md has the same for users.

test_refused_keys.py has the values that are refused.
"""

import pathlib
import re

import pytest
from run import names_key

from maxdiloco.config import config, files, maxtext
from maxdiloco.config.files import RawValue
from maxdiloco.config.keys import KEYS
from maxdiloco.config.values import show
from maxdiloco.errors import ConfigError

MAXTEXT = maxtext.read()

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


def accepted(names):
    """Return the accepted keys of these, each with the value `x`, and the notes."""
    notes = []
    return MAXTEXT.accept(dict.fromkeys(names, RawValue("x", "")), notes.append), notes


def replaced(argv, **changes):
    """A command line with other values; None leaves the key out."""
    given = dict(one.split("=", 1) for one in argv) | changes
    return [f"{key}={value}" for key, value in given.items() if value is not None]


def test_the_base_yml_of_maxtext_is_refused_with_ours(refusal, tmp_path):
    """Its commands name MaxText/configs/base.yml first, mostly from a checkout that is not here."""
    line = refusal("MaxText/configs/base.yml", "model_name=llama2-7b")
    assert names_key(line, "configs/base.yml")
    assert "configs/base.yml" not in refusal("MaxText/configs/other.yml")
    foreign = ["decoder_block: llama2", "scan_layers: true", "quantization: ''", "enable_nnx: true"]
    foreign += [f"sa_block_{i}: 512" for i in range(20)]
    path = tmp_path / "base.yml"
    path.write_text("\n".join(["steps: 150_001", "base_emb_dim: 2048", *foreign]))
    line = refusal(str(path))
    assert str(path) in line and names_key(line, "configs/base.yml")


def test_only_the_edits_of_a_copy_of_base_yml_count(refusal, tmp_path):
    """The installed package's and a checkout's are two files. If all sizes of a copy counted, the
    remedy override_model_config=true would make a llama2-7b of a million parameters."""
    path = tmp_path / "base.yml"
    text = (files.config_folder() / "base.yml").read_text(encoding="utf-8")
    path.write_text(text)
    cfg, _ = load(str(path), "model_name=llama2-7b")
    assert cfg == load("model_name=llama2-7b")[0] and cfg.base_emb_dim == 4096
    text = text.replace("\nsteps: 1000", "\nsteps: 7").replace("_dim: 128", "_dim: 256", 1)
    path.write_text(text)
    assert load(str(path))[0] == load("steps=7", "base_emb_dim=256")[0]
    assert "base_emb_dim=256" in refusal(str(path), "model_name=llama2-7b")
    path.write_text("base_emb_dim: 128")  # somebody's own short file of that name
    assert "base_emb_dim=128" in refusal(str(path), "model_name=llama2-7b")


def test_the_streaming_diloco_script_of_maxtext_needs_another_data_set(refusal):
    """The data set of TFDS is refused, in one line; all other flags carry over."""
    line = refusal(*SCRIPT)
    for key in ("dataset_name", "eval_dataset_name", "dataset_path"):
        assert names_key(line, key)
    without = replaced(SCRIPT, dataset_name=None, eval_dataset_name=None)
    assert load(*without)[0].dataset_path == "gs://maxtext-dataset"
    cfg, notes = load(*replaced(without, dataset_path="/data/text"))
    assert (cfg.num_diloco_fragments, cfg.diloco_outer_lr, cfg.profiler) == (37, 0.1, "xplane")
    (note,) = notes
    dropped = ("save_config_to_gcs", "pure_nnx", "upload_all_profiler_results")
    assert all(names_key(note, key) for key in dropped), note


@pytest.mark.parametrize(
    "argument",
    [
        "use_vertex_tensorboard=false", "enable_goodput_recording=false", "scan_layers=true",
        "enable_single_controller=false", "log_config=false", "dump_hlo=false", "dump_jaxpr=",
        "reuse_example_batch=0", "grad_dtype=float32", "decoder_block=llama2", "dropout_rate=0.0",
        "sharding_tolerance=0.02", "num_epoch=1", "sa_block_q=1024", "ici_pipeline_parallelism=1",
        "weight_sparsity_n=null", "muon_consistent_rms=0.20", "trainable_parameters_mask=[]",
    ],
)  # fmt: skip
def test_a_key_that_does_nothing_is_dropped_with_one_note(argument):
    cfg, notes = load(argument, "steps=7")
    assert cfg.steps == 7
    (note,) = notes
    assert argument.partition("=")[0] in note
    assert config.load([], {f"M_{argument.partition('=')[0].upper()}": "0"[:0]}, warn=notes.append)
    assert len(notes) == 2
    assert load("steps=7", "learning_rate=1e-3")[1] == []


@pytest.mark.parametrize(
    ("key", "values"), [(key, value) for key, of in MAXTEXT.values.items() for value in of]
)
def test_a_value_of_maxtext_is_refused_with_the_value_to_use(refusal, key, values):
    """The value to use is one that the key admits."""
    use = MAXTEXT.values[key][values]
    for value in ["0.5"] if key == "per_device_batch_size" else values.split("|"):
        value = re.sub(r"\(\w+\)\?", "", value)
        line = refusal(f"{key}={value}")
        assert line.startswith(f"{key}={value} ") and use in line
    for name, own in re.findall(r"(\w+)=(\w+)", use):
        assert not KEYS[name].choices or own in KEYS[name].choices, use


def test_names_and_values_of_maxtext_are_not_keys_and_values_of_ours():
    """And the names that they become are. A pattern may match more than it was meant to."""
    for key, of in MAXTEXT.values.items():
        for value in of:
            assert not any(re.fullmatch(value, choice) for choice in KEYS[key].choices), value
    assert accepted(KEYS) == (dict.fromkeys(KEYS, RawValue("x", "")), [])
    others = MAXTEXT.other_names
    assert set(others.values()) <= set(KEYS) and not set(others) & set(KEYS)


def test_the_names_of_maxtext_set_the_keys_that_mean_the_same(tmp_path):
    """On the command line, in the environment and in a yml file; later layers win as ever."""
    cfg, _ = load("grain_train_files=/data/a", "grain_file_type=arrayrecord")
    assert (cfg.dataset_path, cfg.dataset_type) == ("/data/a", "arrayrecord")
    name = "cosine_learning_rate_final_fraction"
    assert load(f"{name}=0.2")[0].learning_rate_final_fraction == 0.2
    assert config.load([], {"M_HF_PATH": "/data/b"}).dataset_path == "/data/b"
    path = tmp_path / "a.yml"
    path.write_text("hf_train_files: /data/c\n")
    cfg, _ = load(str(path))
    assert cfg.dataset_path == "/data/c"
    assert load(str(path), "dataset_path=/data/d")[0].dataset_path == "/data/d"


def test_a_model_name_may_be_a_file_of_model_keys(refusal, tmp_path):
    path = tmp_path / "my.yml"
    for content, key in (
        (None, "model_name"),
        ("steps: 5\n", "steps"),
        ("base_emb_dims: 5\n", "base_emb_dims"),
        ("just text\n", path.name),
        ("interleave_moe_layer_step: 2\n", "first_num_dense_layers"),
    ):
        if content is not None:
            path.write_text(content)
        assert names_key(refusal(f"model_name={path}"), key)
    path.write_text("base_emb_dim: 64\nbase_num_decoder_layers: 2\ndecoder_block: llama2\n")
    cfg, (note,) = load(f"model_name={path}")
    assert (cfg.base_emb_dim, cfg.base_num_decoder_layers) == (64, 2)
    assert names_key(note, "decoder_block")
    assert names_key(refusal(f"model_name={path}", "base_emb_dim=32"), "override_model_config")
    changed = load(f"model_name={path}", "base_emb_dim=32", "override_model_config=true")[0]
    assert changed.base_emb_dim == 32


ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT.joinpath("docs/howto/migrate-from-maxtext.md").read_text(encoding="utf-8")


def section(title):
    (found,) = re.findall(rf"(?ms)^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE)
    return found


def rows(title):
    """Cells of the table under a heading, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    assert len(lines) > 2, title
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(text):
    return re.findall(r"`(\w+)`", text)


def test_the_page_s_columns_of_defaults_are_those_of_base_yml():
    """A key is in one of the two tables. Positive control of the comparison: the columns of
    MaxText differ from ours in every row."""
    table = rows("The same with another default")
    ours = {names(key)[0]: here for key, _, here, _ in table}
    assert ours == {name: show(KEYS[name].default) or "empty" for name in ours}
    assert all(theirs != here for _, theirs, here, _ in table)
    assert {"learning_rate", "adam_b2", "diloco_sync_period", "diloco_outer_lr"} <= set(ours)
    same = names(section("The same, default included"))
    assert len(same) == len(set(same)) > 50
    assert set(same) <= set(KEYS) and not set(same) & set(ours)


def test_the_page_s_other_names_and_values_are_those_of_the_code():
    assert {names(old)[0]: names(new)[0] for old, new in rows("Other names")} == MAXTEXT.other_names
    listed = {}
    for values, use in rows("Other values"):
        for key, value in re.findall(r"`(\w+)=([\w.-]*)`", values):
            (entry,) = [e for v, e in MAXTEXT.values[key].items() if re.fullmatch(v, value)]
            listed.setdefault((key, entry), set()).add(value)
            named = re.findall(r"\w+=(\w+)", entry)
            assert all(own in use for own in named), (key, value)
    assert listed.keys() == {
        (key, use) for key, of in MAXTEXT.values.items() for use in of.values()
    }


def test_the_page_lists_the_keys_that_are_ignored_and_refused():
    """Ignored whatever the value; and every entry of the code is on the page."""
    ignored, refused = ([name for row in rows(title) for name in names(row[0])]
                        for title in ("Not needed", "Not here"))  # fmt: skip
    kept, notes = accepted(ignored)
    assert kept == {} and len(notes) == 1
    for name in refused:
        with pytest.raises(ConfigError, match=f"^{name}=x "):
            accepted([name])
    found = [MAXTEXT.find(name) for name in [*ignored, *refused]]
    assert [entry.names for entry in MAXTEXT.keys if entry not in found] == []
