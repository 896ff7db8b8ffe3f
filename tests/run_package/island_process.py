"""One of two processes that are one island of the tiny problem, over two devices.

usage: island_process.py FOLDER [NAME ...]

A NAME of RUNS is a store FOLDER/NAME; what the island has in the end is in FOLDER/NAME.PROCESS.npz.
"""

import os
import pathlib
import sys

import jax
import numpy as np
import tiny_problem
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_island_trainer import FAST, LOCKSTEP, STEPS, an_island, decided

from maxdiloco.cluster import start
from maxdiloco.command_line import guarded

# Parts of `bias` are on both devices alike, and halves of `kernel` on each.
LIES = {"bias": P(), "kernel": P(None, "fsdp")}
OVERLAPPED = dict(
    exchange_dtype="float4_e3m0", overlap_steps=2, alpha=0.25, min_members=2, error_feedback=True
)
AGAIN = "again"  # two steps after a second start in the store of "lockstep"
# "free": until 400 tokens are committed, at the speed of each; min_members lets none run ahead.
# "shared": the same with a global batch of five sequences.
FREE, SHARED = dict(total_tokens=400), dict(global_batch_size=5, step_tokens=20, total_tokens=4000)
RUNS = {
    "lockstep": (OVERLAPPED, LOCKSTEP),
    "free": (OVERLAPPED | FREE, FAST),
    "shared": (OVERLAPPED | SHARED, FAST),
}


def island(folder, name, number, **options):
    """The trainer of island 0 or 1."""
    own, timing = RUNS[name]
    return an_island(folder / name, str(number), timing=timing, **own | options)


def over_two_devices(folder, name, **options):
    """Island 0."""
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("diloco", "fsdp"))
    return island(folder, name, 0, mesh=mesh, **options)


def problem():
    """The problem of both islands: either may be the one whose first values begin the run."""
    return tiny_problem.problem("layers", steps=2000)


def trained(trainer, name):
    """{what: values} of the island in the end; except of "lockstep" its places and rates."""
    own = problem()

    def placed(leaves, specs):
        where = {name: NamedSharding(trainer.mesh, spec) for name, spec in specs.items()}
        return {
            name: jax.make_array_from_callback(x.shape, where[name], x.__getitem__)
            for name, x in leaves.items()
        }

    params = own.named(own.params)
    start = placed(params, LIES), placed(jax.tree.map(np.zeros_like, params), LIES)
    trainer.bind(*start)
    state = trainer.rejoin(trainer.init_program(lambda *given: given)(*start))
    found = dict(places=[], rates=[], warmups=[])
    last = {"lockstep": STEPS, AGAIN: 2}.get(name)
    while state.t < last if last else not trainer.done:
        found["warmups"] += [trainer.warmup(state.t + 1)]
        if name in ("free", "shared"):
            for part in trainer.leased(state.t + 1):
                found["places"] += [64 * part.block + n for n in range(part.start, part.stop, 4)]
            found["rates"] += [trainer.progress * trainer.warmup(state.t + 1)]
        rows = {leaf: x[:1] for leaf, x in own.batch(state.t + 1, 1).items()}
        state, _ = trainer.step(state, placed(rows, dict.fromkeys(rows, P("diloco"))))
        if name == "lockstep":
            decided(trainer)
    trees = dict(theta=state.outer, params=state.params, opt=(state.opt_state, state.outer_opt))
    for tree_name, tree in trees.items():
        whole = multihost_utils.process_allgather(tree, tiled=True)
        found |= {f"{tree_name}{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(whole))}
    trainer.close()
    return found


@guarded
def main(argv):
    """0 once it has trained in each run."""
    folder, *names = argv
    jax.config.update("jax_num_cpu_devices", 1)
    with start.join_processes(os.environ, timeout_s=200, peer_timeout_s=100):
        for name in names:
            trainer = over_two_devices(pathlib.Path(folder), name)
            np.savez(f"{folder}/{name}.{jax.process_index()}.npz", **trained(trainer, name))
        # The log of a run in progress: the inner optimizer begins again.
        trainer = over_two_devices(pathlib.Path(folder), "lockstep")
        np.savez(f"{folder}/{AGAIN}.{jax.process_index()}.npz", **trained(trainer, AGAIN))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
