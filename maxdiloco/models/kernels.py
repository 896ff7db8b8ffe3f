"""Which kernels a backend has for a model: those of attention, and of grouped products."""

import functools
import re

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxdiloco.errors import ConfigError
from maxdiloco.flags.config import Config

SPLASH_LANES = 128  # tiles are multiples of a TPU vector register's lanes
# What cuDNN's fused attention takes of jax.nn.dot_product_attention on every GPU that has it; heads
# of up to 256 features would need compute capability 9.0, and jax asks the machine that compiles.
CUDNN_HEAD_DIM = 128
CAPABILITY = 8  # of CUDA, from which on GPUs have cuDNN's attention and Triton's bfloat16 products


def choose_kernel(
    cfg: Config, backend: str, dtype: DTypeLike, *, shards: int = 1, compute_capability: str = ""
) -> str:
    """The kernel for a backend: `dot_product`, `cudnn` or `splash`.

    attention=flash is the backend's fused kernel or an error; autoselected, the fused kernel where
    it can compute this model and dot_product elsewhere.
    backend: `cpu`, `gpu` or `tpu`. dtype: of the heads. shards: devices a sequence is spread over.
    compute_capability: see has_kernels.
    Raises ConfigError when attention=flash has no kernel for the backend and model.
    """
    if cfg.attention == "dot_product":
        return "dot_product"
    length, head_dim = cfg.max_target_length, cfg.head_dim
    if backend == "tpu":
        kernel, suffix = "splash", " (splash on TPU)"
        by_lanes = f"max_target_length={length} is not a multiple of {SPLASH_LANES}"
        obstacles = {
            by_lanes: length % SPLASH_LANES,
            f"{by_lanes} * 2 * context {shards}": shards > 1
            and length % (2 * shards * SPLASH_LANES),
        }
    elif backend == "gpu":
        kernel, suffix = "cudnn", " (cuDNN on GPU)"
        dtype, half = jnp.dtype(dtype), (jnp.bfloat16, jnp.float16)
        value_dim = dict(cfg.latent_attention).get("v_head_dim", head_dim)
        obstacles = {
            f"the GPU's compute capability {compute_capability} is below {CAPABILITY}.0":
                not has_kernels(compute_capability),
            f"context parallelism {shards} spreads a sequence over devices": shards > 1,
            f"dtype={dtype} is not bfloat16 or float16": dtype not in half,
            f"head_dim={head_dim} is not a multiple of 8 up to {CUDNN_HEAD_DIM}":
                head_dim % 8 or head_dim > CUDNN_HEAD_DIM,
            f"v_head_dim={value_dim} is not the {head_dim} of queries and keys":
                value_dim != head_dim,
            f"max_target_length={length} is odd": length % 2,
            f"attn_logits_soft_cap={cfg.attn_logits_soft_cap} is not 0": cfg.attn_logits_soft_cap,
            "attention_sink=true has no place in its softmax": cfg.attention_sink,
        }  # fmt: skip
    else:
        kernel, suffix, obstacles = "", "", {f"the {backend} backend has no fused attention": True}
    obstacle = next((text for text, holds in obstacles.items() if holds), None)
    if obstacle is None:
        return kernel
    if cfg.attention == "flash":
        raise ConfigError(f"attention=flash cannot be used: {obstacle}{suffix}. Use autoselected.")
    return "dot_product"


def has_kernels(compute_capability: str) -> bool:
    """Whether a GPU has the kernels of attention and of grouped products (models/triton_ragged.py).

    compute_capability: of jax.Device, `8.0`, or AMD's name of a GPU, which has neither; "" is
    not known and taken for one that has both.
    """
    major = re.match(r"(\d+)\.\d+$", compute_capability)
    return not compute_capability or (major is not None and int(major[1]) >= CAPABILITY)


def check_cudnn(attention: str) -> None:
    """Raise ConfigError where JAX finds no cuDNN, which it looks for when it traces a program."""
    heads = jax.ShapeDtypeStruct((1, 2, 1, 8), jnp.bfloat16)
    fused = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(fused, heads, heads, heads)
    except RuntimeError as error:
        raise ConfigError(
            f"attention={attention} takes cuDNN's kernel on GPUs, but JAX says: {error} Install "
            f"the extra cuda13 (cuda12 for a driver before 580), or cudacompile on a machine "
            f"without a GPU: pip install -e '.[cuda13]'. Or use attention=dot_product."
        ) from error
