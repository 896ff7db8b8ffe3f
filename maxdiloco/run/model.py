"""The model of a config on the devices of a mesh, and where its parameters are."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from maxdiloco.config import config
from maxdiloco.data import tokenizer as tokenizers
from maxdiloco.data.tokenizer_base import Tokenizer
from maxdiloco.models import devices
from maxdiloco.models.build import build_model
from maxdiloco.models.kernels import cudnn, quantized
from maxdiloco.models.model import Model
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.parallel.sharding import parameter_shardings, rules_with


def length_shards(cfg: config.Config, mesh: Mesh) -> int:
    """Number of devices that share a sequence."""
    return devices.shards_on(mesh, rules_with(cfg.logical_axis_rules))


def build(cfg: config.Config, mesh: Mesh) -> Model:
    """The model for the devices of a mesh.

    Raises ConfigError for a kernel or a package that they or this machine lack, and for sequences
    that they cannot share.
    """
    device = mesh.devices.flat[0]
    on_gpus = mesh_lib.on_gpus(mesh)
    shards = length_shards(cfg, mesh)
    devices.check(cfg.max_target_length, shards)
    model = build_model(
        cfg,
        backend="gpu" if on_gpus else device.platform,
        length_shards=shards,
        compute_capability=device.compute_capability if on_gpus else "",
        device_kind=device.device_kind,
    )
    if model.kernels.attention.startswith("cudnn"):
        cudnn.check_installed(cfg.attention)
    quantized.check_package(cfg.quantization)
    return model


def for_decoding(cfg: config.Config, mesh: Mesh, model: Model) -> Model:
    """`model`, built from cfg, for prompts of any length and one token after the other.

    These cannot be shared: devices that share sequences take prompts of their own.
    """
    table = dict(model.config.rules)
    if devices.shards_on(mesh, model.config.rules) == 1:
        return model
    batch = ("batch", (*table["batch"], *table["length"]))
    rules = (*cfg.logical_axis_rules, batch, ("length", ()))
    return build(config.from_dict(cfg.as_dict() | {"logical_axis_rules": rules}), mesh)


def parameters(model: Model, mesh: Mesh) -> Any:
    """One set of parameters as ShapeDtypeStructs, sharded within a slice, alike in all slices."""
    shapes = model.shapes
    shardings = parameter_shardings(model.logical_axes, shapes, mesh, model.config.rules)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def token_bytes(cfg: config.Config, tokenizer: Tokenizer | None = None) -> np.ndarray:
    """Bytes of text that each token of a run stands for, int32 [V]; synthetic data are no text.
    tokenizer: None: the one that cfg names."""
    if cfg.dataset_type == "synthetic":
        return np.zeros(cfg.vocab_size, np.int32)
    tokenizer = tokenizer or tokenizers.build(vars(cfg), cfg.vocab_size)
    return np.pad(tokenizer.token_bytes(), (0, cfg.vocab_size - tokenizer.vocab_size))
