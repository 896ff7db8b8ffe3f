"""How evenly experts are used in each replica, before and after an exchange.

    PYTHONPATH=. python benchmarks/moe_balance.py [key=value ...]

It trains a small mixture of experts under DiLoCo on the text of scripts/quickstart.sh, three times:
without a balance, with a loss for it, with routed_bias. Keys are those of maxdiloco.train.
"""
# R replicas  l layers  E experts

import sys
import tempfile
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from maxdiloco.command_line import guarded
from maxdiloco.data import pipeline
from maxdiloco.data.mixture import TrainingData
from maxdiloco.evaluation import run_texts, run_tokenizer
from maxdiloco.flags import config
from maxdiloco.flags.config import Config
from maxdiloco.models.router import COUNTS
from maxdiloco.parallel import feeding
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.storage.run_folder import locate
from maxdiloco.trainer import assemble
from maxdiloco.trainer.assemble import Parts

MODEL = (
    "num_experts=8 num_experts_per_tok=2 base_emb_dim=64 base_mlp_dim=64 "
    "base_num_decoder_layers=2 base_num_query_heads=2 base_num_kv_heads=2"
).split()
RUN = (
    "hardware=cpu dcn_diloco_parallelism=1 ici_fsdp_parallelism=1 num_diloco_replicas=2 "
    "diloco_sync_period=50 steps=200 per_device_batch_size=4 max_target_length=256 "
    "learning_rate=3e-3"
).split()
BALANCES = {
    "none": ("router={normalise_weights: true}",),
    "load_balance_loss_weight=0.01": (
        "router={normalise_weights: true}", "load_balance_loss_weight=0.01"
    ),
    "routed_bias, rate 0.01": (
        "router={normalise_weights: true, balance_bias: true}", "routed_bias_update_rate=0.01"
    ),
}  # fmt: skip


@guarded
def main(argv: Sequence[str]) -> int:
    """Run all and print the table; returns the exit code."""
    print("| balance | step | loss | replica 0 | replica 1 | apart | after the exchange |")
    print("|---|--:|--:|--:|--:|--:|--:|", flush=True)
    for label, keys in BALANCES.items():
        cfg = config.load([*MODEL, *RUN, *keys, *argv], {})
        for t, loss, before_RlE, after_RlE in rounds(cfg):
            cells = [spread(counts_lE) for counts_lE in before_RlE]
            apart = f"{distance(*before_RlE[:2]):.3f}"
            row = [label, str(t), f"{loss:.3f}", *cells[:2], apart, spread(after_RlE[0])]
            print(f"| {' | '.join(row)} |", flush=True)
    return 0


def rounds(cfg: Config) -> Iterator[tuple[int, float, np.ndarray, np.ndarray]]:
    """(step, loss, counts [R, l, E] a step before its exchange, and after it) of every round."""
    mesh_lib.choose_platform(cfg)
    mesh_lib.emulate_devices(cfg, num_processes=1)
    mesh = mesh_lib.build(cfg)
    shape = assemble.batch_shape(cfg, mesh)
    with tempfile.TemporaryDirectory() as folder:
        tokens, place = run_tokenizer.open_tokenizer(cfg), locate(folder, "balance")
        text = run_texts.open_data(cfg, tokens, shape, place, lambda line: None)[0]
    parts = assemble.assemble(cfg, mesh, total_steps=cfg.steps, on_compile=lambda *_: None)
    state, H = parts.init(np.uint32(cfg.init_weights_seed)), cfg.diloco_sync_period
    *batches, unseen = read(parts, text, cfg.steps + 1)
    count = jax.jit(lambda params, batch: parts.model.loss(params, batch)[1][COUNTS])
    probe = {name: x.reshape(-1, x.shape[-1]) for name, x in unseen.items()}

    def used(state):
        """By the same tokens, which no replica has trained on."""
        replicas = range(shape.num_replicas)
        of = [jax.tree.map(lambda x_R, m=m: x_R[m], state.params) for m in replicas]
        return np.stack([jax.device_get(count(params, probe)) for params in of])

    for t, batch in enumerate(batches, start=1):
        state, metrics = parts.trainer.step(state, assemble.with_learning_rate(parts, batch, t))
        if t % H == H - 1:
            before_RlE = used(state)
        if t % H == 0:
            yield t, float(np.mean(metrics["loss"])), before_RlE, used(state)


def read(parts: Parts, text: TrainingData, steps: int) -> list[dict[str, jax.Array]]:
    """The first batches of the text."""
    shape, sharding = tuple(parts.shape), parts.batch["tokens"].sharding
    rows = feeding.local_rows(sharding, shape)
    position = text.first_position(parts.shape.num_replicas, parts.shape.sequences)
    with pipeline.batches(
        text, position, steps=range(1, steps + 1), replicas=rows[0], rows=rows[1]
    ) as local:
        return list(feeding.feed(local, rows, sharding, shape))


def spread(counts_lE: np.ndarray) -> str:
    """Tokens of the fullest and of the emptiest expert over the mean of all, mean over layers."""
    share_lE = counts_lE / counts_lE.mean(axis=1, keepdims=True)
    return f"{share_lE.max(axis=1).mean():.2f} / {share_lE.min(axis=1).mean():.2f}"


def distance(a_lE: np.ndarray, b_lE: np.ndarray) -> float:
    """Part of the choices that would have to go elsewhere to make two uses equal."""
    a, b = (x / x.sum(axis=1, keepdims=True) for x in (a_lE, b_lE))
    return float(np.abs(a - b).sum(axis=1).mean() / 2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
