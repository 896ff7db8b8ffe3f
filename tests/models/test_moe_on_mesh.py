"""Experts laid out over a mesh compute what they compute on one device."""

import jax
import numpy as np
import pytest
import tiny_model
from jax.sharding import NamedSharding
from test_model_on_mesh import replicas

from maxdiloco.errors import ConfigError
from maxdiloco.parallel.replicas import map_fn
from maxdiloco.parallel.sharding import parameter_shardings, spec

EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, base_moe_mlp_dim=8, shared_experts=1, norm_topk_prob=True,
    base_num_decoder_layers=2, first_num_dense_layers=1, mlp_bias=True, router_bias=True,
    routed_score_func="sigmoid", routed_bias=True, n_routing_groups=2, topk_routing_group=1,
    load_balance_loss_weight=0.1, router_z_loss_weight=0.01, remat_policy="minimal",
)  # fmt: skip
# Sequences are whole rows, so that two devices hold two each: capacities that drop nothing.
MESHES = [
    (dict(diloco=2, expert=2, tensor=2), 2, {}),
    (dict(diloco=1, fsdp=2, expert=2), 2,
     dict(logical_axis_rules=(("stored_expert", ("expert", "fsdp")),))),
    (dict(diloco=1, fsdp=2, expert=2), 2, {}),  # both replicas in one slot, under a vmap
    (dict(diloco=2, fsdp=2, expert=2), 2, dict(capacity_factor=2.0)),
    (dict(diloco=1, expert=2, context=2), 2, {}),
]  # fmt: skip


def place(model, mesh, params_R, batch_R):
    one = jax.tree.map(lambda x_R: x_R[0], params_R)
    shardings = parameter_shardings(model.logical_axes, one, mesh, model.spec.rules)
    rows = NamedSharding(mesh, spec((None, "batch"), model.spec.rules, without=("diloco",)))

    def over_replicas(sharding):
        return NamedSharding(mesh, jax.sharding.PartitionSpec("diloco", *sharding.spec))

    put = [jax.device_put(x, over_replicas(s)) for x, s in zip(
        jax.tree.leaves(params_R), jax.tree.leaves(shardings), strict=True)]  # fmt: skip
    batch_R = {name: jax.device_put(x, rows) for name, x in batch_R.items()}
    return jax.tree.unflatten(jax.tree.structure(params_R), put), batch_R


@pytest.mark.parametrize(("sizes", "M", "changes"), MESHES)
def test_replicas_with_experts_on_a_mesh_are_replicas_alone(devices, sizes, M, changes):
    """Loss, balance, counts and gradient of every replica; float32 sums in another order. Each
    device of the axis `expert` holds half of the experts, or one where they are stored over two."""
    model = tiny_model.build(**EXPERTS | changes)
    mesh = tiny_model.mesh_of(devices, **sizes)
    step = jax.value_and_grad(model.loss, has_aux=True)
    params_R, batch_R = replicas(model, M)
    placed = place(model, mesh, params_R, batch_R)
    w_up = placed[0]["layers"]["moe"]["w_up"]  # [R, layers, E, D, F]
    assert w_up.addressable_shards[0].data.shape[2] == (1 if "logical_axis_rules" in changes else 2)
    found = jax.device_get(tiny_model.compiled(map_fn(step, mesh=mesh, num_replicas=M))(*placed))
    alone = tiny_model.compiled(step)
    for m in range(M):
        expected = alone(*jax.tree.map(lambda x_R, m=m: x_R[m], (params_R, batch_R)))
        one = jax.tree.map(lambda x_R, m=m: x_R[m], found)
        tiny_model.assert_close(one, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(one[0][1]["expert_counts"], expected[0][1]["expert_counts"])


def test_experts_that_an_open_axis_does_not_divide_are_refused_before_a_compile(devices):
    model = tiny_model.build(num_experts=3)
    mesh = tiny_model.mesh_of(devices, expert=2)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    with pytest.raises(ConfigError, match=r"expert parallelism 2 does not divide .*expert=3.*Use"):
        parameter_shardings(model.logical_axes, shapes, mesh, model.spec.rules)


def test_experts_over_an_axis_that_does_not_split_the_batch_are_refused():
    with pytest.raises(ConfigError, match=r"expert over tensor.*does not split the batch.*Use"):
        tiny_model.build(num_experts=4, logical_axis_rules=(("expert", ("tensor",)),))


def test_experts_stored_by_another_rule_than_computed_are_refused():
    """A device gathers experts over the axes after those of `expert`, and no others."""
    rules = (("stored_expert", ("fsdp",)),)
    with pytest.raises(ConfigError, match=r"stored_expert over fsdp, but expert over expert.*Use"):
        tiny_model.build(num_experts=4, logical_axis_rules=rules)
