"""Router and experts against a float64 oracle, and what padding and decoding do.

# B sequences  L tokens  D model  E experts  K experts of a token
"""

import functools

import jax
import jax.numpy as jnp
import model_oracle
import moe_oracle
import numpy as np
import pytest
import tiny_model
from flax import nnx
from tiers import full

from maxdiloco.models import router, sampling
from maxdiloco.models.kernels import grouped_matmul, triton_grouped
from maxdiloco.models.kernels.matmul import Products
from maxdiloco.models.moe import MoE
from maxdiloco.models.params import to_dict, with_values
from maxdiloco.models.remat import POLICIES

BALANCE = dict(load_balance_loss_weight=0.1, router_z_loss_weight=0.02)
NORMALISED = dict(normalise_weights=True)
FAMILIES = {
    "mixtral": dict(num_experts=4, num_experts_per_tok=2, router=NORMALISED, **BALANCE),
    "qwen3, weights not divided": dict(num_experts=6, num_experts_per_tok=3, base_moe_mlp_dim=8),
    "deepseek-v3": dict(
        num_experts=8, num_experts_per_tok=3, base_moe_mlp_dim=8, shared_experts=2,
        router=NORMALISED
        | dict(
            score_function="sigmoid", scaling_factor=2.5, balance_bias=True, num_groups=4,
            groups_per_token=2,
        ),
        **BALANCE,
    ),
    "gpt-oss": dict(
        num_experts=4, num_experts_per_tok=2, router=NORMALISED | dict(logit_bias=True),
        mlp_bias=True, mlp_activations=("quick_gelu", "plus_one"), mlp_activations_limit=0.8,
    ),
    "switch, plain relu": dict(num_experts=3, mlp_activations=("relu",), **BALANCE),
}  # fmt: skip
REAL = np.array([[1] * 5 + [0], [1] * 6], bool)


def module(changes):
    """(model, weights, x [2, 6, D]) of one layer of experts."""
    model = tiny_model.build(**changes)
    rng = np.random.default_rng(5)
    shapes = to_dict(abstract(model)[1])
    weights = jax.tree.map(lambda x: rng.normal(0, 0.4, x.shape).astype(x.dtype), shapes)
    return model, weights, rng.standard_normal((2, 6, 16)).astype(np.float32)


def abstract(model):
    """Graph and state of one layer of experts, without values."""
    layer = nnx.eval_shape(lambda: MoE(model.config, model.kernels, rngs=nnx.Rngs(params=0)))
    return nnx.split(layer, nnx.Param)


def layer_of(model, weights):
    graph, state = abstract(model)
    return nnx.merge(graph, with_values(state, weights))


def moe(model, weights, x_BLD, real_BL):
    return layer_of(model, weights)(x_BLD, real_BL)


def parts(model, used):
    """The losses of one layer's Usage."""
    found = router.losses(model.config, jax.tree.map(lambda x: x[None], used))
    return [found.get(name, 0.0) for name in router.LOSSES]


@pytest.mark.parametrize("name", FAMILIES)
def test_values_losses_and_gradients_are_those_of_the_oracle(name):
    """float32 against float64. The gradient is of a sum of y and the losses, by x and every
    weight; that of the routed bias is 0. One token is padding."""
    changes = FAMILIES[name]
    cfg = tiny_model.config(**changes)
    model, weights, x_BLD = module(changes)
    towards = np.random.default_rng(6).standard_normal(x_BLD.shape)

    def total(weights, x_BLD):
        y_BLD, used = moe(model, weights, x_BLD, REAL)
        return jnp.sum(y_BLD * towards) + sum(parts(model, used)), (y_BLD, used)

    run = tiny_model.compiled(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    (_, (y_BLD, used)), gradient = run(weights, x_BLD)

    def oracle(weights, x_BLD):
        y, counts, share, z, entropy = moe_oracle.layer(
            x_BLD.reshape(12, 16), weights, cfg, REAL.reshape(-1)
        )
        losses = moe_oracle.losses(counts, share, z, cfg)
        return np.vdot(y, towards) + sum(losses), y, counts, entropy, losses

    exact = model_oracle.float64(weights), x_BLD.astype(np.float64)
    _, y, counts, entropy, losses = oracle(*exact)
    np.testing.assert_allclose(y_BLD.reshape(12, 16), y, atol=2e-5)
    np.testing.assert_array_equal(used.counts, counts)
    np.testing.assert_allclose(parts(model, used), losses, rtol=1e-5)
    np.testing.assert_allclose(used.entropy / 11, entropy, rtol=1e-5)
    bias = gradient[0].get("routed_bias", np.zeros(1))
    assert not np.any(bias)
    leaves, structure = jax.tree.flatten(exact)
    tiny_model.assert_slopes(
        lambda moved: oracle(*structure.unflatten(moved))[0],
        leaves, jax.tree.leaves(gradient), step=1e-6, slack=1e-5,
    )  # fmt: skip


def test_both_gradients_from_the_kernels_are_those_of_the_product():
    """Interpreted. 7 rows of a tile of 128: an expert's rows begin and end inside of it, expert 2
    has none, and the last row is nobody's. Controls: rows in other groups, another's matrix."""
    rng = np.random.default_rng(4)
    x_AD, d_AF = (rng.standard_normal((7, n)).astype(np.float32) for n in (24, 16))
    w_EDF = rng.standard_normal((4, 24, 16)).astype(np.float32)
    sizes_E = np.array([1, 3, 0, 2], np.int32)
    factors = x_AD, w_EDF, sizes_E, d_AF
    of_x, of_w = grouped_matmul.megablox_gradients("highest", *factors, interpret=True)
    expected_w, expected_x = np.zeros_like(w_EDF), np.zeros_like(x_AD[:6])
    for row, expert in enumerate((0, 1, 1, 1, 3, 3)):
        expected_w[expert] += np.outer(x_AD[row], d_AF[row])
        expected_x[row] = w_EDF[expert] @ d_AF[row]
    np.testing.assert_allclose(of_w, expected_w, atol=1e-5)
    np.testing.assert_allclose(of_x[:6], expected_x, atol=1e-5)
    assert np.abs(expected_w[3] - x_AD[4:7].T @ d_AF[4:7]).max() > 0.1
    assert np.abs(expected_x[5] - w_EDF[2] @ d_AF[5]).max() > 0.1


@pytest.mark.parametrize(
    ("A", "widths", "sizes"),
    [
        (700, (32, 48), [100, 0, 300, 200]),  # tiles of 64; the last hundred rows are nobody's
        full(2048, (32, 160), [1000, 1048]),  # tiles of 128 rows and of 32 columns
        (64, (16, 16), [0, 0, 0]),
    ],
)
def test_products_by_triton_are_those_of_ragged_dot(A, widths, sizes):
    """Interpreted: the product and both gradients. XLA's own of a CPU, where nobody's rows give 0,
    multiply every row by every expert."""
    rng = np.random.default_rng(6)
    x_AD, d_AF = (rng.standard_normal((A, n)).astype(np.float32) for n in widths)
    w_EDF = rng.standard_normal((len(sizes), *widths)).astype(np.float32)
    sizes_E = np.array(sizes, np.int32)
    product = functools.partial(triton_grouped.rows_by_matrices, interpret=True)
    found = (
        product(x_AD, w_EDF, sizes_E),
        product(d_AF, w_EDF, sizes_E, transposed=True),
        triton_grouped.matrices_gradient(x_AD, d_AF, sizes_E, np.float32, interpret=True),
    )
    out_AF, pull = jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes_E), x_AD, w_EDF)
    tiny_model.assert_close(found, (out_AF, *pull(d_AF)), rtol=1e-5, atol=1e-3)


def test_tiles_of_rows_cover_each_expert_once():
    """Tiles of 4: experts of 5, 0, 4 and 1 rows have 2, 0, 1 and 1; two are left over."""
    tiles = triton_grouped.tiles_of(jnp.array([5, 0, 4, 1]), num_rows=10, rows=4)
    assert tiles[0][:4].tolist() == [0, 0, 2, 3]
    assert tiles[1].tolist() == [0, 4, 5, 9, 0, 0]
    assert tiles[2].tolist() == [5, 5, 9, 10, 0, 0]


@pytest.mark.parametrize(
    ("kernel", "width", "dtype", "calls"),
    [
        ("megablox", 8, jnp.float32, 2),  # both gradients
        ("triton", 32, jnp.bfloat16, 3),  # the product too
        ("triton", 32, jnp.float32, 0),  # neither fits: XLA's products take their place
        full("triton", 24, jnp.bfloat16, 0),
    ],
)
def test_replicas_of_a_slot_take_the_kernels_one_by_one(kernel, width, dtype, calls, monkeypatch):
    """As on a TPU and a GPU, interpreted: gradients of both factors are those without kernels.
    calls: kernels in the loop over replicas."""
    for module, name in (
        (grouped_matmul, "megablox_gradients"),
        (triton_grouped, "rows_by_matrices"),
        (triton_grouped, "matrices_gradient"),
    ):
        interpreted = functools.partial(getattr(module, name), interpret=True)
        monkeypatch.setattr(module, name, interpreted)
    rng = np.random.default_rng(4)
    x_RAD = jnp.asarray(rng.standard_normal((2, 6, width)), dtype)
    w_REDF = jnp.asarray(rng.standard_normal((2, 3, width, 16)), dtype)
    sizes_RE = np.array([[1, 5, 0], [2, 2, 2]], np.int32)

    def gradients(kernel):
        def total(x, w, sizes):
            out = grouped_matmul.grouped_matmul(kernel, Products(), x, w, sizes)
            return jnp.sum(jnp.square(out.astype(jnp.float32)))

        run = jax.jit(jax.vmap(jax.grad(total, argnums=(0, 1))))
        args = x_RAD, w_REDF, sizes_RE
        used = [one.primitive.name for one in tiny_model.equations(run, *args)]
        found = jax.tree.map(lambda x: np.asarray(x, np.float32), run(*args))
        return found, used.count("pallas_call")

    expected, none = gradients("xla")
    found, used = gradients(kernel)
    assert (none, used) == (0, calls)
    rounding = 0.01 if dtype == jnp.bfloat16 else 1e-5
    atol = rounding * max(np.abs(x).max() for x in expected)
    tiny_model.assert_close(found, expected, rtol=rounding, atol=atol)


MODEL = FAMILIES["deepseek-v3"] | dict(base_num_decoder_layers=3, first_num_dense_layers=1)


def test_padding_changes_neither_loss_nor_counts_nor_balance():
    """The tokens of padding are others; a row of padding alone is among them."""
    model = tiny_model.build(**MODEL)
    params, batch = tiny_model.params_of(model), tiny_model.batch()
    run = tiny_model.value_and_gradient(model)
    (total, aux), gradient = run(params, batch)
    other = np.where(batch["segment_ids"] == 0, 31 - batch["tokens"], batch["tokens"])
    (again, aux_again), gradient_again = run(params, batch | {"tokens": other})
    np.testing.assert_array_equal(total, again)
    jax.tree.map(np.testing.assert_array_equal, (aux, gradient), (aux_again, gradient_again))
    counts = np.asarray(aux["expert_counts"])
    np.testing.assert_array_equal(counts.sum(1), [3 * (12 + 7 + 12)] * 2)
    terms = ("cross_entropy", "z_loss", *router.LOSSES)
    np.testing.assert_allclose(total, sum(aux[name] for name in terms), rtol=1e-6)
    (moved, _), _ = run(params, batch | {"tokens": 31 - batch["tokens"]})
    assert abs(moved - total) > 1e-3  # control: real tokens count


@pytest.mark.parametrize("name", ["gpt-oss", full("mixtral")])
def test_what_a_kernel_leaves_in_rows_of_nobody_reaches_nothing(name, monkeypatch):
    """Two of the choices are of padding. Their rows are NaN after every product and every gradient;
    values and gradients of the layer are those with zeros there."""
    model, weights, x_BLD = module(FAMILIES[name])
    plain = grouped_matmul._forward

    def run(model):
        def total(weights, x_BLD):
            return jnp.sum(jnp.square(moe(model, weights, x_BLD, REAL)[0]))

        return tiny_model.compiled(jax.value_and_grad(total, argnums=(0, 1)))(weights, x_BLD)

    def filled(x_AD, sizes_E, value):
        return jnp.where((jnp.arange(len(x_AD)) < jnp.sum(sizes_E))[:, None], x_AD, value)

    def product(kernel, products, x_AD, w_EDF, sizes_E):
        out = plain(kernel, products, filled(x_AD, sizes_E, 0), w_EDF, sizes_E)
        return filled(out, sizes_E, jnp.nan)

    def gradients(precision, x_AD, w_EDF, sizes_E, d_AF):
        x_AD, d_AF = filled(x_AD, sizes_E, 0), filled(d_AF, sizes_E, 0)
        _, pull = jax.vjp(lambda x, w: plain("xla", Products(), x, w, sizes_E), x_AD, w_EDF)
        dx_AD, dw_EDF = pull(d_AF)
        return filled(dx_AD, sizes_E, jnp.nan), dw_EDF

    expected = run(model)
    monkeypatch.setattr(grouped_matmul, "megablox_gradients", gradients)
    monkeypatch.setattr(grouped_matmul, "_forward", product)
    found = run(tiny_model.with_kernels(model, grouped_matmul="megablox"))
    tiny_model.assert_close(found, expected, rtol=1e-6, atol=1e-5)


def test_what_a_layer_keeps_spares_it_products_of_experts_but_not_sorts():
    """Two sorts under every policy: choices by expert, and back. Each of three products is traced
    once for its value and three times for its gradients; w_up and w_gate once more where they are
    not kept, w_out never: no gradient needs its result."""
    again = {}
    for policy in POLICIES:
        model = tiny_model.build(**FAMILIES["mixtral"], remat_policy=policy)
        step = jax.value_and_grad(model.loss, has_aux=True)
        used = tiny_model.equations(step, tiny_model.params_of(model), tiny_model.batch())
        names = [one.primitive.name for one in used]
        assert names.count("sort") == 2, policy
        again[policy] = names.count("ragged_dot_general") - 3 * 4
    assert again == dict(none=0, minimal=0, save_qkv_context=2, save_context=2, full=2)


def test_cached_tokens_go_to_the_experts_of_the_full_pass():
    """Prompts of 4 tokens and 3 more one by one, over a dense stack and one with experts: the
    logits are the full pass's."""
    model = tiny_model.build(**MODEL)
    params, tokens = tiny_model.params_of(model), tiny_model.tokens((2, 7))
    full = tiny_model.compiled(functools.partial(sampling.prefill, model, cache_length=7))
    step = tiny_model.compiled(functools.partial(sampling.decode_step, model))
    _, caches = full(params, tokens[:, :4], 4)
    for position in range(4, 7):
        logits_BV, caches = step(params, caches, tokens[:, position], position)
    np.testing.assert_allclose(logits_BV, full(params, tokens, 7)[0], atol=1e-5)
