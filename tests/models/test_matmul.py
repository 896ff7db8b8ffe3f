"""Products of bfloat16 factors on a CPU: the same values, with float32 factors where faster."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import full

from maxdiloco.models.kernels import matmul
from maxdiloco.models.kernels.choice import Kernels
from maxdiloco.models.kernels.matmul import Products
from maxdiloco.models.mlp import activate
from maxdiloco.parallel import processor
from maxdiloco.parallel.replicas import map_fn
from maxdiloco.parallel.sharding import DEFAULT_RULES
from maxdiloco.parallel.sharding import spec as spec_of

EQUATIONS = {  # shapes of the factors, and the names of the weight's dims
    "bld,df->blf": ((2, 8, 16), (16, 24), ("embed", "mlp")),
    "bld,dnh->blnh": ((2, 8, 16), (16, 2, 4), ("embed", "heads", "head_dim")),
    "blnh,nhd->bld": ((2, 8, 2, 4), (2, 4, 16), ("heads", "head_dim", "embed")),
    "blf,fd->bld": ((2, 8, 24), (24, 16), ("mlp", "embed")),  # larger than the product
}


def product(equation, x, w, **options):
    """The product of the equation, whose last letters of x are the first of w."""
    _, w_in, _ = re.split(",|->", equation)
    num_summed = sum(letter not in equation.split("->")[1] for letter in w_in)
    dims = tuple(range(x.ndim - num_summed, x.ndim)), tuple(range(num_summed))
    names = EQUATIONS[equation][2]
    dot_general = matmul.dot_general(Products(**options), names, DEFAULT_RULES, x.dtype)
    return dot_general(x, w, (dims, ((), ())))


def factors(equation):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in EQUATIONS[equation][:2]]


def value_and_gradients(equation, wide, x, w, **options):
    def of_factors(x, w):
        return product(equation, x, w, float32_results=wide, **options)

    out, back = jax.vjp(of_factors, x, w)
    whole = (jnp.arange(out.size) % 7 - 3).astype(out.dtype)  # the same in both types
    return out, *back(whole.reshape(out.shape))


@pytest.mark.parametrize("float32_operands", [False, full(True)])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_value_and_gradients_are_float32_sums_rounded_once(equation, float32_operands):
    """Against einsum of the factors in float32; half a unit in the last of 8 bits."""
    x, w = factors(equation)
    exact = value_and_gradients(equation, False, x.astype(jnp.float32), w.astype(jnp.float32))
    found = value_and_gradients(equation, True, x, w, float32_operands=float32_operands)
    for one, wanted, like in zip(found, exact, (None, x, w), strict=True):
        assert one.dtype == jnp.bfloat16
        assert like is None or one.shape == like.shape
        np.testing.assert_allclose(one.astype(jnp.float32), wanted, rtol=2**-8, atol=1e-5)


def dots_of_float32(wide, **choices):
    """Products in the compiled program that take float32 factors, and the number of all."""
    x, w = factors("bld,df->blf")
    step = jax.jit(lambda x, w: value_and_gradients("bld,df->blf", wide, x, w, **choices))
    text = step.lower(x, w).compile().as_text()
    shapes = dict(re.findall(r"%?([\w.-]+) = (\w+)\[", text))
    dots = re.findall(r" dot\(%?([\w.-]+), %?([\w.-]+)\)", text)
    assert dots
    return sum("f32" in {shapes[name] for name in pair} for pair in dots), len(dots)


def test_no_factor_becomes_float32_or_every_one_where_that_is_faster(devices):
    """Positive control: einsum alone has such products on a CPU, to jax 0.10."""
    assert dots_of_float32(wide=True) == (0, 3)
    assert dots_of_float32(wide=True, float32_operands=True) == (3, 3)
    assert (dots_of_float32(wide=False)[0] > 0) == (jax.__version_info__ < (0, 11))


def test_the_smaller_factor_of_a_weight_s_gradient_is_the_left_one():
    """Of the one sum over batch and length: XLA:CPU turns the left factor. Control: einsum's own
    gradients have a larger one there."""
    factor = r"tensor<(\S+)xbf16>"
    over_tokens = rf"contracting_dims = \[0, 1\] x \[0, 1\].* : \({factor}, {factor}\)"
    smaller_left = {True: [], False: []}
    for equation in EQUATIONS:
        for wide, found in smaller_left.items():
            step = jax.jit(functools.partial(value_and_gradients, equation, wide))
            [shapes] = re.findall(over_tokens, step.lower(*factors(equation)).as_text())
            left, right = (math.prod(map(int, shape.split("x"))) for shape in shapes)
            found.append(left <= right)
    assert all(smaller_left[True]) and not all(smaller_left[False])


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("vendor_id\t: GenuineIntel\nflags\t\t: fma avx512_bf16 amx_bf16\n", False),
        ("vendor_id\t: GenuineIntel\nflags\t\t: fma avx512_bf16\n", True),
        ("vendor_id\t: AuthenticAMD\nflags\t\t: fma avx512_bf16\n", False),
        ("vendor_id\t: AuthenticAMD\nflags\t\t: fma avx2\n", True),
        ("Features\t: fp asimd bf16\n", False),
        ("", False),
    ],
)
def test_the_processor_says_whether_float32_is_faster(cpuinfo, expected, monkeypatch, tmp_path):
    """And the model's choice follows it, on a CPU with bfloat16 alone."""
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    if cpuinfo:
        processor.CPUINFO.write_text(cpuinfo)
    for backend, dtype in (("cpu", "bfloat16"), ("cpu", "float32"), ("tpu", "bfloat16")):
        on_cpu = (backend, dtype) == ("cpu", "bfloat16")
        found = tiny_model.build(backend=backend, dtype=dtype).kernels
        assert found.products.float32_results is on_cpu
        assert found.products.float32_operands is (on_cpu and expected)
        assert found.head_chunk == (256 if on_cpu and not expected else 1024)


@pytest.mark.parametrize("limit", [0.0, 1.5])
@pytest.mark.parametrize("activations", [("silu", "linear"), ("gelu",), ("quick_gelu", "plus_one")])
def test_hidden_values_and_gradients_are_rounded_once(activations, limit):
    """Of an MLP, against float32. Control: bfloat16 rounded after every operation."""
    rng = np.random.default_rng(0)
    inputs = [jnp.asarray(2 * rng.normal(size=(8, 64)), jnp.bfloat16) for _ in activations]

    def value_and_gradients(wide, *inputs):
        kernels = Kernels(products=Products(float32_results=wide))
        fn = kernels.elementwise(functools.partial(activate, activations, limit))
        value, pull = jax.vjp(fn, *inputs)
        return value, *pull(jnp.ones_like(value))

    exact = value_and_gradients(False, *(x.astype(jnp.float32) for x in inputs))
    exact = [x.astype(jnp.bfloat16) for x in exact]
    found, rounded = (value_and_gradients(wide, *inputs) for wide in (True, False))
    assert {x.dtype for x in found} == {jnp.dtype(jnp.bfloat16)}
    assert all(map(np.array_equal, found, exact))
    assert not all(map(np.array_equal, rounded, exact))


@pytest.mark.parametrize("equation", EQUATIONS)
def test_scattered_gradients_are_sums_that_each_device_gets_its_part_of(equation, devices):
    """Two replicas of four devices each: sequences over data, fsdp; heads and mlp over tensor."""
    mesh = tiny_model.mesh_of(devices, diloco=2, fsdp=2, tensor=2)
    M, names = 2, EQUATIONS[equation][2]
    x_R, w_R = (
        np.stack([np.asarray(factor, np.float32) * (m + 1) for m in range(M)])
        for factor in factors(equation)
    )
    of_w = P("diloco", *spec_of(names, DEFAULT_RULES, without=["diloco"]))
    w_R = jax.device_put(w_R, NamedSharding(mesh, of_w))

    def gradients(scattered):
        def total(x, w):
            out = product(equation, x, w, scattered_gradients=scattered)
            return jnp.sum(jnp.sin(out))

        return tiny_model.compiled(map_fn(jax.grad(total, argnums=(0, 1)), mesh=mesh))

    scattered = gradients(True)
    tiny_model.assert_close(scattered(x_R, w_R), gradients(False)(x_R, w_R), rtol=1e-5, atol=1e-5)
    assert " reduce-scatter(" in scattered.lower(x_R, w_R).compile().as_text()
    assert " reduce-scatter(" not in gradients(False).lower(x_R, w_R).compile().as_text()
