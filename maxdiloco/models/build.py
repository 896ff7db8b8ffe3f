"""The model of a run's keys on one kind of device."""

from typing import Any

from maxdiloco.models import config
from maxdiloco.models.kernels import choice
from maxdiloco.models.model import Model


def build_model(
    cfg: Any,
    *,
    backend: str,
    length_shards: int = 1,
    compute_capability: str = "",
    device_kind: str = "",
) -> Model:
    """Build a model and choose its kernels.

    Args:
      cfg: an object whose attributes are the keys of base.yml. Their values have been checked.
      backend: `cpu`, `gpu` or `tpu`, as jax.default_backend() names it.
      length_shards: number of devices that a sequence is spread over.
      compute_capability: of a GPU, see choice.has_kernels.
      device_kind: of jax.Device. "" is not known and refuses nothing.

    Returns:
      The model.

    Raises:
      ConfigError: the backend lacks a kernel that was asked for, or 8-bit products.
    """
    model_config = config.from_keys(cfg, auto_dtype=choice.auto_dtype(backend))
    kernels = choice.choose(
        model_config,
        backend=backend,
        attention=cfg.attention,
        length=cfg.max_target_length,
        precision=cfg.matmul_precision,
        quantization=cfg.quantization,
        length_shards=length_shards,
        compute_capability=compute_capability,
        device_kind=device_kind,
    )
    return Model(model_config, kernels)
