"""Sequences whose tokens are spread over devices."""
# M replicas  B sequences  L tokens  N query heads  K key/value heads  H head dim

import jax
import numpy as np
import pytest
import test_attention as plain_attention
import tiny_model

from maxdiloco.errors import ConfigError
from maxdiloco.models import attention, over_length
from maxdiloco.parallel.replicas import map_fn
from maxdiloco.parallel.sharding import DEFAULT_RULES


def test_each_device_has_an_early_and_a_late_chunk():
    """Llama 3 (2407.21783), 3.3.2: rank i has chunks i and 2 C - 1 - i, here of two tokens."""
    assert over_length.positions(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert over_length.positions(5, 1).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("shards", [2, 3])
def test_keys_come_back_in_the_order_of_the_text(shards):
    """And a part is what the device has."""
    x_BLH = np.arange(48).reshape(2, 12, 2)
    there = x_BLH[:, over_length.positions(12, shards)]
    np.testing.assert_array_equal(over_length.by_text(there, shards), x_BLH)
    for shard, of_device in enumerate(np.split(there, shards, axis=1)):
        np.testing.assert_array_equal(over_length.part(x_BLH, shard, shards), of_device)


@pytest.mark.parametrize(("kernel", "soft_cap"), [("dot_product", 0.0), ("splash", 0.7)])
def test_a_kernel_sees_the_keys_of_all_devices(devices, monkeypatch, kernel, soft_cap):
    """Context and gradients of 512 tokens on two devices, two replicas and a vmap over them, heads
    over tensor: those of one device. Windows and documents reach over chunks of 128."""
    mesh = tiny_model.mesh_of(devices, diloco=2, context=2, tensor=2)
    monkeypatch.setattr(attention, "splash", plain_attention.SPLASH)
    options = dict(soft_cap=soft_cap, window=100, rules=DEFAULT_RULES, precision="default")
    sinks_N = np.array([0.5, -1.0, 2.0, 0.0], np.float32)

    def attend(q, k, v, segments):
        by_device = [x[:, over_length.positions(512, 2)] for x in (q, k, v)]
        context = attention.attend(kernel, *by_device, segments, sinks_N, **options)
        return over_length.by_text(context, 2)

    def alone(*args):
        return attention.attend("dot_product", *args, sinks_N, **options)

    inputs = (plain_attention.inputs(512, B=1, seed=m) for m in range(4))
    args = [np.stack(x) for x in zip(*inputs, strict=True)]
    on_mesh = map_fn(plain_attention.with_gradient(attend), mesh=mesh, num_replicas=4)
    expected = tiny_model.compiled(jax.vmap(plain_attention.with_gradient(alone)))(*args)
    tiny_model.assert_close(jax.jit(on_mesh)(*args), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("length", "shards", "remedy"),
    [(1000, 3, "max_target_length=996"), (4, 4, "max_target_length=8")],
)
def test_a_length_that_its_devices_cannot_share_is_refused(length, shards, remedy):
    found = rf"max_target_length={length} is not a multiple of 2 \* context {shards} = .*{remedy}"
    with pytest.raises(ConfigError, match=found):
        over_length.check(length, shards)
    over_length.check(24, shards)
    over_length.check(7, 1)
