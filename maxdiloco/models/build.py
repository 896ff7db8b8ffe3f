"""Settings of a model, and the model with the kernels of one kind of device."""

import dataclasses
from typing import Any

from maxdiloco.models import config
from maxdiloco.models.config import ModelConfig
from maxdiloco.models.kernels import choice
from maxdiloco.models.model import Model


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """The sizes and choices of a model, and the requests for its kernels.

    Attributes:
      config: sizes and choices of the decoder.
      attention: the key `attention`.
      matmul_precision: the key `matmul_precision`.
      quantization: the key `quantization`.
      max_length: tokens of a sequence in training.
    """

    config: ModelConfig
    attention: str
    matmul_precision: str
    quantization: str
    max_length: int

    @classmethod
    def from_keys(cls, keys: Any, *, backend: str) -> "ModelSettings":
        """Read the model's keys of a run.

        Args:
          keys: an object whose attributes are the keys of base.yml. Their values have been checked.
          backend: `cpu`, `gpu` or `tpu`, which decides the type for dtype=auto.
        """
        return cls(
            config.from_keys(keys, auto_dtype=choice.auto_dtype(backend)),
            keys.attention,
            keys.matmul_precision,
            keys.quantization,
            keys.max_target_length,
        )

    def with_config(self, **changes: Any) -> "ModelSettings":
        """Return settings with other values for some fields of `config`."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **changes))


def build_model(
    settings: ModelSettings,
    *,
    backend: str,
    length_shards: int = 1,
    compute_capability: str = "",
    device_kind: str = "",
) -> Model:
    """Build a model and choose its kernels.

    Args:
      settings: the model's settings.
      backend: `cpu`, `gpu` or `tpu`, as jax.default_backend() names it.
      length_shards: number of devices that a sequence is spread over.
      compute_capability: a GPU's compute capability, see choice.has_kernels.
      device_kind: `device_kind` of jax.Device. "" is unknown, and refuses nothing.

    Returns:
      The model.

    Raises:
      ConfigError: the backend lacks a kernel that was asked for, or 8-bit products.
    """
    kernels = choice.choose(
        settings.config,
        backend=backend,
        attention=settings.attention,
        length=settings.max_length,
        precision=settings.matmul_precision,
        quantization=settings.quantization,
        length_shards=length_shards,
        compute_capability=compute_capability,
        device_kind=device_kind,
    )
    return Model(settings.config, kernels)
