"""Generation with the cache against the full forward pass, and how tokens are drawn."""

import functools

import jax
import jax.numpy as jnp
import model_oracle
import numpy as np
import options
import pytest
import tiny_model

from maxdiloco.errors import ConfigError
from maxdiloco.models import sampling

# B sequences  L prompt tokens  T new tokens  V vocabulary

VARIANTS = {
    "grouped queries, untied": {},
    "window, tied": dict(sliding_window_size=3, logits_via_embedding=True),
    "soft-caps, no qk-norm": dict(
        attn_logits_soft_cap=0.7, final_logits_soft_cap=0.9, use_qk_norm="false"
    ),
    **options.TOGETHER,
}


def oracle_logits(changes, params, tokens_L):
    cfg = tiny_model.config(**changes)
    ones = np.ones(len(tokens_L), np.int32)
    return model_oracle.sequence_logits(model_oracle.float64(params), tokens_L, ones, cfg)


@pytest.mark.parametrize("name", VARIANTS)
def test_cached_logits_are_those_of_the_full_pass(name):
    """Two prompts of 4 tokens, filled up to 6, then 5 tokens one by one: at every position the
    float64 oracle's logits of the sequence so far."""
    changes = VARIANTS[name]
    model = tiny_model.build(**changes)
    params = tiny_model.params_of(model)
    sequences = tiny_model.tokens((2, 9))
    full_BLV = np.stack([oracle_logits(changes, params, row) for row in sequences])
    prefill = tiny_model.compiled(functools.partial(sampling.prefill, model, cache_length=9))
    step = tiny_model.compiled(functools.partial(sampling.decode_step, model))
    logits_BV, cache = prefill(params, sequences[:, [0, 1, 2, 3, 0, 0]], 4)
    np.testing.assert_allclose(logits_BV, full_BLV[:, 3], atol=1e-4)
    for position in range(4, 9):
        logits_BV, cache = step(params, cache, sequences[:, position], position)
        np.testing.assert_allclose(logits_BV, full_BLV[:, position], atol=1e-4)


def sample(model, params, prompts, **changes):
    keys = dict(max_new_tokens=6, temperature=0.0, top_k=0, key=jax.random.key(0))
    return np.asarray(sampling.sample(model, params, prompts, **keys | changes))


@pytest.fixture(scope="module")
def model_and_params():
    model = tiny_model.build()
    return model, tiny_model.params_of(model)


def test_greedy_text_is_the_likeliest_token_each_time(model_and_params):
    """Two prompts, each continued as if it were alone. So is the top one at any temperature."""
    model, params = model_and_params
    prompts = tiny_model.tokens((2, 4))
    new_BT = sample(model, params, prompts)
    assert new_BT.shape == (2, 6) and new_BT.dtype == np.int32
    for row, new_T in zip(prompts, new_BT, strict=True):
        so_far = list(row)
        for token in new_T:
            assert token == oracle_logits({}, params, np.array(so_far))[-1].argmax()
            so_far.append(token)
    top_1 = sample(model, params, prompts, temperature=5.0, top_k=1)
    np.testing.assert_array_equal(top_1, new_BT)
    compiled = sampling._generate._cache_size()
    for L in (3, 4):  # a temperature that float32 takes for 0
        row = sample(model, params, prompts[:, :L], temperature=1e-50)
        assert row[0, 0] == oracle_logits({}, params, prompts[0, :L])[-1].argmax()
    assert sampling._generate._cache_size() == compiled


def test_a_row_of_padding_is_never_drawn():
    """20 tokens in 32 rows: temperature 1e6 is an even choice, 60 draws of a third each."""
    tied = dict(logits_via_embedding=True, final_logits_soft_cap=0.9)
    for changes, top_k in (({}, 20), (tied, 0)):
        model = tiny_model.build(vocab_size=20, padded_vocab_size=32, **changes)
        params, prompts = tiny_model.params_of(model), tiny_model.tokens((10, 4), vocab_size=20)
        drawn = sample(model, params, prompts, temperature=1e6, top_k=top_k)
        assert drawn.max() < 20


def test_tokens_are_drawn_by_their_probabilities():
    """Logits 0, ln 2, ln 4 and temperature 1/2: odds 1 to 4 to 16; of the top two, 4 to 16.
    20000 draws put a frequency within 0.02 (over 5 standard deviations of 0.0036)."""
    logits_BV = jnp.log(jnp.tile(jnp.array([[1.0, 2.0, 4.0]]), (20000, 1)))
    for top_k, odds in ((0, [1, 4, 16]), (2, [0, 4, 16])):
        drawn = sampling.next_token(
            logits_BV, jax.random.key(0), temperature=jnp.float32(0.5), top_k=top_k, greedy=False
        )
        frequency = np.bincount(drawn, minlength=3) / 20000
        np.testing.assert_allclose(frequency, np.array(odds) / sum(odds), atol=0.02)
        assert top_k == 0 or frequency[0] == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(max_new_tokens=0), "max_new_tokens=0"),
        (dict(temperature=-0.5), "temperature=-0.5"),
        (dict(temperature=1e39), r"temperature=1e\+39"),
        (dict(top_k=-1), "top_k=-1"),
        (dict(prompts=np.zeros((1, 0), np.int32)), "prompt"),
    ],
)
def test_an_impossible_request_is_named(changes, named, model_and_params):
    with pytest.raises(ConfigError, match=named):
        sample(*model_and_params, **dict(prompts=tiny_model.tokens((1, 2))) | changes)
