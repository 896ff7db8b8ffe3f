"""Rows of tokens in rounds, by an all-to-all or a gather, against all tokens in one buffer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_model_on_mesh as on_mesh
import tiny_model
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import full

from maxdiloco.models.kernels import token_exchange
from maxdiloco.models.kernels.expert_rows import Rows, rows_of_round
from maxdiloco.parallel.replicas import map_fn

# N devices  E experts  L experts of a device  A rows of a device  R rows of a buffer


def counts_of(sent):
    """[N, E] from each device's list of experts."""
    return np.array([np.bincount(experts, minlength=4) for experts in sent], np.int32)


# Two devices with two experts each. Device 0 has 5 rows, device 1 has 6, one of them nobody's.
SENT = [[0, 0, 1, 3, 3], [0, 1, 1, 1, 2]]
ROWS = [[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]]


def test_a_round_has_the_rows_of_a_receiver_by_expert_then_by_sender():
    """Receiver 0: expert 0 has 10, 11, 20, expert 1 has 12, 21, 22, 23; in rounds of 3. Receiver 1:
    expert 2 has 24, expert 3 has 13, 14."""
    counts_NE = counts_of(SENT)
    assert token_exchange.num_rounds(counts_NE, 3) == 3
    assert token_exchange.num_rounds(counts_NE, 7) == 1
    expected = [[[10, 11, 20], [12, 21, 22], [23]], [[24, 13, 14], [], []]]
    sizes = [[[3, 0], [0, 3], [0, 1]], [[1, 2], [0, 0], [0, 0]]]
    for number in range(3):
        plans = [token_exchange.slices_of_round(counts_NE, me, number, 3) for me in (0, 1)]
        buffers = np.zeros((2, 3), int)
        for me, (out, _) in enumerate(plans):
            for to in (0, 1):
                for first, size, there in zip(*(np.asarray(x[to]) for x in out), strict=True):
                    buffers[to, there : there + size] = ROWS[me][first : first + size]
        for to, (_, back) in enumerate(plans):
            rows = expected[to][number]
            assert buffers[to].tolist() == rows + [0] * (3 - len(rows))
            assert np.sum(back.sizes_NL, axis=0).tolist() == sizes[to][number]


def test_rows_come_back_to_where_they_were(devices):
    """Each round brings back its rows and zeros elsewhere: the sum is the rows, but for nobody's.
    The gradient of an exchange is the exchange back."""
    mesh = Mesh(np.array(devices[:2]), ("expert",))
    counts_NE = jnp.asarray(counts_of(SENT))
    rng = np.random.default_rng(0)
    x_NAD = rng.standard_normal((2, 6, 3)).astype(np.float32)

    def there_and_back(x_AD):
        me = jax.lax.axis_index("expert")
        total = 0
        for number in range(3):
            out, back = token_exchange.slices_of_round(counts_NE, me, number, 3)
            move = functools.partial(token_exchange.exchange, ("expert",))
            total += move((3, 6), jnp.square(move((6, 3), x_AD[0], out, back)), back, out)
        return total[None]

    run = jax.shard_map(
        there_and_back, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False
    )
    towards = rng.standard_normal(x_NAD.shape).astype(np.float32)
    found, pull = jax.vjp(jax.jit(run), jax.device_put(x_NAD, NamedSharding(mesh, P("expert"))))
    (gradient,) = pull(towards)
    x_NAD[:, 5:] = 0
    np.testing.assert_array_equal(found, x_NAD**2)
    np.testing.assert_allclose(gradient, 2 * x_NAD * towards, rtol=1e-6)


def test_rounds_have_each_row_once_with_the_rows_of_its_expert():
    """Experts have 1, 4 and 2 of 7 rows, and the eighth choice is another device's. In rounds of 3
    expert 1 has rows in two of them."""
    order_A = np.array([5, 0, 2, 3, 7, 1, 4, 6], np.int32)
    inverse_A = np.argsort(order_A).astype(np.int32)
    rows = Rows(order_A, inverse_A, jnp.array([1, 4, 2]))
    found = [rows_of_round(rows, number, 3) for number in range(3)]
    assert [part.sizes_E.tolist() for part in found] == [[1, 2, 0], [0, 2, 1], [0, 0, 1]]
    assert [part.order_A[: sum(part.sizes_E)].tolist() for part in found] == [
        [5, 0, 2], [3, 7, 1], [4],
    ]  # fmt: skip
    for part in found:
        here = [(a, int(part.order_A[a])) for a in range(int(sum(part.sizes_E)))]
        inverse = enumerate(part.inverse_A.tolist())
        assert sorted((a, choice) for choice, a in inverse if a < sum(part.sizes_E)) == here


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        (dict(diloco=2, expert=4), {}),
        full(dict(diloco=1, fsdp=2, expert=2), {}),
        full(dict(diloco=1, expert=2, tensor=2), {}),
        full(dict(diloco=1, fsdp=2, expert=2), on_mesh.SHARED_OUT | dict(dtype="bfloat16")),
    ],
)
@pytest.mark.parametrize("policy", ["minimal", full("full")])
def test_tokens_in_rounds_are_tokens_by_all_gather(devices, sizes, changes, policy):
    """Two replicas' losses to 1e-6 and gradients, with biases and padding. The routers' biases send
    most tokens to experts 0 and 1, whose devices need more than one round."""
    changes = on_mesh.EXPERTS | dict(remat_policy=policy) | changes
    model = tiny_model.build(**changes)
    mesh = tiny_model.mesh_of(devices, **sizes)
    params_R, batch_R = on_mesh.replicas(model, 2)
    routed = params_R["layers"]["moe"]["routed_bias"]
    routed[..., :2] += 0.5
    args = on_mesh.place(model, mesh, params_R, batch_R)

    def run(exchange):
        kernels = tiny_model.with_kernels(model, token_exchange=exchange)
        step = map_fn(jax.value_and_grad(kernels.loss, has_aux=True), mesh=mesh)
        equations = list(tiny_model.equations(step, *args))
        names = {one.primitive.name for one in equations}
        products = [one for one in equations if one.primitive.name.startswith("ragged_dot")]
        rows = {one.invars[0].aval.shape[0] for one in products}
        return jax.device_get(tiny_model.compiled(step)(*args)), names, rows

    ((expected_loss, expected_aux), expected), by_gather, all_rows = run("all_gather")
    assert not {"all_to_all", "while"} & by_gather
    choices = 4 * 12 * model.config.num_experts_per_tok  # of a replica, on N devices
    N, of_batch = sizes["expert"], sizes["expert"] * sizes.get("fsdp", 1)
    rounding = 0.02 if "dtype" in changes else 1e-5
    atol = rounding * max(np.abs(x).max() for x in jax.tree.leaves(expected))
    for exchange in ("all_to_all", "all_gather_in_rounds"):
        ((loss, aux), gradient), names, rows = run(exchange)
        assert ("all_to_all" in names) == (exchange == "all_to_all")
        assert token_exchange.buffer_rows(choices // of_batch, N) in rows
        assert choices // of_batch * N in all_rows - rows
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
        np.testing.assert_array_equal(aux["expert_counts"], expected_aux["expert_counts"])
        of_first = aux["expert_counts"][..., :2].sum(-1) / aux["expert_counts"].sum(-1)
        assert of_first.min() > 0.5 * token_exchange.ROOM, "one round would do"
        tiny_model.assert_close(gradient, expected, rtol=rounding, atol=atol)
