"""Traffic among the devices of one program, by axis, and its matrix products, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_excerpts import BESIDE_LOOP, changed
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.planning.hlo import kernels, reader, traffic

SIZES = {"data": 2, "fsdp": 4}


def found(text, sizes=SIZES):
    return traffic.collectives(reader.read(text), sizes)


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


RAGGED = """HloModule ragged, is_scheduled=true

ENTRY %main (x: bf16[64,128], buffer: bf16[80,128], a: s32[16]) -> bf16[80,128] {
  %x = bf16[64,128] parameter(0)
  %buffer = bf16[80,128] parameter(1)
  %a = s32[16] parameter(2)
  ROOT %r = bf16[80,128] ragged-all-to-all(%x, %buffer, %a, %a, %a, %a), replica_groups={GROUPS}
}
"""


def test_a_ragged_all_to_all_sends_the_rows_of_even_use():
    """64 rows of 256 bytes, of which a quarter stays on each of four devices; the same rows where
    they come back from the buffer of 80."""
    groups = "{0,1,2,3},{4,5,6,7}"
    there = RAGGED.replace("GROUPS", groups)
    back = there.replace("ragged-all-to-all(%x, %buffer", "ragged-all-to-all(%buffer, %x")
    for text in (there, back):
        (one,) = found(text)
        assert (one.kind, one.axes) == ("ragged-all-to-all", ("fsdp",))
        assert one.bytes_sent == 64 * 256 * 3 // 4


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
        ("", "", {"fsdp": 2}, "device 3"),
        (" all-gather(", " collective-broadcast(", {"fsdp": 4}, "%g .*collective-broadcast"),
    ],
)
def test_what_it_cannot_count(old, new, sizes, message):
    with pytest.raises(ValueError, match=message):
        found(fused(7).replace(old, new), sizes)


# -- matrix products, counted as often as they run -------------------------------------------------


def layers(x, w_LDD):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w_LDD)[0]


@pytest.mark.parametrize(
    ("fn", "shapes", "expected"),
    [
        (lambda x, w: x @ w, [(8, 16), (16, 32)], 2 * 8 * 16 * 32),
        (lambda x, w: jnp.einsum("bsd,bdh->bsh", x, w), [(3, 8, 16), (3, 16, 4)],
         3 * 2 * 8 * 16 * 4),
        (layers, [(8, 16), (5, 16, 16)], 5 * 2 * 8 * 16 * 16),  # XLA's own count has it once
        (lambda x: jnp.tanh(x).sum(), [(8, 16)], 0),
    ],
)  # fmt: skip
def test_products_have_two_flops_for_each_pair_at_every_trip(fn, shapes, expected):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(fn).lower(*args).compile().as_text()
    assert kernels.matmul_flops(reader.read(text)) == expected


def product(line, operands):
    """BESIDE_LOOP with a convolution in its loop of eight trips."""
    given = "".join(
        f"  %{name} = {shape} parameter({n})\n" for n, (name, shape) in enumerate(operands.items())
    )
    body = f"%extra (p: f32[]) -> f32[] {{\n{given}  ROOT {line}\n}}\n\n"
    text = changed(BESIDE_LOOP, "%body.1 (", body + "%body.1 (")
    return changed(text, "  %add.5 =", "  %k = f32[] call(%add.9), to_apply=%extra\n  %add.5 =")


@pytest.mark.parametrize(
    ("out", "lhs", "kernel", "attributes", "expected"),
    [
        ("f32[8,32]", "f32[8,16]", "f32[16,32]", "dim_labels=bf_io->bf", 2 * 8 * 16 * 32),
        # A batch of 3 as a spatial dim: each output position meets one position of the kernel.
        ("f32[3,8,4]", "f32[3,8,16]", "f32[3,16,4]",
         "window={size=3 stride=2 pad=0_0 lhs_dilate=3}, dim_labels=0bf_0io->0bf",
         3 * 2 * 8 * 16 * 4),
        # Summed over 5 places, and 5 places of the kernel in the result.
        ("f32[2,1,4]", "f32[2,5,3]", "f32[5,3,4]", "dim_labels=b0f_0io->b0f", 2 * 2 * 5 * 3 * 4),
        ("f32[2,5,4]", "f32[2,1,3]", "f32[5,3,4]", "dim_labels=b0f_0io->b0f", 2 * 2 * 5 * 3 * 4),
    ],
)  # fmt: skip
def test_a_convolution_of_a_tpu(out, lhs, kernel, attributes, expected):
    text = product(f"%c = {out} convolution(%a, %b), {attributes}", {"a": lhs, "b": kernel})
    assert kernels.matmul_flops(reader.read(text)) == 8 * expected
    unknown = text.replace("dim_labels=", "dim_labels=?")
    with pytest.raises(ValueError, match="%c .*dim_labels"):
        kernels.matmul_flops(reader.read(unknown))


def test_a_window_of_no_product_is_refused():
    line = "%c = f32[1,5,4] convolution(%a, %b), dim_labels=b0f_0io->b0f"
    text = product(line, {"a": "f32[1,5,2]", "b": "f32[3,2,4]"})
    with pytest.raises(ValueError, match="%c .*window"):
        kernels.matmul_flops(reader.read(text))
