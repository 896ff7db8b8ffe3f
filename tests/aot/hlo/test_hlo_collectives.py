"""Traffic among the devices of one program, by axis; bytes by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_excerpts import BESIDE_LOOP, changed
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.aot.hlo import collectives, reader

SIZES = {"data": 2, "fsdp": 4}


def found(text, sizes=SIZES):
    return collectives.collectives(reader.read(text), sizes)


def compiled(devices, fn):
    """fn of 8 float32 values on each device of a mesh of SIZES."""
    mesh = Mesh(np.array(devices).reshape(2, 4), tuple(SIZES))
    whole = P(("data", "fsdp"))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    x = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=NamedSharding(mesh, whole))
    return jax.jit(mapped).lower(x).compile().as_text()


@pytest.mark.parametrize(
    ("fn", "kind", "axes", "bytes_sent"),
    [
        # By a ring each device sends (n - 1) / n of its 32 bytes twice.
        (lambda x: jax.lax.psum(x, "data"), "all-reduce", ("data",), 32),
        (lambda x: jax.lax.psum(x, "fsdp"), "all-reduce", ("fsdp",), 48),
        (lambda x: jax.lax.psum(x, ("data", "fsdp")), "all-reduce", ("data", "fsdp"), 56),
        (lambda x: jax.lax.all_gather(x, "fsdp", tiled=True)[:8], "all-gather", ("fsdp",), 32 * 3),
        (lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]), "collective-permute", ("data",),
         32),
    ],
)  # fmt: skip
def test_a_collective_has_its_axes_and_bytes(devices, fn, kind, axes, bytes_sent):
    """Positive control: a program without one."""
    (one,) = found(compiled(devices, fn))
    assert (one.kind, one.dtype, one.axes, one.times) == (kind, "f32", axes, 1)
    assert one.bytes_sent == bytes_sent
    assert one.waits
    assert found(compiled(devices, lambda x: 2 * x)) == []


def test_a_collective_in_a_scan_counts_at_every_trip(devices):
    def step(x, _):
        return jnp.tanh(jax.lax.psum(x, "fsdp")), None

    text = compiled(devices, lambda x: jax.lax.scan(step, x, None, length=5)[0])
    assert [(one.kind, one.times) for one in found(text)] == [("all-reduce", 5)]


FUSED = """%gather.N (p: f32[8]) -> f32[32] {
  %p = f32[8] parameter(0)
  ROOT %g = f32[32] all-gather(%p), channel_id=CHANNEL, replica_groups={{0,1,2,3}}, dimensions={0}
}

"""


def fused(*channels):
    """BESIDE_LOOP with pieces of gathers in fusions of its loop of eight trips."""
    text, calls = BESIDE_LOOP, ""
    for n, channel in enumerate(channels):
        piece = FUSED.replace("gather.N", f"gather.{n}").replace("CHANNEL", str(channel))
        text = changed(text, "%body.1 (", piece + "%body.1 (")
        calls += f"  %piece.{n} = f32[32] fusion(%add.9), kind=kCustom, calls=%gather.{n}\n"
    return changed(text, "  %add.5 =", calls + "  %add.5 =")


def test_pieces_of_one_asynchronous_collective_count_once():
    """XLA:TPU spreads a gather over several fusions of one channel; another channel is another."""
    sizes = {"fsdp": 4}
    (one,) = found(fused(7, 7, 7), sizes)
    assert (one.times, one.bytes_sent, one.waits) == (8, 32 * 3, False)
    assert len(found(fused(7, 8), sizes)) == 2


@pytest.mark.parametrize(
    ("old", "new", "sizes", "message"),
    [
        ("", "", {"fsdp": 2}, "reaches device 3, but its mesh has 2 devices"),
        (" all-gather(", " collective-broadcast(", {"fsdp": 4},
         "%g is a collective-broadcast, whose bytes are not known"),
    ],
)  # fmt: skip
def test_what_it_cannot_count(old, new, sizes, message):
    with pytest.raises(ValueError, match=message):
        found(fused(7).replace(old, new), sizes)
