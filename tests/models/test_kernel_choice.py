"""Which kernels a backend, a GPU and a model have."""

import jax.numpy as jnp
import pytest
import tiny_model

from maxdiloco.errors import ConfigError
from maxdiloco.models import attention
from maxdiloco.models import spec as spec_lib

FITS = dict(head_dim=64, length=1024, dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    ("wanted", "backend", "changes", "kernel"),
    [
        ("autoselected", "cpu", {}, "dot_product"),
        ("autoselected", "gpu", {}, "triton"),
        ("autoselected", "tpu", {}, "splash"),
        ("flash", "gpu", {}, "triton"),
        ("flash", "tpu", {}, "splash"),
        ("dot_product", "gpu", {}, "dot_product"),
        ("dot_product", "tpu", {}, "dot_product"),
        ("autoselected", "gpu", dict(dtype=jnp.float32), "dot_product"),
        ("autoselected", "gpu", dict(head_dim=12), "triton"),
        ("autoselected", "gpu", dict(head_dim=256), "triton"),
        ("autoselected", "gpu", dict(head_dim=257), "dot_product"),
        ("autoselected", "gpu", dict(length=1000), "dot_product"),
        ("autoselected", "gpu", dict(shards=2), "dot_product"),
        ("autoselected", "gpu", dict(compute_capability="7.5"), "dot_product"),
        ("autoselected", "gpu", dict(compute_capability="8.0"), "triton"),
        ("autoselected", "gpu", dict(compute_capability="12.0"), "triton"),
        ("autoselected", "gpu", dict(compute_capability="gfx90a"), "triton"),
        ("autoselected", "tpu", dict(length=1000), "dot_product"),
        ("autoselected", "tpu", dict(dtype=jnp.float32), "splash"),
    ],
)
def test_kernel_follows_backend_and_model(wanted, backend, changes, kernel):
    assert attention.choose_kernel(wanted, backend, **FITS | changes) == kernel


@pytest.mark.parametrize(
    ("backend", "changes", "why"),
    [
        ("cpu", {}, "the cpu backend has no fused attention"),
        ("gpu", dict(dtype=jnp.float32), "dtype=float32 is not bfloat16 or float16"),
        ("gpu", dict(head_dim=320), "head_dim=320 is above 256"),
        ("gpu", dict(length=1000), "max_target_length=1000 is not a multiple of 16"),
        ("gpu", dict(shards=2), "context parallelism 2 spreads a sequence over devices"),
        ("gpu", dict(compute_capability="7.5"), r"compute capability 7.5 is below 8.0"),
        ("tpu", dict(length=1000), "max_target_length=1000 is not a multiple of 128"),
    ],
)
def test_flash_that_cannot_be_had_is_refused(backend, changes, why):
    with pytest.raises(ConfigError, match=f"attention=flash .*{why}.* Use autoselected"):
        attention.choose_kernel("flash", backend, **FITS | changes)


def test_the_products_of_experts_follow_the_gpu_too():
    for capability, kernel in (("7.5", ""), ("8.6", "triton")):
        found = spec_lib.from_config(
            tiny_model.config(), backend="gpu", compute_capability=capability
        )
        assert found.ragged_kernel == kernel
