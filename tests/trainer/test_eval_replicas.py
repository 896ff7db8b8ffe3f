"""The losses of the replicas and of their mean beside that of theta."""

import json

import jax
import numpy as np
import pytest

from maxdiloco import train
from maxdiloco.data import pipeline
from maxdiloco.flags import config
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.trainer import assemble

pytestmark = pytest.mark.usefixtures("few_compiler_passes")

SIZES = (
    "hardware=cpu vocab_size=32 base_emb_dim=8 base_num_decoder_layers=1 base_mlp_dim=8 head_dim=4 "
    "base_num_query_heads=2 base_num_kv_heads=1 max_target_length=8 remat_policy=none "
    "dataset_type=synthetic learning_rate=0.05 enable_tensorboard=false enable_checkpointing=false "
    "diloco_sync_period=3 steps=4 log_period=4 eval_interval=3 eval_steps=2 "
    "per_device_batch_size=2 eval_replicas=mean"
).split()


def rows_of(tmp_path, *keys):
    argv = [*SIZES, f"base_output_directory={tmp_path}", "run_name=a", *keys]
    assert train.main(argv) == 0
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "eval/loss" in row]


def test_replicas_are_theta_at_a_synchronisation_and_differ_a_step_later(tmp_path):
    """H=3, tau=0: after step 3 all have theta; after step 4 each has taken a step of its own."""
    at_3, at_4 = rows_of(tmp_path, "dcn_diloco_parallelism=2", "ici_fsdp_parallelism=2")
    names = ["eval/loss_replica_0", "eval/loss_replica_1", "eval/loss_mean_of_replicas"]
    assert [at_3[name] for name in names] == pytest.approx([at_3["eval/loss"]] * 3, rel=1e-5)
    assert len({at_4[name] for name in ["eval/loss", *names]}) == 4


def test_the_loss_of_a_replica_is_that_of_its_parameters_alone():
    """Each replica's parameters in the evaluation of theta give the same loss."""
    cfg = config.load([*SIZES, "num_diloco_replicas=2"], {})
    mesh = mesh_lib.build(cfg)
    parts = assemble.assemble(cfg, mesh, total_steps=4, on_compile=lambda *_: None)
    params = [parts.model.init(jax.random.key(seed)) for seed in (1, 2)]
    state = assemble.initial_state(parts, 0)
    state = type(state)(**vars(state) | {"params": jax.tree.map(lambda *x: np.stack(x), *params)})
    dataset = pipeline.open_dataset(cfg, split="eval")
    row = parts.of_replicas(state, dataset)
    for m, each in enumerate(params):
        alone = parts.evaluation(each, dataset).loss
        assert row[f"eval/loss_replica_{m}"] == pytest.approx(alone, rel=1e-5)
    mean = jax.tree.map(lambda *x: (x[0] + x[1]) / 2, *params)
    alone = parts.evaluation(mean, dataset).loss
    assert row["eval/loss_mean_of_replicas"] == pytest.approx(alone, rel=1e-5)


def test_data_parallelism_has_no_replicas_to_evaluate(tmp_path):
    row, _ = rows_of(tmp_path, "enable_diloco=false")
    assert not [name for name in row if name.startswith("eval/loss_")]
