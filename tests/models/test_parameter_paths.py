"""The paths of parameters, which checkpoints, fragments and tables of Hugging Face models use."""

import jax
import numpy as np
import options
import pytest
import tiny_model
from flax import nnx

from maxdiloco.diloco.fragments import Stacked
from maxdiloco.models.params import path_of

ENDS = "embedding final_norm.scale"
ATTENTION = "attention.key attention.out attention.query attention.value"
QK_NORM = "attention.key_norm.scale attention.query_norm.scale"
PRE = "attention_norm.scale mlp_norm.scale"
MLP = "mlp.w_gate mlp.w_out mlp.w_up"
EXPERTS = "moe.router moe.w_gate moe.w_out moe.w_up"
LATENT = (
    "attention.kv_down attention.kv_norm.scale attention.kv_up attention.out attention.query_down "
    "attention.query_norm.scale attention.query_up"
)
MIXTURE = dict(num_experts=4, num_experts_per_tok=2)
BIASES = dict(attention_bias="all", mlp_bias=True, attention_sink=True)
STORED = {  # changes, paths outside of the layers, of a layer of `layers`, and of `dense_layers`
    "dense": ({}, f"{ENDS} head", f"{ATTENTION} {QK_NORM} {PRE} {MLP}", ""),
    "sliding window": (
        options.TOGETHER["as Gemma"],
        ENDS,
        f"{ATTENTION} {QK_NORM} {PRE} post_attention_norm.scale post_mlp_norm.scale {MLP}",
        "",
    ),
    "MoE": (
        MIXTURE | BIASES | dict(router=dict(logit_bias=True), use_qk_norm="false"),
        f"{ENDS} head",
        f"{ATTENTION} attention.key_bias attention.out_bias attention.query_bias attention.sinks "
        f"attention.value_bias {PRE} {EXPERTS} moe.router_bias moe.w_gate_bias moe.w_out_bias "
        "moe.w_up_bias",
        "",
    ),
    "DeepSeek": (
        options.TOGETHER["as DeepSeek"]
        | MIXTURE
        | dict(
            router=dict(balance_bias=True), shared_experts=1, first_num_dense_layers=1,
            base_num_decoder_layers=3,
        ),
        f"{ENDS} head",
        f"{LATENT} {PRE} {EXPERTS} moe.routed_bias moe.shared.w_gate moe.shared.w_out "
        "moe.shared.w_up",
        f"{LATENT} {PRE} {MLP}",
    ),
}  # fmt: skip


def paths(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, Stacked))
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]


@pytest.mark.parametrize("name", STORED)
def test_the_paths_of_the_parameters_are_the_stored_ones(name):
    """In the order of the leaves. The same paths have the numbers of their layers."""
    changes, ends, layer, dense = STORED[name]
    model = tiny_model.build(**changes)
    expected = ends.split()
    expected += [f"layers.{path}" for path in layer.split()]
    expected += [f"dense_layers.{path}" for path in dense.split()]
    found = paths(jax.eval_shape(model.init, jax.random.key(0)))
    assert sorted(found) == sorted(expected)
    assert len(set(found)) == len(found)
    in_layers = [path for path in found if "layers" in path.partition(".")[0]]
    assert paths(model.layer_axis["layers"]) == [
        path.partition(".")[2] for path in in_layers if path.startswith("layers.")
    ]


def test_values_go_into_the_module_and_come_out_at_the_same_path():
    """Of a model with biases, shared experts and two stacks; every leaf has other values."""
    model = tiny_model.build(**STORED["DeepSeek"][0] | dict(mlp_bias=True))
    params = tiny_model.params_of(model)
    state = nnx.to_flat_state(nnx.state(model.decoder(params), nnx.Param))
    assert len(state) == len(jax.tree.leaves(params))
    for module_path, weight in state:
        value = params
        for name in path_of(module_path):
            value = value[name]
        np.testing.assert_array_equal(weight.get_value(), value)


def test_a_layer_draws_from_its_own_key_and_a_matrix_from_its_number():
    """Initial values are those of jax.random.fold_in(key of the layer, number of the matrix),
    whatever else the model has. Queries are matrix 0, w_out is matrix 6 of a gated layer."""
    model = tiny_model.build()
    key = jax.random.key(3)
    params = model.init(key)
    layers = jax.random.split(jax.random.split(key)[1], 2)
    for layer, (path, number, fan_in) in enumerate(
        [(("attention", "query"), 0, 16), (("mlp", "w_out"), 6, 24)]
    ):
        found = params["layers"][path[0]][path[1]][layer]
        own = jax.random.fold_in(layers[layer], number)
        drawn = jax.random.truncated_normal(own, -2, 2, found.shape)
        gain = 0.5 if path[1] == "w_out" else 1.0  # 1 / sqrt(2 layers)
        # The last bit of a product follows the compiler's order.
        np.testing.assert_allclose(
            found, drawn * gain / np.sqrt(fan_in) / 0.87962566103423978, rtol=1e-6
        )
