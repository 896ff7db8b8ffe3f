"""Attention kernels: which one is chosen, and that they compute the same."""

import functools
import math
from types import SimpleNamespace

import cudnn_by_arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from maxdiloco.errors import ConfigError
from maxdiloco.models import devices as devices_lib
from maxdiloco.models import remat
from maxdiloco.models.kernels import attention, blockwise, choice, cudnn, private_jax, splash
from maxdiloco.models.kernels.blockwise import Scores
from maxdiloco.parallel.replicas import map_fn

# B sequences  L queries  S keys  N query heads  K key/value heads  H head dim


def inputs(L, *, B=2, N=4, K=2, H=8, seed=0):
    """q, k, v and segments: per row three documents at random cuts."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((B, L, heads, H)).astype(np.float32) for heads in (N, K, K))
    segments = np.sort(rng.integers(1, 4, (B, L), np.int32), axis=1)
    return q, k, v, segments


# Of four heads: two that matter, one that takes nearly all weight, one that takes none.
SINKS = np.array([0.5, -1.0, 8.0, -30.0], np.float32)


def naive(scores, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, sinks_N=None):
    """Whole weights, one key/value head per query head, differentiated by JAX. A sink is a key of
    its own, whose value is 0."""
    share = q_BLNH.shape[2] // k_BLKH.shape[2]
    k_BLNH, v_BLNH = jnp.repeat(k_BLKH, share, axis=2), jnp.repeat(v_BLKH, share, axis=2)
    logits_BNLS = jnp.einsum("blnh,bsnh->bnls", q_BLNH, k_BLNH)
    logits_BNLS /= scores.divisor
    if cap := scores.soft_cap:
        logits_BNLS = cap * jnp.tanh(logits_BNLS / cap)
    L = q_BLNH.shape[1]
    see_LS = np.tril(np.ones((L, L), bool))
    if scores.window:
        see_LS &= ~np.tril(np.ones((L, L), bool), -scores.window)
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


def assert_is_plain(kernel, scores, *args):
    """Of the naive way the result and gradients."""
    found, expected = (
        tiny_model.compiled(with_gradient(functools.partial(fn, scores)))(*args)
        for fn in (kernel, naive)
    )
    tiny_model.assert_close(found, expected, atol=2e-5)


@pytest.fixture
def without_cudnn(monkeypatch):
    """Array code in the place of JAX's primitives of cuDNN; all around it stays.
    Gives the shapes of the queries, keys and values that it got, and whether without a mask."""
    calls = set()

    def stand_in(scale, qkv, kept=(), *, mask=None, documents=None):
        calls.add((*(x.shape for x in qkv), mask is None))
        return cudnn_by_arrays.bound(scale, qkv, kept, mask=mask, documents=documents)

    monkeypatch.setattr(cudnn, "cudnn_attention", stand_in)
    return calls


PLAIN = Scores(math.sqrt(8))  # of the heads that `inputs` has by default
RULES = tiny_model.build().config.rules
SPLASH = functools.partial(splash.attention, interpret=True)
BY_OFFSETS = functools.partial(cudnn.attention, by_offsets=True)


@pytest.mark.parametrize(
    ("kernel", "L", "changes"),
    [
        (blockwise.attention, 16, {}),
        (blockwise.attention, 600, {}),  # blocks of 256, 256 and 88
        (blockwise.attention, 200, dict(window=100)),  # blocks of 128 and 72
        (blockwise.attention, 16, dict(window=1)),
        (blockwise.attention, 16, dict(soft_cap=0.5)),
        (blockwise.attention, 300, dict(window=100, divisor=1.5, sink=True)),
        (SPLASH, 256, {}),
        (SPLASH, 256, dict(window=100, soft_cap=0.7)),
        (SPLASH, 256, dict(window=100, divisor=2.5, sink=True, value_dim=8)),
        (cudnn.attention, 32, {}),
        (cudnn.attention, 32, dict(window=5, divisor=1.5)),
        (BY_OFFSETS, 32, dict(divisor=1.5)),
        (BY_OFFSETS, 32, dict(window=5)),
    ],
)
def test_a_kernel_computes_plain_attention(kernel, L, changes, without_cudnn):
    """Pallas kernels interpreted; grouped queries, three documents a row. Values of another size
    than keys are as latent attention has them."""
    changes = dict(divisor=4.0, value_dim=16, sink=False) | changes
    value_dim, sink = (changes.pop(name) for name in ("value_dim", "sink"))
    q, k, v, segments = inputs(L, H=16)
    args = (q, k, v[..., :value_dim], segments, *[SINKS] * sink)
    assert_is_plain(kernel, Scores(**changes), *args)


def test_a_block_meets_the_keys_that_its_queries_see():
    """Query 128 with a window of 50 sees keys 79 to 128. The program does not grow with the length:
    8 blocks of 1024 for 8192 queries."""
    _, (rows, keys) = blockwise.blocks(256, 256, 50)
    assert ((rows.start, rows.stop), (keys.start, keys.stop)) == ((128, 256), (79, 256))
    assert [r.stop for r, _ in blockwise.blocks(8192, 8192, 0)] == list(range(1024, 8193, 1024))


@pytest.mark.parametrize(
    ("layout", "last"), [(splash.LAYOUT, (16, 256)), ("HEAD_DIM_MINOR", (256, 16))]
)
def test_queries_keys_and_values_reach_splash_with_tokens_in_the_lanes(layout, last, monkeypatch):
    """The last dim of what each of the three kernels reads: 16 features do not fill 128 lanes.
    The control: with another layout the features are last."""
    monkeypatch.setattr(splash, "LAYOUT", layout)
    kernel = functools.partial(splash.attention, Scores(4.0))
    found = {}
    for equation in tiny_model.equations(with_gradient(kernel), *inputs(256, H=16)):
        if equation.primitive.name == "pallas_call":
            shapes = [v.aval.shape for v in equation.invars if v.aval.dtype == jnp.float32]
            found[equation.params["name"]] = shapes
    assert sorted(name.split("_")[2] for name in found) == ["dkv", "dq", "fwd"]
    for shapes in found.values():
        assert shapes[:3] == [(2, 4, *last), (2, 2, *last), (2, 2, *last)]


@pytest.mark.parametrize("name", ["splash", "cudnn_documents"])
def test_a_kernel_gets_each_device_its_sequences_and_heads(
    name, devices, without_cudnn, monkeypatch
):
    """Under the map over replicas and a vmap, sequences over fsdp and heads over tensor."""
    mesh = tiny_model.mesh_of(devices, diloco=2, fsdp=2, tensor=2)
    shapes, has_sinks = without_cudnn, name == "splash"

    def watched(scores, *args):
        shapes.add(tuple(x.shape for x in args))
        return SPLASH(scores, *args)

    monkeypatch.setattr(splash, "attention", watched)
    kernel = with_gradient(functools.partial(attention.attend, name, PLAIN, RULES))
    M = 4
    of_each = [(*inputs(128, seed=m), *[SINKS * (m + 1)] * has_sinks) for m in range(M)]
    args = [np.stack(x) for x in zip(*of_each, strict=True)]
    in_slots = map_fn(kernel, mesh=mesh)
    plain = jax.vmap(with_gradient(functools.partial(naive, PLAIN)))
    tiny_model.assert_close(jax.jit(in_slots)(*args), tiny_model.compiled(plain)(*args), atol=2e-5)
    rows = 1 if has_sinks else M // 2  # cuDNN gets those of a slot's replicas at once
    of_each = tuple((rows, *dims) for dims in ((128, 2, 8), (128, 1, 8), (128, 1, 8)))
    assert (*of_each, *([(1, 128), (2,)] if has_sinks else [True])) in shapes


@pytest.mark.parametrize("by_offsets", [False, True])
@pytest.mark.parametrize(("policy", "forward"), [("save_context", 1), ("full", 2)])
def test_a_kept_context_spares_cudnn_a_second_forward_pass(
    policy, forward, by_offsets, without_cudnn
):
    """Of two products in array code; the backward pass has five. By offsets or by a mask, both."""
    kernel = functools.partial(cudnn.attention, PLAIN, by_offsets=by_offsets)
    layer = remat.apply_remat_policy(lambda *args: jnp.square(kernel(*args)), policy)
    found = tiny_model.equations(with_gradient(layer), *inputs(16))
    products = [one.primitive.name for one in found].count("dot_general")
    assert products == (2 * forward + 5) * (3 if by_offsets else 1)  # one, up to four, a mask


@pytest.mark.parametrize(
    ("documents", "branch"), [(2, 0), (3, 1), (8, 1), (9, 2), (32, 2), (33, 3)]
)
def test_batches_of_many_documents_take_more_room_or_a_mask(
    documents, branch, without_cudnn, monkeypatch
):
    """Two windows: there is room for a document of each, for 8, and for 32. One window has a
    document, or two, the first of which is padding."""
    q, k, v, _ = inputs(64, H=16)
    monkeypatch.setattr(cudnn, "TOKENS_PER_DOCUMENT", (16, 4))
    taken, switch = [], jax.lax.switch

    def watched(index, *rest):
        jax.debug.callback(lambda at: taken.append(int(at)), index)
        return switch(index, *rest)

    monkeypatch.setattr(jax.lax, "switch", watched)
    last = 1 if documents == 2 else 2
    rows = [np.arange(64) * (documents - last) // 64 + 1, np.arange(64) * last // 80]
    segments = np.stack(rows).astype(np.int32)
    assert_is_plain(BY_OFFSETS, Scores(4.0), q, k, v, segments)
    jax.effects_barrier()
    assert set(taken) == {branch}


CAPPED = dict(attn_logits_soft_cap=50.0)
CHOSEN = [
    ("flash", "gpu", {}, "cudnn"),
    ("flash", "tpu", {}, "splash"),
    ("dot_product", "gpu", {}, "dot_product"),
    ("autoselected", "tpu", dict(dtype=jnp.float32, attention_sink=True, **CAPPED), "splash"),
    ("autoselected", "gpu", dict(head_dim=128, latent=None), "cudnn"),
    ("autoselected", "gpu", dict(compute_capability="12.0"), "cudnn"),
    ("autoselected", "gpu", dict(compute_capability="9.0"), "cudnn_documents"),
    ("flash", "gpu", dict(compute_capability="9.0", latent=None), "cudnn_documents"),
]
FITS = dict(head_dim=64, dtype=jnp.bfloat16, attention_sink=False, attn_logits_soft_cap=0.0,
            latent=SimpleNamespace(v_head_dim=64))  # fmt: skip


def chosen(wanted, backend, *, length=1024, shards=1, compute_capability="8.0", **sizes):
    return choice.choose_attention(
        SimpleNamespace(**FITS | sizes), wanted, backend,
        length=length, shards=shards, compute_capability=compute_capability,
    )  # fmt: skip


@pytest.fixture
def without_private_jax(monkeypatch):
    """A JAX whose module of cuDNN's attention lacks a primitive."""
    monkeypatch.setattr(private_jax, "PRIMITIVES", ("_no_such_primitive",))


def test_a_jax_without_the_private_primitives_gets_the_public_function(without_private_jax):
    for capability in ("8.0", "9.0"):
        assert chosen("flash", "gpu", compute_capability=capability) == "cudnn_public"
    assert chosen("flash", "tpu") == "splash"


@pytest.mark.parametrize("window", [0, 5])
def test_the_public_function_computes_plain_attention(window, monkeypatch):
    """jax.nn's own array code in the place of cuDNN, which needs a GPU."""
    fused = jax.nn.dot_product_attention

    def by_arrays(*args, implementation, **options):
        assert implementation == "cudnn"
        return fused(*args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_arrays)

    def kernel(scores, *args):
        return attention.attend("cudnn_public", scores, RULES, *args)

    assert_is_plain(kernel, Scores(4.0, window=window), *inputs(32, H=16))


@pytest.mark.parametrize(("wanted", "backend", "changes", "kernel"), CHOSEN)
def test_kernel_follows_backend_and_model(wanted, backend, changes, kernel):
    assert chosen(wanted, backend, **changes) == kernel


@pytest.mark.parametrize(
    ("backend", "changes", "named"),
    [
        ("cpu", {}, "cpu"),
        ("gpu", dict(dtype=jnp.float32), "dtype=float32"),
        ("gpu", dict(head_dim=12), "head_dim=12"),
        ("gpu", dict(head_dim=256), "head_dim=256"),
        ("gpu", dict(latent=SimpleNamespace(v_head_dim=32)), "v_head_dim=32"),
        ("gpu", CAPPED, "attn_logits_soft_cap=50.0"),
        ("gpu", dict(attention_sink=True), "attention_sink=true"),
        ("gpu", dict(length=1001), "max_target_length=1001"),
        ("gpu", dict(shards=2), "context parallelism 2"),
        ("gpu", dict(compute_capability="7.5"), "compute capability 7.5"),
        ("gpu", dict(compute_capability="gfx90a"), "compute capability gfx90a"),
        ("tpu", dict(length=1000), "max_target_length=1000"),
    ],
)
def test_flash_attention_that_cannot_run_is_refused(backend, changes, named):
    """Control: `autoselected` does not select it."""
    with pytest.raises(ConfigError, match=f"attention=flash .*{named}"):
        chosen("flash", backend, **changes)
    assert chosen("autoselected", backend, **changes) == "dot_product"


def test_a_machine_without_cudnn_is_refused():
    """JAX has no plugin for CUDA here, or NVIDIA's library is not installed."""
    with pytest.raises(ConfigError, match="attention=flash .*cuDNN"):
        cudnn.check_installed("flash")


# -- sequences whose tokens are spread over devices ------------------------------------------------


def test_each_device_has_an_early_and_a_late_chunk():
    """Llama 3 (2407.21783), 3.3.2: rank i has chunks i and 2 C - 1 - i, here of two tokens."""
    assert devices_lib.positions(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert devices_lib.positions(5, 1).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("kernel", "soft_cap"), [("dot_product", 0.0), ("splash", 0.7)])
def test_a_kernel_sees_the_keys_of_all_devices(devices, monkeypatch, kernel, soft_cap):
    """Context and gradients of 512 tokens on two devices, two replicas and a vmap over them, heads
    over tensor: those of one device. Windows and documents reach over chunks of 128."""
    mesh = tiny_model.mesh_of(devices, diloco=2, context=2, tensor=2)
    monkeypatch.setattr(splash, "attention", SPLASH)
    scores = PLAIN._replace(window=100, soft_cap=soft_cap)
    sinks_N = np.array([0.5, -1.0, 2.0, 0.0], np.float32)

    def attend(q, k, v, segments):
        by_device = [x[:, devices_lib.positions(512, 2)] for x in (q, k, v)]
        context = attention.attend(kernel, scores, RULES, *by_device, segments, sinks_N)
        return devices_lib.to_text_order(context, 2)

    def alone(*args):
        return attention.attend("dot_product", scores, RULES, *args, sinks_N)

    of_each = (inputs(512, B=1, seed=m) for m in range(4))
    args = [np.stack(x) for x in zip(*of_each, strict=True)]
    on_mesh = map_fn(with_gradient(attend), mesh=mesh)
    expected = tiny_model.compiled(jax.vmap(with_gradient(alone)))(*args)
    tiny_model.assert_close(jax.jit(on_mesh)(*args), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("length", "shards", "remedy"),
    [(1000, 3, "max_target_length=996"), (4, 4, "max_target_length=8")],
)
def test_a_length_that_its_devices_cannot_share_is_refused(length, shards, remedy):
    with pytest.raises(ConfigError, match=f"max_target_length={length} .*{remedy}"):
        devices_lib.check(length, shards)
    devices_lib.check(24, shards)
    devices_lib.check(7, 1)
