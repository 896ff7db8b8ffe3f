"""Products of the layers in 8 bits: near the float32 ones, in the layers alone, and refused where a
device has none."""

import collections
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_model
from tiers import full

from maxdiloco.config import config
from maxdiloco.errors import ConfigError
from maxdiloco.models.kernels import matmul, quantized
from maxdiloco.models.kernels.matmul import Products
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.parallel.replicas import map_fn
from maxdiloco.parallel.sharding import DEFAULT_RULES
from maxdiloco.run import inner_step
from maxdiloco.run import model as run_model
from maxdiloco.run import settings as run_settings

# Of the root mean square. int8: the largest of 64 normal values is about 2.5, so a step is
# 2.5 / 127 and its error 0.0057, in both factors 0.008; twice that where rows differ in size.
# float8_e4m3fn: three bits behind the first, 0.026 in each factor.
ERRORS = {"int8": (0.004, 0.02), "fp8": (0.02, 0.05)}
EQUATIONS = {  # shapes of the factors, and the names of the weight's dims
    "bld,df->blf": ((2, 32, 64), (64, 96), ("embed", "mlp")),
    "blnh,nhd->bld": ((2, 32, 4, 16), (4, 16, 64), ("heads", "head_dim", "embed")),
    "bls,snp->blnp": ((2, 32, 64), (64, 4, 24), ("lora", "heads", "head_dim")),
}
FORMATS = sorted(quantized.FORMATS)


def products(quantization, *, scattered=False):
    return Products(quantization=quantization, scattered_gradients=scattered)


def factors(equation, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in EQUATIONS[equation][:2]]


def value_and_gradients(equation, how, x, w):
    """The product, and its gradients for a cotangent whose rows and columns differ in size."""
    n = 2 if equation.startswith("blnh") else 1  # dims that are summed over
    dims = tuple(range(x.ndim - n, x.ndim)), tuple(range(n))
    dot_general = matmul.dot_general(how, EQUATIONS[equation][2], DEFAULT_RULES, x.dtype)
    out, pull = jax.vjp(lambda x, w: dot_general(x, w, (dims, ((), ()))), x, w)
    rng = np.random.default_rng(1)
    rows, columns = (np.exp(rng.normal(size=out.shape[i])) for i in (1, -1))
    d_out = rng.normal(size=out.shape) * columns
    d_out = np.moveaxis(np.moveaxis(d_out, 1, -1) * rows, -1, 1)
    return out, *pull(jnp.asarray(d_out, out.dtype))


def distance(found, wanted):
    """Of two arrays, over the size of the second."""
    return np.linalg.norm(np.float64(found) - wanted) / np.linalg.norm(np.float64(wanted))


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_value_and_gradients_are_near_those_of_float32_and_not_the_same(equation, quantization):
    """Beside the same with both factors in float32; a row of zeros has a scale too."""
    x, w = factors(equation)
    x[:, 3] = 0
    run = functools.partial(tiny_model.compiled, value_and_gradients, static_argnums=(0, 1))
    exact, found = (run()(equation, products(name), x, w) for name in ("none", quantization))
    least, most = ERRORS[quantization]
    for one, wanted in zip(found, exact, strict=True):
        assert one.dtype == wanted.dtype and one.shape == wanted.shape
        assert least < distance(one, wanted) < most


@pytest.mark.parametrize("sizes", [dict(diloco=2), dict(diloco=1)])
def test_every_replica_has_scales_of_its_own(sizes, devices):
    """Two replicas, on slots of their own and under a vmap, the second 2^20 times as large:
    with common scales the first would be zeros. Rows of nothing but zeros stay zeros."""
    equation = "bld,df->blf"
    x, w = factors(equation)
    x[:, 3] = 0
    mesh = tiny_model.mesh_of(devices, **sizes)

    def step(x, w):
        return value_and_gradients(equation, products("int8"), x, w)

    alone = tiny_model.compiled(step)(x, w)
    x_R, w_R = np.stack([x, 2**20 * x]), np.stack([w, w])
    both = tiny_model.compiled(map_fn(step, mesh=mesh))(x_R, w_R)
    tiny_model.assert_close([one[0] for one in both], list(alone), rtol=1e-6, atol=1e-6)
    assert distance(both[0][1], 2**20 * alone[0]) < 1e-6
    assert not np.any(alone[0][:, 3]) and np.all(np.isfinite(alone[1]))


@pytest.mark.parametrize("scattered", [True, full(False)])
def test_on_a_mesh_gradients_are_as_near(scattered, devices):
    """Sequences over data and fsdp, the hidden dim over tensor; where gradients are scattered every
    device rounds what it has."""
    equation = "bld,df->blf"
    x, w = factors(equation)
    mesh = tiny_model.mesh_of(devices, fsdp=2, tensor=2)

    def step(quantization, x, w):
        how = products(quantization, scattered=scattered and quantization != "none")
        return value_and_gradients(equation, how, x, w)

    found, exact = (
        tiny_model.compiled(map_fn(lambda x, w, q=q: step(q, x, w), mesh=mesh))(x[None], w[None])
        for q in ("int8", "none")
    )
    for one, wanted in zip(found, exact, strict=True):
        assert distance(one, wanted) < ERRORS["int8"][1]


def dots(quantization, **changes):
    """How many products the loss and its gradient have, by the types and shapes of both factors."""
    model = tiny_model.build(quantization=quantization, **changes)
    params = tiny_model.params_of(model)
    found = tiny_model.equations(
        jax.value_and_grad(model.loss, has_aux=True), params, tiny_model.batch()
    )
    return collections.Counter(
        tuple((v.aval.dtype.name, *v.aval.shape) for v in equation.invars)
        for equation in found
        if equation.primitive.name == "dot_general"
    )


def of_type(counted, name):
    return {pair: n for pair, n in counted.items() if {factor[0] for factor in pair} == {name}}


@pytest.mark.parametrize(
    ("changes", "products"),
    [
        ({}, 7),  # queries, keys, values, attention's result; gate, up, out
        (dict(mlp_activations=("gelu",)), 6),
        full(dict(remat_policy="full"), None),
    ],
)
def test_the_products_of_the_layers_are_8_bits_and_no_others(changes, products):
    """Forward and two gradients of each, in the loop over layers. What is left, attention and the
    head, is what a program without quantization has less those."""
    plain, found = dots("none", **changes), dots("int8", **changes)
    eight, rest = of_type(found, "int8"), of_type(found, "float32")
    assert not of_type(plain, "int8") and len(eight) + len(rest) == len(found)
    if products:
        assert sum(eight.values()) == 3 * products
        assert sum(plain.values()) - sum(rest.values()) == 3 * products
    assert sum(eight.values()) > sum(rest.values()) > 0
    assert not any(32 in factor[1:] for pair in eight for factor in pair), "the vocabulary"
    assert any(32 in factor[1:] for pair in rest for factor in pair)
    fp8 = of_type(dots("fp8", **changes), "float8_e4m3fn")
    assert sum(fp8.values()) == sum(eight.values())


@pytest.mark.parametrize("quantization", ["int8", full("fp8")])
def test_a_model_learns_its_packed_documents_and_keeps_float32_parameters(quantization):
    """20 steps of AdamW in one program, beside the same without quantization."""
    losses = {}
    for name in ("none", quantization):
        model = tiny_model.build(quantization=name, remat_policy="full")
        rule = optax.adamw(1e-2)
        step = inner_step.make(model, rule, accumulation=1, nan_policy="stop")
        batch = tiny_model.batch() | {"learning_rate": np.ones(1)}

        def train(params, step=step, rule=rule, batch=batch):
            def again(state, _):
                *state, metrics = step(*state, batch)
                return tuple(state), metrics["loss"]

            return jax.lax.scan(again, (params, rule.init(params)), length=20)

        params = tiny_model.params_of(model)
        (params, _), losses[name] = tiny_model.compiled(train)(params)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    found, exact = (np.asarray(losses[name]) for name in (quantization, "none"))
    assert found[-1] < 0.7 * found[0] and np.any(found != exact)
    np.testing.assert_allclose(found, exact, rtol={"int8": 0.05, "fp8": 0.3}[quantization])


# -- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "capability", "has"),
    [
        ("TPU v4", "", []),
        ("TPU v5 lite", "", ["int8"]),
        ("TPU v5", "", ["int8"]),
        ("TPU v6 lite", "", ["int8"]),
        ("TPU7x", "", ["fp8"]),
        ("TPU v99", "", []),
        ("Tesla V100-SXM2-16GB", "7.0", []),
        ("Tesla T4", "7.5", ["int8"]),
        ("NVIDIA A100-SXM4-80GB", "8.0", ["int8"]),
        ("NVIDIA L4", "8.9", ["int8", "fp8"]),
        ("NVIDIA B200", "10.0", ["int8", "fp8"]),
        ("AMD Instinct MI300X", "gfx942", []),
    ],
)
def test_a_device_without_such_products_is_refused(kind, capability, has):
    backend = "gpu" if capability else "tpu"
    for quantization in ("none", "int8", "fp8"):
        if quantization in ("none", *has):
            quantized.check_device(quantization, backend, kind, capability)
            continue
        remedy = f"quantization={' or '.join([*has, 'none'])}"
        with pytest.raises(ConfigError, match=f"quantization={quantization}: {kind} .*{remedy}"):
            quantized.check_device(quantization, backend, kind, capability)
        quantized.check_device(quantization, "cpu", "cpu", "")


def test_a_machine_without_qwix_names_the_package(monkeypatch):
    """When a model is built, and only with this key."""
    monkeypatch.setitem(sys.modules, "qwix", None)
    cfg = config.load(["quantization=int8", "hardware=cpu", "dcn_diloco_parallelism=1"], {})
    mesh = mesh_lib.build(run_settings.read_mesh(cfg))
    with pytest.raises(ConfigError, match="quantization=int8 .*qwix"):
        run_model.build(run_settings.read_model(cfg, mesh), mesh)
    plain = config.from_dict(cfg.as_dict() | {"quantization": "none"})
    run_model.build(run_settings.read_model(plain, mesh), mesh)
