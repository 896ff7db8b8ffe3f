"""One of two processes that are one island of the tiny problem, over two devices.

usage: island_process.py FOLDER [MODE ...]

A MODE is a store FOLDER/MODE; what the island has in the end is in FOLDER/MODE.PROCESS.npz.
"""

import functools
import os
import pathlib
import sys

import jax
import numpy as np
import tiny_problem
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_on_islands import ELASTIC, STEPS, an_island

from maxdiloco.checkpoint.saved_state import layout_of
from maxdiloco.command_line import guarded
from maxdiloco.processes import distributed

SAVED = 9  # while a message is on its way
# Parts of `bias` are on both devices alike, and halves of `kernel` on each.
LIES = {"bias": P(), "kernel": P(None, "fsdp")}
OVERLAPPED = ELASTIC._replace(wire="float4_e3m0", overlap_steps=2, alpha=0.25)
RUNS = {
    "fixed": OVERLAPPED._replace(islands=("0", "1"), islands_min=2, block_tokens=0),
    "elastic": OVERLAPPED._replace(tokens=400, islands_min=2),  # so none runs ahead
}
OPTIONS = {"fixed": dict(num_fragments=2, feedback=True), "elastic": dict(feedback=True)}


def over_two_devices(folder, mode, **options):
    """Island 0 of a mode."""
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("diloco", "fsdp"))
    return an_island(folder / mode, "0", RUNS[mode], mesh=mesh, **OPTIONS[mode] | options)


def trained(trainer, mode, again=None):
    """{what: values} of the island in the end, and what it read and at which rate, by step.

    again: makes the trainer that goes on from a checkpoint of step SAVED.
    """
    problem = tiny_problem.problem("layers", steps=2000)

    def placed(leaves, specs):
        where = {name: NamedSharding(trainer.mesh, spec) for name, spec in specs.items()}
        return {
            name: jax.make_array_from_callback(x.shape, where[name], x.__getitem__)
            for name, x in leaves.items()
        }

    params = problem.named(problem.params)
    start = placed(params, LIES), placed(jax.tree.map(np.zeros_like, params), LIES)
    state = trainer.join(trainer.init(*start))
    found = dict(places=[], rates=[])
    while state.t < STEPS if mode == "fixed" else not trainer.ended():
        if mode == "elastic":
            ranges = trainer._ranges(state.t + 1)
            found["places"] += [first + i for first, count in ranges for i in range(count)]
        found["rates"] += [trainer.learning_rate(float, state.t + 1)]
        rows = {name: x[:1] for name, x in problem.batch(state.t + 1, 1).items()}
        state, _ = trainer.step(state, placed(rows, dict.fromkeys(rows, P("diloco"))))
        if again is not None and state.t == SAVED:
            items, note = trainer.saved_items(state), trainer.note(state)
            trainer.leave()
            trainer = again()
            trainer.bind(*start)
            reading = trainer.reading(layout_of(note, same_rules=True))
            state = trainer.join(reading.state_of(items, t=SAVED))
    trees = dict(theta=state.outer, params=state.params, opt=(state.opt_state, state.outer_opt))
    for name, tree in trees.items():
        whole = multihost_utils.process_allgather(tree, tiled=True)
        found |= {f"{name}{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(whole))}
    trainer.close()
    return found


@guarded
def main(argv):
    """0 once it has trained in each mode."""
    folder, *modes = argv
    jax.config.update("jax_num_cpu_devices", 1)
    with distributed.processes(os.environ, timeout_s=200, peer_timeout_s=100) as room:
        room.open_bulk(1 << 20)
        for mode in modes:
            own = pathlib.Path(folder), mode
            make = functools.partial(over_two_devices, *own, mailbox=room.mailbox)
            found = trained(make(), mode, again=make if mode == "fixed" else None)
            np.savez(f"{folder}/{mode}.{jax.process_index()}.npz", **found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
