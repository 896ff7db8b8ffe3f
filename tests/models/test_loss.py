"""The chunked loss and its hand-formed gradient against plain array code."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from maxdiloco.models import loss
from maxdiloco.models.kernels import reductions
from maxdiloco.models.kernels.choice import Kernels
from maxdiloco.models.kernels.matmul import Products

# B sequences  L tokens  D model  V vocabulary


CONFIG = dataclasses.replace(tiny_model.build(z_loss_multiplier=0.0).config, vocab_size=512)
PLAIN = CONFIG, Kernels()


def head(kernels=PLAIN[1], **sizes):
    return dataclasses.replace(CONFIG, **sizes), kernels


def token_losses(how, *args):
    return loss.token_losses(*how, *args)


def problem(B, L, *, D=6, V=11, tied=False, seed=0):
    """Hidden states, a head, targets, and which count: about two of three."""
    rng = np.random.default_rng(seed)
    x_BLD = rng.standard_normal((B, L, D)).astype(np.float32)
    w = rng.standard_normal((V, D) if tied else (D, V)).astype(np.float32)
    return x_BLD, w, rng.integers(0, V, (B, L), np.int32), rng.random((B, L)) < 0.66


def plain(how, x_BLD, w, targets_BL, counts_BL):
    """The same sums from whole logits, differentiated by JAX."""
    config, _ = how
    logits_BLV = x_BLD @ (w.T if config.tied_head else w)
    if cap := config.final_logits_soft_cap:
        logits_BLV = cap * jnp.tanh(logits_BLV / cap)
    lse_BL = jax.nn.logsumexp(logits_BLV, axis=-1)
    picked_BL = jnp.take_along_axis(logits_BLV, targets_BL[..., None], axis=-1)[..., 0]
    cross = jnp.sum((lse_BL - picked_BL) * counts_BL)
    z_loss = config.z_loss_multiplier * jnp.sum(lse_BL**2 * counts_BL)
    return cross + z_loss, (cross, z_loss)


def with_gradient(fn, how, args):
    """The sums, and the gradient by hidden states and head."""
    run = jax.value_and_grad(fn, argnums=(1, 2), has_aux=True)
    return tiny_model.compiled(run, static_argnums=0)(how, *args)


CASES = {
    "plain": ({}, (2, 8)),
    "tied": (dict(tied_head=True), (2, 8)),
    "z-loss": (dict(z_loss_multiplier=0.3), (3, 8)),
    "soft-cap and z-loss": (
        dict(final_logits_soft_cap=0.8, z_loss_multiplier=0.1, tied_head=True),
        (2, 8),
    ),
    "length that no chunk divides": (dict(z_loss_multiplier=0.1), (2, 7)),
    "one token": ({}, (2, 1)),
    "on a GPU": (dict(kernels=Kernels(one_pass_logsumexp=True), z_loss_multiplier=0.1), (2, 8)),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_those_of_whole_logits(case):
    """Sums of float32 in another order: 1e-5. Without a gradient another pass over the chunks
    runs."""
    changes, shape = CASES[case]
    how, args = head(**changes), problem(*shape, tied="tied_head" in changes)
    found, expected = (with_gradient(fn, how, args) for fn in (token_losses, plain))
    tiny_model.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    alone = tiny_model.compiled(token_losses, static_argnums=0)(how, *args)
    tiny_model.assert_close(alone, expected[0], rtol=1e-5)


def test_a_gpus_log_normalisers_are_the_same():
    """Of logits far apart, and of padding, which is first in one row and last in the other."""
    logits = np.random.default_rng(0).normal(0, 30, (2, 1000)).astype(np.float32)
    logits[0, :9] = logits[1, -9:] = -np.inf
    logits[1, 500] = 1e4
    found = tiny_model.compiled(reductions.logsumexp_in_one_pass, static_argnums=1)(logits, -1)
    np.testing.assert_allclose(found, jax.nn.logsumexp(logits, axis=-1), rtol=1e-6)
    one, padding = jnp.ones(()), (jnp.float32(-jnp.inf), jnp.ones(()))
    assert reductions._joined(reductions._joined(padding, padding), (3 * one, one)) == (3, 1)


def test_gradient_follows_the_factor_before_the_loss():
    how, args = PLAIN, problem(2, 4)

    def scaled(factor, x, w):
        return factor * token_losses(how, x, w, *args[2:])[0]

    gradient = tiny_model.compiled(jax.grad(scaled, argnums=(1, 2)))
    once, thrice = gradient(1.0, *args[:2]), gradient(3.0, *args[:2])
    tiny_model.assert_close(thrice, jax.tree.map(lambda g: 3 * g, once), rtol=1e-6)


def test_float32_factors_leave_the_head_its_gradient_unrounded():
    """Control: with bfloat16 factors the logits' gradient keeps 8 bits."""
    x_BLD, *others = problem(2, 8)
    x_BLD = x_BLD.astype(jnp.bfloat16)

    def gradient(fn, x_BLD, **keys):
        how = head(Kernels(products=Products(float32_results=True, **keys)))
        of_w = jax.grad(lambda w: fn(how, x_BLD, w, *others[1:])[0])
        return tiny_model.compiled(of_w)(others[0])

    exact = gradient(plain, x_BLD.astype(np.float32))
    tiny_model.assert_close(
        gradient(token_losses, x_BLD, float32_operands=True), exact, rtol=1e-5, atol=1e-5
    )
    rounded = gradient(token_losses, x_BLD)
    assert np.abs(rounded - exact).max() > 1e-3


def test_gradient_of_a_bfloat16_matmul_is_summed_in_float32():
    """4096 equal contributions of 1/2: a bfloat16 sum stops growing at 128, where its step is 1."""
    x_BLD, w_DV = np.ones((1, 4096, 1), jnp.bfloat16), np.zeros((1, 2), np.float32)
    targets_BL, counts_BL = np.zeros((1, 4096), np.int32), np.ones((1, 4096), bool)
    gradient = jax.jit(jax.grad(lambda *a: token_losses(PLAIN, *a)[0], argnums=1))
    dw = gradient(x_BLD, w_DV, targets_BL, counts_BL)
    assert dw.dtype == jnp.float32
    np.testing.assert_array_equal(dw, [[-2048, 2048]])


def biggest_float32(fn, *args):
    """Elements of the largest float32 array anywhere in the program."""
    avals = [v.aval for equation in tiny_model.equations(fn, *args) for v in equation.outvars]
    return max(aval.size for aval in avals if aval.dtype == jnp.float32)


@pytest.mark.parametrize("length", [8, 64])
def test_whole_logits_never_exist(length):
    """B * L * V float32 numbers are nowhere in the program, neither forward nor backward."""
    B, V = 4, 512
    args, how = problem(B, length, V=V), head(z_loss_multiplier=0.1)
    for fn in (token_losses, plain):
        with_gradient = jax.value_and_grad(fn, argnums=(1, 2), has_aux=True)
        for program in (fn, with_gradient):
            biggest = biggest_float32(lambda *a, program=program: program(how, *a), *args)
            if fn is plain:  # control: there it is seen
                assert biggest >= B * length * V
            else:
                assert biggest <= B * length * V / loss.MIN_CHUNKS


def test_long_batches_get_more_chunks():
    """8 sequences of 1024 tokens: 8 chunks of 128 tokens of each sequence, or 32 of 32."""
    args = problem(8, 1024, D=1, V=32)
    for tokens in (1024, 256):
        how = head(Kernels(head_chunk=tokens))
        biggest = biggest_float32(lambda *a, how=how: token_losses(how, *a), *args)
        assert biggest == tokens * 32


def test_a_target_s_logit_that_is_read_has_the_bits_of_one_that_is_picked_by_a_sum():
    """On a CPU it is read. The last target is outside the vocabulary of 11."""
    rng = np.random.default_rng(0)
    logits_GSTV = jnp.asarray(rng.standard_normal((1, 2, 4, 11)), jnp.float32)
    targets_GST = jnp.asarray(rng.integers(0, 11, (1, 2, 4)), jnp.int32).at[0, 1, 3].set(11)
    read, picked = (
        Kernels(products=Products(float32_results=wide)).target_logits(
            CONFIG, logits_GSTV, targets_GST
        )
        for wide in (True, False)
    )
    np.testing.assert_array_equal(read, picked)
    assert read[0, 1, 3] == 0 and np.all(read[0, 0] != 0)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_padding_change_neither_loss_nor_gradient_and_get_none(tied):
    """11 tokens in 16 rows, the padding's values large: as if it were cut off. The soft-cap's
    factor of a masked logit is 0 times infinity."""
    x_BLD, w, *others = problem(2, 8, V=11, tied=tied)
    w_padded = np.pad(w, [(0, 5), (0, 0)] if tied else [(0, 0), (0, 5)], constant_values=9)
    how = dict(tied_head=tied, final_logits_soft_cap=0.8, z_loss_multiplier=0.3)
    found = [
        with_gradient(token_losses, head(**how, **sizes), (x_BLD, w_, *others))
        for sizes, w_ in (({"vocab_size": 11}, w_padded), ({}, w))
    ]
    (values, (dx, dw)), (expected, (expected_dx, expected_dw)) = found
    cut, rest = (dw[:11], dw[11:]) if tied else (dw[:, :11], dw[:, 11:])
    wanted = (expected, expected_dx, expected_dw)
    tiny_model.assert_close((values, dx, cut), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(rest, 0)
