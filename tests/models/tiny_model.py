"""A decoder small enough to check by hand, with every choice a test may want to turn.

# B sequences  L tokens
"""

import math
from types import SimpleNamespace

import jax
import numpy as np
from jax.sharding import Mesh

from maxdiloco.models import transformer
from maxdiloco.parallel.mesh import AXES

# Packed: documents of 5, 4 and 3 tokens; one of 7 and padding; one that fills the window;
# padding alone.
SEGMENTS = np.array(
    [
        [1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3],
        [1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
        [1] * 12,
        [0] * 12,
    ],
    np.int32,
)


DENSE = dict(
    num_experts=1,
    num_experts_per_tok=1,
    base_moe_mlp_dim=-1,
    shared_experts=0,
    first_num_dense_layers=0,
    routed_score_func="softmax",
    norm_topk_prob=False,
    routed_scaling_factor=1.0,
    routed_bias=False,
    routed_bias_update_rate=1e-3,
    n_routing_groups=-1,
    topk_routing_group=-1,
    router_bias=False,
    capacity_factor=-1.0,
    load_balance_loss_weight=0.0,
    router_z_loss_weight=0.0,
)


def config(**changes):
    """Two layers of width 16, four query heads on two key/value heads, gated, untied."""
    keys = dict(
        base_emb_dim=16,
        base_num_decoder_layers=2,
        base_mlp_dim=24,
        **DENSE,
        base_num_query_heads=4,
        base_num_kv_heads=2,
        head_dim=4,
        vocab_size=32,
        padded_vocab_size=-1,
        mlp_activations=("silu", "linear"),
        mlp_activations_limit=0.0,
        mlp_bias=False,
        norm_placement="pre",
        norm_scale_offset=0.0,
        normalization_layer_epsilon=1e-5,
        rope_max_timescale=10000.0,
        rope_type="default",
        rope_factor=1.0,
        original_max_position_embeddings=0,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0,
        beta_fast=32.0,
        beta_slow=1.0,
        rope_truncate=True,
        rope_attention_factor=0.0,
        logits_via_embedding=False,
        embedding_scale="auto",
        use_qk_norm=True,
        qk_norm_scope="head",
        query_pre_attn_scalar=0.0,
        attention_bias="none",
        attention_sink=False,
        attention_type="global",
        q_lora_rank=0,
        kv_lora_rank=6,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=3,
        attn_logits_soft_cap=0.0,
        final_logits_soft_cap=0.0,
        sliding_window_size=0,
        attention_pattern=(),
        local_rope_max_timescale=-1.0,
        z_loss_multiplier=1e-2,
        dtype="float32",
        weight_dtype="float32",
        attention="dot_product",
        remat_policy="none",
        matmul_precision="default",
        logical_axis_rules=(),
        max_target_length=12,
    )
    assert not changes.keys() - keys.keys()
    return SimpleNamespace(**keys | changes)


def build(**changes):
    return transformer.build(config(**changes), backend="cpu")


def params_of(model, seed=0):
    """Parameters as large as fresh ones, with norm scales off 1, so that no scale can be left out
    unseen. NumPy's numbers, since drawing them in JAX compiles some twenty programs."""
    rng = np.random.default_rng(seed)

    def draw(path, x):
        scale = path[-1].key == "scale"
        values = rng.uniform(0.5, 1.5, x.shape) if scale else rng.normal(0, 0.25, x.shape)
        return values.astype(x.dtype)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(model.init, jax.random.key(0)))


def tokens(shape, seed=1, vocab_size=32):
    return np.random.default_rng(seed).integers(0, vocab_size, shape, dtype=np.int32)


def batch(segment_ids=SEGMENTS, seed=1):
    return {"tokens": tokens(segment_ids.shape, seed), "segment_ids": segment_ids}


def compiled(fn, **kwargs):
    """jax.jit with little optimisation: half the compile time, and nothing here runs long."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0}, **kwargs)


def value_and_gradient(model):
    """((loss, aux), gradient) of parameters and a batch, compiled."""
    return compiled(jax.value_and_grad(model.loss, has_aux=True))


def assert_close(tree, expected, **tolerance):
    jax.tree.map(lambda x, e: np.testing.assert_allclose(x, e, **tolerance), tree, expected)


def mesh_of(devices, **sizes):
    """A mesh with the given sizes; the other axes have size 1."""
    shape = [sizes.get(axis, 1) for axis in AXES]
    return Mesh(np.array(devices[: math.prod(shape)]).reshape(shape), AXES)
