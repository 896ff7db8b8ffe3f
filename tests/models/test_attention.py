"""Attention kernels: which one is chosen, and that they compute the same."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from maxdiloco.models import attention, dot_product, remat, triton, triton_kernels
from maxdiloco.models.dot_product import Softmax
from maxdiloco.parallel.replicas import map_fn
from maxdiloco.parallel.sharding import DEFAULT_RULES

# B sequences  L queries  S keys  N query heads  K key/value heads  H head dim

def inputs(L, *, B=2, N=4, K=2, H=8, seed=0):
    """q, k, v and segments: per row three documents at random cuts."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((B, L, heads, H)).astype(np.float32) for heads in (N, K, K))
    segments = np.sort(rng.integers(1, 4, (B, L), np.int32), axis=1)
    return q, k, v, segments


def sinks(N=4):
    """Of four heads: two that matter, one that takes nearly all weight, one that takes none."""
    return np.array([0.5, -1.0, 8.0, -30.0], np.float32)[:N]


def naive(softmax_config, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, sinks_N=None):
    """Whole weights, one key/value head per query head, differentiated by JAX. A sink is a key of
    its own, whose value is 0."""
    share = q_BLNH.shape[2] // k_BLKH.shape[2]
    k_BLNH, v_BLNH = jnp.repeat(k_BLKH, share, axis=2), jnp.repeat(v_BLKH, share, axis=2)
    logits_BNLS = jnp.einsum("blnh,bsnh->bnls", q_BLNH, k_BLNH)
    logits_BNLS /= softmax_config.divisor or math.sqrt(q_BLNH.shape[-1])
    if softmax_config.soft_cap:
        logits_BNLS = softmax_config.soft_cap * jnp.tanh(logits_BNLS / softmax_config.soft_cap)
    L = q_BLNH.shape[1]
    see_LS = np.tril(np.ones((L, L), bool))
    if softmax_config.window:
        see_LS &= ~np.tril(np.ones((L, L), bool), -softmax_config.window)
    see_BLS = see_LS & (segment_ids_BL[:, :, None] == segment_ids_BL[:, None, :])
    logits_BNLS = jnp.where(see_BLS[:, None], logits_BNLS, -jnp.inf)
    if sinks_N is not None:
        sinks_BNL1 = jnp.broadcast_to(sinks_N[None, :, None, None], (*logits_BNLS.shape[:3], 1))
        logits_BNLS = jnp.concatenate([logits_BNLS, sinks_BNL1], axis=-1)
        v_BLNH = jnp.pad(v_BLNH, [(0, 0), (0, 1), (0, 0), (0, 0)])
    weights_BNLS = jax.nn.softmax(logits_BNLS, axis=-1)
    return jnp.einsum("bnls,bsnh->blnh", weights_BNLS, v_BLNH)


def with_gradient(fn):
    """Result and the gradient of a sum with unequal weights, by q, k, v and sinks."""

    def total(floats, segments):
        q, k, v, *sinks = floats
        out = fn(q, k, v, segments, *sinks)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out

    gradient = jax.grad(total, has_aux=True)
    return lambda q, k, v, segments, *sinks: gradient((q, k, v, *sinks), segments)


PLAIN = Softmax(0.0, 0, "default")
SPLASH = functools.partial(attention.splash, interpret=True)


def dot_product_of(softmax_config):
    return functools.partial(dot_product.dot_product, softmax_config)


def triton_of(softmax_config):
    return functools.partial(triton.attend, softmax_config, True)


def splash_of(softmax_config):
    names = ("soft_cap", "window", "divisor")
    return functools.partial(SPLASH, **{name: getattr(softmax_config, name) for name in names})


@pytest.mark.parametrize(
    ("kernel_of", "L", "changes"),
    [
        (dot_product_of, 16, {}),
        (dot_product_of, 600, {}),  # blocks of 256, 256 and 88
        (dot_product_of, 200, dict(window=100)),  # blocks of 128 and 72
        (dot_product_of, 16, dict(window=1)),
        (dot_product_of, 16, dict(soft_cap=0.5)),
        (dot_product_of, 300, dict(window=100, divisor=1.5, sink=True)),
        (splash_of, 256, {}),
        (splash_of, 256, dict(window=100, soft_cap=0.7)),
        (splash_of, 256, dict(window=100, divisor=2.5, sink=True, value_dim=8)),
        (triton_of, 256, {}),
        (triton_of, 512, dict(documents=1)),  # blocks that need no mask
        (triton_of, 512, dict(documents=1, window=300)),
        (triton_of, 256, dict(window=20, soft_cap=0.7)),
        (triton_of, 208, dict(divisor=2.5, sink=True, value_dim=8)),  # blocks of 16
        (triton_of, 16, dict(head_dim=24)),  # arrays of 32 that are filled up
        (triton_of, 32, dict(head_dim=4)),
    ],
)
def test_a_kernel_computes_plain_attention(kernel_of, L, changes):
    """Pallas kernels interpreted; grouped queries, three documents a row. Values of another size
    than keys are as latent attention has them."""
    changes = dict(soft_cap=0.0, window=0, precision="default") | changes
    q, k, v, segments = inputs(L, H=changes.pop("head_dim", 16))
    v = v[..., : changes.pop("value_dim", v.shape[-1])]
    segments = np.minimum(segments, changes.pop("documents", 3))
    args = (q, k, v, segments, *([sinks()] if changes.pop("sink", False) else []))
    softmax_config = Softmax(**changes)
    found, expected = (
        tiny_model.compiled(with_gradient(fn))(*args)
        for fn in (kernel_of(softmax_config), functools.partial(naive, softmax_config))
    )
    tiny_model.assert_close(found, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("length", "window", "expected"),
    [
        (100, 0, [((0, 100), (0, 100))]),
        (256, 50, [((0, 128), (0, 128)), ((128, 256), (79, 256))]),
        (600, 0, [((0, 256), (0, 256)), ((256, 512), (0, 512)), ((512, 600), (0, 600))]),
    ],
)
def test_a_block_meets_the_keys_that_its_queries_see(length, window, expected):
    """Query 128 with a window of 50 sees keys 79 to 128."""
    found = [
        ((rows.start, rows.stop), (keys.start, keys.stop))
        for rows, keys in dot_product.blocks(length, window)
    ]
    assert found == expected


def test_long_sequences_get_longer_blocks():
    """The program does not grow with the length: 8 blocks of 1024 for 8192 queries."""
    assert [rows.stop for rows, _ in dot_product.blocks(8192, 0)] == list(range(1024, 8193, 1024))


def kernel_inputs(fn, *args):
    """Of each Pallas kernel of a program, by name: the shapes of its floating arguments."""
    found = {}
    for equation in tiny_model.equations(fn, *args):
        if equation.primitive.name == "pallas_call":
            arrays = [v.aval for v in equation.invars]
            found[equation.params["name"]] = [
                x.shape for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)
            ]
    return found


@pytest.mark.parametrize("layout", ["as it is", "HEAD_DIM_MINOR"])
def test_queries_keys_and_values_reach_splash_with_tokens_in_the_lanes(layout, monkeypatch):
    """The last dim of what each of the three kernels reads: 16 features do not fill 128 lanes.
    The control: with another layout the features are last."""
    if layout != "as it is":
        monkeypatch.setattr(attention, "SPLASH_LAYOUT", layout)
    splash = functools.partial(attention.splash, soft_cap=0.0, window=0)
    found = kernel_inputs(with_gradient(splash), *inputs(256, H=16))
    last = (16, 256) if layout == "as it is" else (256, 16)
    assert sorted(name.split("_")[2] for name in found) == ["dkv", "dq", "fwd"]
    for shapes in found.values():
        assert shapes[:3] == [(2, 4, *last), (2, 2, *last), (2, 2, *last)]


@pytest.mark.parametrize("name", ["splash", "triton"])
def test_a_kernel_gets_each_device_its_sequences_and_heads(name, devices, monkeypatch):
    """Under the map over replicas and a vmap, sequences over fsdp and heads over tensor."""
    mesh = tiny_model.mesh_of(devices, diloco=2, fsdp=2, tensor=2)
    attend_triton, shapes = triton.attend, set()

    def seen(arrays):
        shapes.add(tuple(x.shape for x in arrays))

    def splash(*args, **kwargs):
        seen(args)
        return SPLASH(*args, **kwargs)

    def attend(softmax_config, interpret, *args):
        assert not interpret
        seen(args)
        return attend_triton(softmax_config, True, *args)

    monkeypatch.setattr(attention, "splash", splash)
    monkeypatch.setattr(triton, "attend", attend)
    options = dict(soft_cap=0.0, window=0, rules=DEFAULT_RULES, precision="default")
    kernel = with_gradient(functools.partial(attention.attend, name, **options))
    M = 4
    replicas = ((*inputs(128, seed=m), sinks() * (m + 1)) for m in range(M))
    args = [np.stack(x) for x in zip(*replicas, strict=True)]
    in_slots = map_fn(kernel, mesh=mesh, num_replicas=M)
    plain = jax.vmap(with_gradient(functools.partial(naive, PLAIN)))
    tiny_model.assert_close(jax.jit(in_slots)(*args), tiny_model.compiled(plain)(*args), atol=2e-5)
    assert shapes == {((1, 128, 2, 8), (1, 128, 1, 8), (1, 128, 1, 8), (1, 128), (2,))}


@pytest.mark.parametrize("direction", ["keys of an earlier document", "queries of a later one"])
def test_triton_leaves_out_blocks_of_other_documents(direction):
    """0 * NaN is NaN, so a block of NaN that were met would show in the other document: its
    result, or the gradients of its keys. The control: in its own document it does."""
    L, cut = 512, 256
    q, k, v, segments = inputs(L, B=1, H=16)
    segments = (np.arange(L)[None] >= cut).astype(np.int32)
    run = tiny_model.compiled(with_gradient(triton_of(PLAIN)))
    if direction == "keys of an earlier document":
        k, v, poisoned = k.copy(), v.copy(), slice(0, cut)
        k[:, poisoned] = v[:, poisoned] = np.nan
        (dq, _, _), out = run(q, k, v, segments)
        results = (out, dq)
    else:
        q, poisoned = q.copy(), slice(cut, L)
        q[:, poisoned] = np.nan
        (_, dk, dv), _ = run(q, k, v, segments)
        results = (dk, dv)
    clean = np.ones(L, bool)
    clean[poisoned] = False
    for x in results:
        assert np.isfinite(x[:, clean]).all()
        assert np.isnan(x[:, ~clean]).any()


def test_triton_has_no_array_of_queries_by_keys():
    """The largest array of the program is of the size of q; the control: dot_product's weights."""
    q, k, v, segments = inputs(2048, B=1, N=2, K=2, H=16)

    def largest(fn):
        found = tiny_model.equations(with_gradient(fn), q, k, v, segments)
        return max(v.aval.size for equation in found for v in equation.outvars)

    assert largest(triton_of(PLAIN)) == q.size
    assert largest(functools.partial(naive, PLAIN)) >= 2048 * 2048


@pytest.mark.parametrize(("policy", "again"), [("save_context", False), ("full", True)])
def test_a_kept_context_spares_triton_a_second_forward_pass(policy, again):
    """In the compiled program, where what nobody uses is gone."""
    layer = remat.checkpointed(triton_of(PLAIN), policy)
    text = jax.jit(with_gradient(layer)).lower(*inputs(16)).compile().as_text()
    assert bool(re.search(r"rematted_computation/[^\"]*attention_forward", text)) == again
    assert "attention_d_queries" in text


@pytest.mark.parametrize("kernel", ["forward", "d_queries", "d_keys_values"])
def test_tiles_divide_the_sequence(kernel):
    for head_dim in (16, 64, 128, 192, 256):
        for length in (16, 48, 208, 1024, 2048):
            sizes = triton_kernels.tiles(kernel, head_dim, length)
            assert length % sizes.own == 0 and length % sizes.other == 0
            assert min(sizes.own, sizes.other) >= 16


def test_no_product_of_a_kernel_sums_over_less_than_matrix_units_do():
    """Of heads of 4 and values of 2. Interpreted, sums over fewer than 16 are right too."""
    q, k, v, segments = inputs(32, H=4)
    attend = functools.partial(triton.attend, PLAIN, False)
    summed = []
    for equation in tiny_model.equations(with_gradient(attend), q, k, v[..., :2], segments):
        if equation.primitive.name == "dot_general":
            (axes, _), _ = equation.params["dimension_numbers"]
            summed.append(math.prod(equation.invars[0].aval.shape[axis] for axis in axes))
    # Three loops, with and without a mask, of 2, 3 and 4 products in each body.
    assert len(summed) == 3 * (2 + 3 + 4)
    assert min(summed) >= 16
