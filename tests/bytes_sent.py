"""What the exchange of a chunk moves in compiled CPU programs, for test_bytes_sent.py.

Run as a program, since four slices of four devices are more than the tests' process has. Prints a
JSON object for each case: what the HLO says, and what the library class says.
"""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco import DiLoCo
from maxdiloco.diloco import quantize
from maxdiloco.planning.hlo import notation

IN_SLICE = 4
LAYERS, ROWS, COLUMNS = 4, 128, 1536  # of the leaf `w`; `b` has 37 values, which nothing divides
WORDS = {"f32": 4, "u16": 2, "s8": 1, "u8": 1}


def step(params, opt_state, batch):
    return jax.tree.map(lambda p: p + batch, params), opt_state, {}


def bound(M, axis, wire):
    """Two fragments of two layers of `w` and one of `b`, each in a window of two steps."""
    mesh = Mesh(np.array(jax.devices()[: M * IN_SLICE]).reshape(M, -1), ("diloco", axis))
    rule = dict(sync_period=6, num_fragments=3, layer_axis={"b": None, "w": 0}, overlap_steps=2)
    algorithm = DiLoCo(step, num_replicas=M, mesh=mesh, exchange_dtype=wire, **rule)
    over = {"fsdp": P(None, "fsdp"), "data": P()}[axis]  # data: every device of a slice has all

    def struct(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    algorithm.bind({"b": struct((37,), P()), "w": struct((LAYERS, ROWS, COLUMNS), over)}, ())
    return algorithm, struct((M,), P("diloco"))


def collectives(text):
    """(kind, dtype, elements, replica groups) of each collective of an HLO text."""
    found = []
    for line in text.splitlines():
        for kind in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
            if f" {kind}(" in line:
                dtype, dims = line.split(" = ")[1].split("[", 1)
                elements = math.prod(int(n) for n in dims.split("]")[0].split(","))
                found.append((kind, dtype, elements, notation.groups_of(line)))
    return found


def measured(M, axis, wire):
    """One case as a dict."""
    algorithm, batch = bound(M, axis, wire)
    layout = algorithm.layout
    state = layout.state
    (chunk,), (replaced,) = state.outgoing.read(0, [0]), state.incoming.read(0, [0])
    program = algorithm.programs.inner_exchange
    compiled = program.compile(state.params, (), batch, chunk, replaced)
    found = collectives(compiled.as_text())
    # Every device ends with the chunks of all M; of its own one it has sent M - 1 copies.
    sent = sum(IN_SLICE * n // M * (M - 1) * WORDS[dtype] for _, dtype, n, _ in found)
    return {
        "M": M,
        "axis": axis,
        "wire": wire,
        "kinds": sorted({kind for kind, *_ in found}),
        "groups": sorted({groups for *_, groups in found}),
        "of_slice": sent,
        "bytes_sent": [algorithm.bytes_sent(t) for t in range(7, 13)],
    }


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4 * IN_SLICE)
    jax.config.update("jax_disable_most_optimizations", True)
    for case in itertools.product((2, 4), ("data", "fsdp"), quantize.NAMES):
        print(json.dumps(measured(*case)))
