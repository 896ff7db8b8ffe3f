"""The choice of kernels: one function, from the backend, the device and the model's shapes."""

import dataclasses
import logging
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxdiloco.errors import ConfigError
from maxdiloco.models.config import ModelConfig
from maxdiloco.models.devices import split_axes
from maxdiloco.models.kernels import (
    attention,
    grouped_matmul,
    matmul,
    private_jax,
    quantized,
    reductions,
    rotation,
    splash,
)
from maxdiloco.models.kernels.blockwise import Scores
from maxdiloco.models.kernels.matmul import Products
from maxdiloco.models.rope import Rotation
from maxdiloco.parallel import processor
from maxdiloco.parallel.sharding import Names

log = logging.getLogger(__name__)

# The largest head dimension that cuDNN's fused attention accepts through
# jax.nn.dot_product_attention on every GPU that has it. Heads of up to 256 features need compute
# capability 9.0, and jax checks the machine that compiles.
CUDNN_HEAD_DIM = 128
# The least CUDA compute capability with cuDNN's attention and Triton's bfloat16 products.
CAPABILITY = 8
DOCUMENT_OFFSETS = (9, 10)  # capabilities whose cuDNN accepts document offsets; 12 was not tried
# Tokens whose logits exist on a device at once, from benchmarks/results/step_time.md. bfloat16
# products are so fast on a CPU that the output of a chunk has to stay in the cache. A GPU adds one
# gradient of the head for each chunk, and has memory for GPU_CHUNK_LOGITS logits: its chunks are
# larger.
CHUNK_TOKENS, CPU_BF16_CHUNK_TOKENS, GPU_CHUNK_LOGITS = 1024, 256, 2**27
# The most layers that a GPU's program unrolls. A loop would copy the values that each layer keeps
# and reads. An unrolled step takes 0.9 times as long and compiles three times as long
# (benchmarks/results/gpu.md); the limit bounds the compile time.
MOST_UNROLLED = 48


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Implementations that a model runs with. The defaults are plain array code for any backend.

    All choices compute the same values up to rounding.

    Attributes:
      attention: `dot_product` (array code), `splash`, `cudnn`, `cudnn_documents` or `cudnn_public`.
      rotation: form of the rotary embedding, see rotation.py.
      products: how products of activations and weights are computed, see matmul.py.
      grouped_matmul: `xla`, `megablox` or `triton`, see grouped_matmul.py.
      token_exchange: how rows reach the devices of their experts: `all_gather` sends all tokens to
        all devices, which compute the rows of their experts in a buffer for the worst case.
        `all_gather_in_rounds` has a smaller buffer, which may be filled several times.
        `all_to_all` sends each row to the device of its expert (token_exchange.py).
      recompute_activations: recompute activation functions in the backward pass. XLA:GPU would
        store their intermediate values; writing and reading these takes longer.
      one_pass_logsumexp: see reductions.py.
      unroll_layers: write out the layers instead of a loop.
      head_chunk: tokens whose logits are formed at once, see models/loss.py.
    """

    attention: str = "dot_product"
    rotation: str = "concatenate"
    products: Products = Products()
    grouped_matmul: str = "xla"
    token_exchange: str = "all_gather"
    recompute_activations: bool = False
    one_pass_logsumexp: bool = False
    unroll_layers: bool = False
    head_chunk: int = CHUNK_TOKENS

    def describe(self) -> str:
        """Return the choices in one line for the log."""
        products, parts = self.products, []
        if products.quantization != quantized.NONE:
            parts.append(products.quantization)
        if products.float32_results:
            parts.append("summed in float32")
        if products.float32_operands:
            parts.append("float32 factors")
        if products.scattered_gradients:
            parts.append("reduce-scattered gradients")
        return (
            f"attention {self.attention}, products {', '.join(parts) or 'plain'}, "
            f"grouped products {self.grouped_matmul}, tokens by {self.token_exchange}, "
            f"layers {'unrolled' if self.unroll_layers else 'in a loop'}"
        )

    def dot_general(
        self, config: ModelConfig, names: Names, *, heads_first: bool = False
    ) -> Callable:
        """Return the product of activations and a weight with these logical axis names."""
        return matmul.dot_general(
            self.products, names, config.rules, config.dtype, heads_first=heads_first
        )

    def einsum_to_float32(self, equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
        """Return an einsum of activations and a weight, in float32."""
        return matmul.einsum_to_float32(self.products, equation, x, w)

    def grouped_product(self, x_AD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
        """Multiply consecutive groups of rows by one matrix each, see grouped_matmul.py."""
        return grouped_matmul.grouped_matmul(
            self.grouped_matmul, self.products, x_AD, w_EDF, sizes_E
        )

    def scores(self, config: ModelConfig, window: int) -> Scores:
        """Return how the attention logits of a layer with this window are formed."""
        return Scores(config.query_divisor, window, config.attn_logits_soft_cap, self.products)

    def attend(
        self,
        config: ModelConfig,
        window: int,
        q_BLNH: jax.Array,
        k_BLKH: jax.Array,
        v_BLKH: jax.Array,
        segment_ids_BL: jax.Array,
        sinks_N: jax.Array | None,
    ) -> jax.Array:
        """Compute the attention of sequences with themselves, see attention.py."""
        arrays = q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, sinks_N
        return attention.attend(self.attention, self.scores(config, window), config.rules, *arrays)

    def rotate(self, x_BLNH: jax.Array, angles: Rotation) -> jax.Array:
        """Apply the rotary embedding to queries or keys."""
        return rotation.rotate(self.rotation, x_BLNH, angles)

    def elementwise(self, fn: Callable) -> Callable:
        """Wrap a function of activations that works element by element.

        XLA:CPU rounds bfloat16 after every operation, in several instructions; the wrapped function
        then computes in float32 and rounds once.

        Args:
          fn: function of arrays of one shape and type.

        Returns:
          The function, with results in the type of its first argument.
        """

        def rounded_once(*arrays: jax.Array) -> jax.Array:
            dtype = arrays[0].dtype
            if self.products.float32_results:
                arrays = [x.astype(jnp.float32) for x in arrays]
            return fn(*arrays).astype(dtype)

        return jax.checkpoint(rounded_once) if self.recompute_activations else rounded_once

    def logsumexp(self, logits_V: jax.Array) -> jax.Array:
        """Return the log normalisers [...] of logits [..., V]."""
        if self.one_pass_logsumexp:
            return reductions.logsumexp_in_one_pass(logits_V, axis=-1)
        return jax.nn.logsumexp(logits_V, axis=-1)

    def target_logits(
        self, config: ModelConfig, logits_V: jax.Array, targets: jax.Array
    ) -> jax.Array:
        """Return the logit of each target, 0 for one outside the vocabulary.

        CPU devices that have the whole vocabulary gather the logit, because for the sum XLA:CPU
        would write and read all logits.
        """
        (vocabulary,) = split_axes(("vocab_act",), config.rules)
        if self.products.float32_results and not vocabulary:
            return reductions.gather_targets(logits_V, targets)
        return reductions.mask_targets(logits_V, targets)


def auto_dtype(backend: str) -> DTypeLike:
    """Return the type of activations for dtype=auto; few CPUs compute in bfloat16."""
    return jnp.float32 if backend == "cpu" else jnp.bfloat16


def choose(
    config: ModelConfig,
    *,
    backend: str,
    attention: str,
    length: int,
    precision: str = "default",
    quantization: str = quantized.NONE,
    length_shards: int = 1,
    compute_capability: str = "",
    device_kind: str = "",
) -> Kernels:
    """Choose the kernels for a model on one kind of device, and log the choice.

    Args:
      config: the model.
      backend: `cpu`, `gpu` or `tpu`, as jax.default_backend() names it.
      attention: the key `attention`: `flash`, `dot_product` or `autoselected`.
      length: tokens of a sequence.
      precision: the key `matmul_precision`.
      quantization: the key `quantization`.
      length_shards: number of devices that a sequence is spread over.
      compute_capability: a GPU's compute capability, see has_kernels.
      device_kind: `device_kind` of jax.Device. "" is unknown, and refuses nothing.

    Returns:
      The kernels.

    Raises:
      ConfigError: the backend lacks a kernel that was asked for, or 8-bit products.
    """
    quantized.check_device(quantization, backend, device_kind, compute_capability)
    kernel = choose_attention(
        config,
        attention,
        backend,
        length=length,
        shards=length_shards,
        compute_capability=compute_capability,
    )
    products = Products(precision=precision, quantization=quantization)
    match backend:
        case "cpu":
            chosen = _cpu_kernels(config, kernel, products)
        case "gpu":
            chosen = _gpu_kernels(config, kernel, products, compute_capability)
        case "tpu":
            chosen = _tpu_kernels(config, kernel, products)
        case _:
            raise ValueError(f"backend={backend}")
    log.info("kernels for %s: %s", backend, chosen.describe())
    return chosen


def _cpu_kernels(config: ModelConfig, attention: str, products: Products) -> Kernels:
    is_half = config.dtype == jnp.bfloat16
    is_wide = is_half and processor.float32_is_faster(processor.host_cpuinfo())
    return Kernels(
        attention=attention,
        products=dataclasses.replace(products, float32_results=is_half, float32_operands=is_wide),
        token_exchange="all_to_all",
        head_chunk=CPU_BF16_CHUNK_TOKENS if is_half and not is_wide else CHUNK_TOKENS,
    )


def _gpu_kernels(
    config: ModelConfig, attention: str, products: Products, compute_capability: str
) -> Kernels:
    return Kernels(
        attention=attention,
        rotation="reverse",
        products=products,
        grouped_matmul="triton" if has_kernels(compute_capability) else "xla",
        recompute_activations=True,
        one_pass_logsumexp=True,
        unroll_layers=config.num_layers <= MOST_UNROLLED,
        head_chunk=max(CHUNK_TOKENS, GPU_CHUNK_LOGITS // config.vocab_size),
    )


def _tpu_kernels(config: ModelConfig, attention: str, products: Products) -> Kernels:
    is_exact = attention == "splash" and config.dtype == jnp.bfloat16
    return Kernels(
        attention=attention,
        rotation="permute" if is_exact else "concatenate",
        products=dataclasses.replace(products, scattered_gradients=True),
        grouped_matmul="megablox",
        token_exchange="all_gather_in_rounds",
    )


def choose_attention(
    config: ModelConfig,
    wanted: str,
    backend: str,
    *,
    length: int,
    shards: int = 1,
    compute_capability: str = "",
) -> str:
    """Choose the attention kernel.

    `flash` is the backend's fused kernel or an error. `autoselected` is the fused kernel if it can
    compute this model, and otherwise `dot_product`.

    Args:
      config: the model.
      wanted: the key `attention`.
      backend: `cpu`, `gpu` or `tpu`.
      length: tokens of a sequence.
      shards: number of devices that a sequence is spread over.
      compute_capability: a GPU's compute capability, see has_kernels.

    Returns:
      A value of Kernels.attention.

    Raises:
      ConfigError: attention=flash, without a kernel for the backend and the model.
    """
    if wanted == "dot_product":
        return "dot_product"
    match backend:
        case "tpu":
            kernel, suffix = "splash", " (splash on TPU)"
            obstacle = _splash_obstacle(length, shards)
        case "gpu":
            kernel, suffix = _cudnn_kernel(compute_capability), " (cuDNN on GPU)"
            obstacle = _cudnn_obstacle(config, length, shards, compute_capability)
        case _:
            kernel, suffix, obstacle = "", "", f"the {backend} backend has no fused attention"
    if not obstacle:
        return kernel
    if wanted == "flash":
        raise ConfigError(f"attention=flash cannot be used: {obstacle}{suffix}. Use autoselected.")
    return "dot_product"


def _splash_obstacle(length: int, shards: int) -> str:
    """Return the reason why splash attention cannot be used, or ""."""
    lanes = splash.LANES
    if length % lanes:
        return f"max_target_length={length} is not a multiple of {lanes}"
    if shards > 1 and length % (2 * shards * lanes):
        return f"max_target_length={length} is not a multiple of {lanes} * 2 * context {shards}"
    return ""


def _cudnn_kernel(compute_capability: str) -> str:
    if private_jax.cudnn_module() is None:
        return "cudnn_public"
    return "cudnn_documents" if _major(compute_capability) in DOCUMENT_OFFSETS else "cudnn"


def _cudnn_obstacle(config: ModelConfig, length: int, shards: int, compute_capability: str) -> str:
    """Return the reason why cuDNN's attention cannot be used, or ""."""
    head_dim = config.head_dim
    value_dim = config.latent.v_head_dim if config.latent else head_dim
    if not has_kernels(compute_capability):
        return f"the GPU's compute capability {compute_capability} is below {CAPABILITY}.0"
    if shards > 1:
        return f"context parallelism {shards} spreads a sequence over devices"
    if config.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype={jnp.dtype(config.dtype)} is not bfloat16 or float16"
    if head_dim % 8 or head_dim > CUDNN_HEAD_DIM:
        return f"head_dim={head_dim} is not a multiple of 8 up to {CUDNN_HEAD_DIM}"
    if value_dim != head_dim:
        return f"v_head_dim={value_dim} is not the {head_dim} of queries and keys"
    if length % 2:
        return f"max_target_length={length} is odd"
    if config.attn_logits_soft_cap:
        return f"attn_logits_soft_cap={config.attn_logits_soft_cap} is not 0"
    if config.attention_sink:
        return "attention_sink=true is not supported by its softmax"
    return ""


def has_kernels(compute_capability: str) -> bool:
    """Tell whether a GPU has cuDNN's attention and the grouped products of triton_grouped.py.

    Args:
      compute_capability: `compute_capability` of jax.Device, such as `8.0`; for AMD the name of a
        GPU, which has neither. "" is unknown, and treated as a GPU that has both.
    """
    return not compute_capability or _major(compute_capability) >= CAPABILITY


def _major(compute_capability: str) -> int:
    """Return 8 for `8.0`; 0 for a name that is not CUDA's."""
    major = re.match(r"(\d+)\.\d+$", compute_capability)
    return int(major[1]) if major else 0
