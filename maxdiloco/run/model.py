"""Build the model of a run for the devices of a mesh, and shard its parameters."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from maxdiloco.data import tokenizer as tokenizers
from maxdiloco.data.tokenizer import TokenizerSettings
from maxdiloco.data.tokenizer_base import Tokenizer
from maxdiloco.models import devices
from maxdiloco.models.build import ModelSettings, build_model
from maxdiloco.models.kernels import cudnn, quantized
from maxdiloco.models.model import Model
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.parallel.sharding import parameter_shardings


def build(settings: ModelSettings, mesh: Mesh) -> Model:
    """Build the model for the devices of a mesh.

    Raises:
      ConfigError: the devices or this machine lack a kernel or a package, or the devices cannot
        share the sequences.
    """
    device = mesh.devices.flat[0]
    shards = devices.shards_on(mesh, settings.config.rules)
    devices.check(settings.max_length, shards)
    model = build_model(
        settings,
        backend=mesh_lib.backend(mesh),
        length_shards=shards,
        compute_capability=device.compute_capability if mesh_lib.on_gpus(mesh) else "",
        device_kind=device.device_kind,
    )
    if model.kernels.attention.startswith("cudnn"):
        cudnn.check_installed(settings.attention)
    quantized.check_package(settings.quantization)
    return model


def build_for_decoding(settings: ModelSettings, mesh: Mesh, model: Model) -> Model:
    """Return the given model for prompts of any length.

    A prompt cannot be divided, so devices that share sequences in training each get whole prompts.

    Args:
      settings: from which `model` was built.
      mesh: the devices.
      model: the model that is trained.
    """
    if devices.shards_on(mesh, settings.config.rules) == 1:
        return model
    table = dict(settings.config.rules)
    table |= {"batch": (*table["batch"], *table["length"]), "length": ()}
    return build(settings.with_config(rules=tuple(table.items())), mesh)


def parameters(model: Model, mesh: Mesh) -> Any:
    """Return one replica's parameters as ShapeDtypeStructs, sharded equally in each slice."""
    shapes = model.shapes
    shardings = parameter_shardings(model.logical_axes, shapes, mesh, model.config.rules)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def token_bytes(settings: TokenizerSettings, tokenizer: Tokenizer | None = None) -> np.ndarray:
    """Return the bytes of text that each token stands for, int32 [V]; 0 with synthetic data.

    Args:
      settings: settings of the tokenizer.
      tokenizer: tokenizer of the run; None: the tokenizer that the settings name.
    """
    if settings.dataset_type == "synthetic":
        return np.zeros(settings.vocab_size, np.int32)
    tokenizer = tokenizer or tokenizers.build(vars(settings), settings.vocab_size)
    return np.pad(tokenizer.token_bytes(), (0, settings.vocab_size - tokenizer.vocab_size))
