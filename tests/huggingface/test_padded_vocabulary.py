"""A padded vocabulary is the same model: before training, after it, and in an export."""

import json

import jax
import numpy as np
import pytest
import small_models as small
from data.tokenizers_on_disk import byte_level_bpe
from models.tiny_model import mesh_of
from run import run_program
from safetensors.numpy import load_file
from tiers import full

from maxdiloco import train as train_program
from maxdiloco.checkpoint import read
from maxdiloco.config import config
from maxdiloco.run import stored

# A training that reads each of 31 tokens; what it is given shapes no number of the model's.
TRAIN = {
    "hardware": "cpu", "dcn_diloco_parallelism": 2, "num_slices": 2, "ici_fsdp_parallelism": 1,
    "dataset_type": "synthetic", "max_target_length": 16, "per_device_batch_size": 2, "steps": 4,
    "diloco_sync_period": 2, "log_period": 2, "eval_interval": 4, "eval_steps": 2,
    "learning_rate": 1e-2, "adam_weight_decay": 0.1, "remat_policy": "none",
    "enable_tensorboard": "false", "async_checkpointing": "false",
}  # fmt: skip


def sizes(folder):
    keys = read.newest_meta(folder, key="RUN")["config"]
    return keys["vocab_size"], keys["padded_vocab_size"]


def loss_of(folder):
    """The loss of a text of all 31 tokens with the parameters of an import."""
    found = stored.load(
        read.locate(str(folder), base_output_directory=""),
        lambda meta: (config.from_dict(meta["config"]), mesh_of(jax.devices())),
    )
    tokens = np.arange(31, dtype=np.int32)[None]
    batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens)}
    return float(jax.jit(found.model.loss)(found.params, batch)[0])


TIED = {"model_type": "gemma", "tie_word_embeddings": True}


@pytest.mark.parametrize("changes", [full({}), TIED])
def test_a_padded_import_has_the_loss_of_the_model(tmp_path, changes):
    """31 tokens in 1,000 rows; logits of zeros had most of the probability. float32: 1e-6."""
    values = small.weights()
    if changes:
        del values["lm_head.weight"]
    source = small.save(tmp_path / "source", values, **changes)
    losses = []
    for name, multiple in (("plain", 1), ("padded", 1000)):
        small.done("import", source, tmp_path / name, f"vocab_multiple={multiple}")
        losses.append(loss_of(tmp_path / name))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.full
def test_training_with_padding_is_training_without(source, tmp_path):
    """Losses and evaluations of 4 steps, 2 rounds, with 31 of 64 rows; an export has the 31 alone.

    float32: XLA sums 64 columns in another order than 31, and Adam divides by small moments.
    """
    rows, values = {}, {}
    for multiple, padded in ((1, -1), (64, 64)):
        ours, run, out = (tmp_path / f"{name}-{multiple}" for name in ("ours", "run", "out"))
        small.done("import", source, ours, f"vocab_multiple={multiple}")
        keys = TRAIN | {"base_output_directory": tmp_path, "run_name": run.name}
        pairs = [f"{key}={value}" for key, value in keys.items()]
        assert run_program(train_program.main, ours / "start.yml", *pairs).code == 0
        assert sizes(run) == (31, padded)
        lines = (run / "metrics.jsonl").read_text().splitlines()
        rows[multiple] = [json.loads(line) for line in lines]
        small.done("export", run, out)
        assert json.loads((out / "config.json").read_text())["vocab_size"] == 31
        values[multiple] = load_file(out / "model.safetensors")
    for padded, plain in zip(rows[64], rows[1], strict=True):
        losses = [name for name in plain if name.endswith("loss")]
        assert len(losses) > 1 and padded["step"] == plain["step"]
        for name in losses:
            assert padded[name] == pytest.approx(plain[name], rel=1e-5), name
    before = small.weights()
    for name, plain in values[1].items():
        assert plain.shape == before[name].shape and (plain != before[name]).any()
        np.testing.assert_allclose(values[64][name], plain, atol=1e-4)


def test_the_rows_of_a_larger_tokenizer_are_exported(source, tmp_path):
    """A tokenizer of 300 tokens, a model of 31: 300 of 384 rows count, and an export has them."""
    byte_level_bpe(source, vocab_size=300)
    small.there_and_back(source, tmp_path, "vocab_multiple=128")
    assert sizes(tmp_path / "ours") == (300, 384)
    assert json.loads((tmp_path / "theirs/config.json").read_text())["vocab_size"] == 300
    rows = load_file(tmp_path / "theirs/model.safetensors")["model.embed_tokens.weight"]
    assert rows.shape == (300, 8) and not rows[31:].any()
