"""Matrix products counted as often as they run; expected values by hand."""

import jax
import jax.numpy as jnp
import pytest
from hlo_excerpts import BESIDE_LOOP, changed

from maxdiloco.aot.hlo import flops, reader


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
    assert flops.matmul_flops(reader.read(text)) == expected


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
        # A true window of 3 over 5 places with padding: 2 + 3 + 3 + 3 + 2 = 13 pairs.
        ("f32[1,5,4]", "f32[1,5,2]", "f32[3,2,4]",
         "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
         13 * 2 * 2 * 4),
    ],
)  # fmt: skip
def test_a_convolution_of_a_tpu(out, lhs, kernel, attributes, expected):
    text = product(f"%c = {out} convolution(%a, %b), {attributes}", {"a": lhs, "b": kernel})
    assert flops.matmul_flops(reader.read(text)) == 8 * expected
    unknown = text.replace("dim_labels=", "dim_labels=?")
    with pytest.raises(ValueError, match="%c has dim_labels .*, which this reader cannot read"):
        flops.matmul_flops(reader.read(unknown))
