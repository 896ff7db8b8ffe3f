"""The model laid out over a mesh computes what it computes on one device."""

import contextlib
import functools
import re

import jax
import numpy as np
import options
import pytest
import tiny_model
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import corner, full

from maxdiloco.errors import ConfigError
from maxdiloco.parallel.replicas import map_fn
from maxdiloco.parallel.sharding import parameter_shardings
from maxdiloco.parallel.sharding import spec as spec_of

# R replicas  B sequences per replica  L tokens


def replicas(model, M):
    """Unequal parameters and batches, leaves [R, ...]."""
    params = [tiny_model.params_of(model, seed=m) for m in range(M)]
    batches = [tiny_model.batch(seed=m) for m in range(M)]
    return [jax.tree.map(lambda *x: np.stack(x), *trees) for trees in (params, batches)]


def place(model, mesh, params_R, batch_R):
    """Parameters and sequences as the rules have them, replicas over diloco."""
    one, rules = jax.tree.map(lambda x_R: x_R[0], params_R), model.config.rules
    shardings = parameter_shardings(model.logical_axes, one, mesh, rules)

    def over_replicas(x_R, sharding):
        return jax.device_put(x_R, NamedSharding(mesh, P("diloco", *sharding.spec)))

    rows = NamedSharding(mesh, spec_of(("batch", "length"), rules, without=["diloco"]))
    batch_R = {name: over_replicas(x_R, rows) for name, x_R in batch_R.items()}
    return jax.tree.map(over_replicas, params_R, shardings), batch_R


SHARED_OUT = dict(logical_axis_rules=(("stored_expert", ("expert", "fsdp")),))
WHOLE_KEYS = dict(logical_axis_rules=(("kv_heads", ()), ("kv_act", ())))
TWO_FOR_FOUR = dict(logical_axis_rules=(("kv_heads", ()),))
SOFT_CAP = dict(attn_logits_soft_cap=5.0)
GPT_OSS = options.TOGETHER["as gpt-oss"] | options.TWO_KINDS
DEEPSEEK = options.TOGETHER["as DeepSeek"]
RANKS = DEEPSEEK["latent_attention"] | dict(q_lora_rank=6, kv_lora_rank=4)
DEEPSEEK = DEEPSEEK | dict(latent_attention=RANKS)
EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, base_moe_mlp_dim=8, shared_experts=1,
    base_num_decoder_layers=2, first_num_dense_layers=1, mlp_bias=True,
    router=dict(
        score_function="sigmoid", normalise_weights=True, balance_bias=True, logit_bias=True,
        num_groups=2,
    ),
    load_balance_loss_weight=0.1, router_z_loss_weight=0.01,
)  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "M", "changes"),
    [
        (dict(diloco=2, fsdp=2, tensor=2), 2, SOFT_CAP),
        # Both replicas in one slot, under a vmap.
        full(dict(diloco=1, data=2, fsdp=2), 2, SOFT_CAP),
        # Sinks, biases and local layers; a norm over heads that lie on two devices.
        full(dict(diloco=1, fsdp=2, tensor=2), 1, GPT_OSS),
        full(dict(diloco=1, fsdp=2, tensor=2), 1, options.TOGETHER["as OLMo 2 and Llama 3.1"]),
        # Of 64 rows those of the second device are padding alone.
        (dict(diloco=1, fsdp=2, tensor=2), 1, dict(padded_vocab_size=64, final_logits_soft_cap=2)),
        full(dict(diloco=1, fsdp=2, tensor=2), 1, DEEPSEEK),
        # Of 12 tokens each device has two chunks of 3, or of 2; all of them cut documents in two.
        full(dict(diloco=2, fsdp=2, context=2), 2, SOFT_CAP | dict(sliding_window_size=4)),
        (dict(diloco=1, context=3, tensor=2), 2, GPT_OSS | dict(base_emb_dim=12)),
        # Keys and values of all heads on each device, beside some of the query heads.
        (dict(diloco=1, context=2, tensor=2), 1, WHOLE_KEYS),
        full(dict(diloco=1, context=2, tensor=4), 1, TWO_FOR_FOUR),
        (dict(diloco=2, expert=2, tensor=2), 2, EXPERTS),
        full(dict(diloco=1, fsdp=2, expert=2), 2, EXPERTS),
        full(dict(diloco=1, fsdp=2, expert=2), 2, EXPERTS | SHARED_OUT),
        full(dict(diloco=1, expert=2, context=2), 2, EXPERTS),
    ],
)
@pytest.mark.parametrize("scattered", corner([False, True], [True]))
def test_replicas_on_a_mesh_are_replicas_alone(devices, sizes, M, changes, scattered):
    """Loss and gradient of every replica, float32 sums in another order. scattered: as on a TPU."""
    model = tiny_model.build(remat_policy="minimal", **changes)
    mesh = tiny_model.mesh_of(devices, **sizes)
    both_R = replicas(model, M)
    as_on_tpu = tiny_model.with_kernels(model, scattered_gradients=scattered)
    as_on_tpu = jax.value_and_grad(as_on_tpu.loss, has_aux=True)
    on_mesh = tiny_model.compiled(map_fn(as_on_tpu, mesh=mesh))
    placed = place(model, mesh, *both_R)
    if model.config.num_experts > 1:  # half of them on a device, or a quarter: [R, layers, E, D, F]
        here = placed[0]["layers"]["moe"]["w_up"].addressable_shards[0].data.shape[2]
        assert here == (1 if "logical_axis_rules" in changes else 2)
    found = jax.device_get(on_mesh(*placed))
    alone = tiny_model.compiled(jax.value_and_grad(model.loss, has_aux=True))
    for m in range(M):
        one, *args = jax.tree.map(lambda x_R, m=m: x_R[m], (found, *both_R))
        tiny_model.assert_close(one, alone(*args), rtol=1e-4, atol=1e-4)


def collectives(text):
    """(computation is the entry, result type) of each collective of a compiled program."""
    entry = False
    for line in text.splitlines():
        if line.endswith("{") and "(" in line and " = " not in line:
            entry = line.startswith("ENTRY")
        found = re.search(r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all)\(", line)
        if found:
            yield entry, found[1]


def test_vocabulary_sized_weights_cross_devices_once_a_step(devices):
    """Head and embedding, gathered before the loops over chunks and layers; their gradients,
    summed on each device first, reduced after them. The layers' own gathers are seen in loops."""
    model = tiny_model.build(vocab_size=96, remat_policy="full")
    mesh = tiny_model.mesh_of(devices, fsdp=4)
    step = map_fn(jax.value_and_grad(model.loss, has_aux=True), mesh=mesh)
    args = place(model, mesh, *replicas(model, 1))
    moved = list(collectives(tiny_model.compiled(step).lower(*args).compile().as_text()))
    assert any(not entry and "[1,16,24]" in types for entry, types in moved)
    vocabulary = [(entry, types) for entry, types in moved if "96" in types]
    assert all(entry for entry, _ in vocabulary)
    assert len(vocabulary) == 4


def test_losses_of_a_split_batch_are_summed_over_devices_after_the_loops(devices):
    """The forward pass has no other collectives, so a device never waits inside a loop."""
    model = tiny_model.build()
    mesh = tiny_model.mesh_of(devices, data=2)
    args = place(model, mesh, *replicas(model, 1))
    program = tiny_model.compiled(map_fn(model.loss, mesh=mesh)).lower(*args).compile()
    moved = list(collectives(program.as_text()))
    assert moved and all(entry for entry, _ in moved)


@pytest.mark.parametrize(("sizes", "reads"), [(dict(data=2), True), (dict(tensor=2), False)])
def test_a_target_s_logit_is_read_where_a_device_has_the_whole_vocabulary(devices, sizes, reads):
    """On CPUs with bfloat16 activations. Both meshes have the loss of one device."""
    model = tiny_model.with_kernels(tiny_model.build(), float32_results=True)
    mesh = tiny_model.mesh_of(devices, **sizes)
    both_R = replicas(model, 1)
    loss = map_fn(model.loss, mesh=mesh)
    rows_of_logits = [
        equation
        for equation in tiny_model.equations(loss, *both_R)
        if equation.primitive.name == "gather" and equation.invars[0].aval.ndim == 5
    ]
    assert bool(rows_of_logits) is reads
    found = tiny_model.compiled(loss)(*place(model, mesh, *both_R))
    expected = tiny_model.compiled(model.loss)(*jax.tree.map(lambda x_R: x_R[0], both_R))
    tiny_model.assert_close(jax.tree.map(lambda x_R: x_R[0], found), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "at_once"), [(dict(fsdp=2), 1), (dict(data=2), 3), (dict(tensor=2), 3)]
)
def test_layers_whose_weights_are_gathered_stay_a_loop(devices, sizes, at_once):
    """So that a device never has the whole weights or gradients of all; others are written out."""
    model = tiny_model.with_kernels(tiny_model.build(base_num_decoder_layers=3), unroll_layers=True)
    mesh = tiny_model.mesh_of(devices, **sizes)
    step = map_fn(jax.value_and_grad(model.loss, has_aux=True), mesh=mesh)
    scans = {
        equation.params["unroll"]
        for equation in tiny_model.equations(step, *replicas(model, 1))
        if equation.primitive.name == "scan" and equation.params["length"] == 3
    }
    assert scans == {at_once}


def test_experts_that_no_device_can_hold_are_refused(devices):
    """Before a compile. A device gathers experts over the axes after those of `expert` only."""
    model = tiny_model.build(num_experts=3)
    mesh = tiny_model.mesh_of(devices, expert=2)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    with pytest.raises(ConfigError, match=r"expert parallelism 2 .*expert=3"):
        parameter_shardings(model.logical_axes, shapes, mesh, model.config.rules)
    for name, axis in (("expert", "tensor"), ("stored_expert", "fsdp")):
        with pytest.raises(ConfigError, match=f"{name} over {axis}"):
            tiny_model.build(num_experts=4, logical_axis_rules=((name, (axis,)),))


@pytest.mark.parametrize(
    ("rules", "sizes", "changes", "named"),
    [
        ((("vocab", ("tensor", "fsdp")),), dict(fsdp=2), {}, "vocab over fsdp"),
        ((("length", ("context", "tensor")),), dict(tensor=2), {}, "vocab over tensor"),
        ((("mlp", ("fsdp", "tensor")), ("embed", ())), dict(fsdp=2), EXPERTS, "mlp over fsdp"),
        ((("mlp", ("fsdp", "tensor")), ("embed", ())), dict(fsdp=2), {}, ""),
    ],
)
def test_rules_that_would_sum_over_different_tokens_are_refused(
    devices, rules, sizes, changes, named
):
    """With one device on the axis they are valid, and so is `mlp` without experts."""
    model = tiny_model.build(**changes, logical_axis_rules=rules)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    args = model.logical_axes, shapes
    place = functools.partial(parameter_shardings, *args, rules=model.config.rules)
    place(mesh=tiny_model.mesh_of(devices, data=2))
    refused = pytest.raises(ConfigError, match=named) if named else contextlib.nullcontext()
    with refused:
        place(mesh=tiny_model.mesh_of(devices, **sizes))
