"""Experts laid out over a mesh compute what they compute on one device."""

import jax
import pytest
import tiny_model
from test_model_on_mesh import assert_as_alone, place, replicas
from tiers import corner

from maxdiloco.errors import ConfigError
from maxdiloco.parallel.replicas import map_fn
from maxdiloco.parallel.sharding import parameter_shardings

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


@pytest.mark.parametrize(("sizes", "M", "changes"), corner(MESHES, [MESHES[0], MESHES[3]]))
def test_replicas_with_experts_on_a_mesh_are_replicas_alone(devices, sizes, M, changes):
    """Loss, balance, counts and gradient of every replica. Each device of the axis `expert` holds
    half of the experts, or one where they are stored over two."""
    model = tiny_model.build(**EXPERTS | changes)
    mesh = tiny_model.mesh_of(devices, **sizes)
    step = jax.value_and_grad(model.loss, has_aux=True)
    both_R = replicas(model, M)
    placed = place(model, mesh, *both_R)
    w_up = placed[0]["layers"]["moe"]["w_up"]  # [R, layers, E, D, F]
    assert w_up.addressable_shards[0].data.shape[2] == (1 if "logical_axis_rules" in changes else 2)
    found = jax.device_get(tiny_model.compiled(map_fn(step, mesh=mesh, num_replicas=M))(*placed))
    assert_as_alone(found, model, *both_R)


def test_experts_that_an_open_axis_does_not_divide_are_refused_before_a_compile(devices):
    model = tiny_model.build(num_experts=3)
    mesh = tiny_model.mesh_of(devices, expert=2)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    with pytest.raises(ConfigError, match=r"expert parallelism 2 does not divide .*expert=3.*Use"):
        parameter_shardings(model.logical_axes, shapes, mesh, model.spec.rules)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("expert", ("tensor",)), "expert over tensor.*does not split the batch.*Use"),
        # A device gathers experts over the axes after those of `expert`, and no others.
        (("stored_expert", ("fsdp",)), "stored_expert over fsdp, but expert over expert.*Use"),
    ],
)
def test_a_rule_of_experts_that_no_device_can_follow_is_refused(rule, message):
    with pytest.raises(ConfigError, match=message):
        tiny_model.build(num_experts=4, logical_axis_rules=(rule,))
