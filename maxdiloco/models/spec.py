"""The sizes and choices of a model, read from the config; which kernels a backend has for it."""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxdiloco.errors import ConfigError
from maxdiloco.flags.config import Config
from maxdiloco.models import quantized
from maxdiloco.models.rope import RopeConfig
from maxdiloco.parallel import processor
from maxdiloco.parallel.sharding import Rules, rules_with

SPLASH_LANES = 128  # tiles are multiples of a TPU vector register's lanes
# What cuDNN's fused attention takes of jax.nn.dot_product_attention on every GPU that has it; heads
# of up to 256 features would need compute capability 9.0, and jax asks the machine that compiles.
CUDNN_HEAD_DIM = 128
CAPABILITY = 8  # of CUDA, from which on GPUs have cuDNN's attention and Triton's bfloat16 products
# Logits of so many tokens exist on a device at once; ours, see benchmarks/results. Products of
# bfloat16 are so fast on a CPU that what a chunk writes has to stay in the cache; a GPU adds up a
# gradient of the head for each chunk, and has room for so many logits.
CHUNK_TOKENS, CPU_BF16_CHUNK_TOKENS, GPU_CHUNK_LOGITS = 1024, 256, 2**27
# Layers of a GPU's program without a loop, which copies what each layer keeps and reads: a step
# takes 0.9 times as long, compiling three times (benchmarks/results). Our choice for the latter.
MOST_UNROLLED = 48
WITH_DOCUMENTS = (9, 10)  # whose cuDNN takes documents by their offsets; 12 was not tried


class LayerKind(NamedTuple):
    """What differs between layers of equal shapes. window: keys a query sees; 0: all before it."""

    window: int
    rope: RopeConfig


class Latent(NamedTuple):
    """The entries of latent_attention, see models/layers.py. q_lora_rank: 0 is full rank."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0


class Router(NamedTuple):
    """The entries of the key router, see models/router.py."""

    score_function: str = "softmax"
    normalise_weights: bool = False
    scaling_factor: float = 1.0
    balance_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    logit_bias: bool = False


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A decoder's sizes and choices. A soft-cap, a limit or a window of 0 is off.

    mlp_activations: (f,) for f(x w_up) w_out, (f, g) for f(x w_gate) * g(x w_up) w_out.
    vocab_size: tokens. padded_vocab_size: rows of the embedding and the head, see loss.Head.
    num_experts: 1 without experts. moe_mlp_dim: hidden width of one expert. capacity_factor: -1 is
    off. See models/moe.py. qk_norm: empty for none, or the use_qk_norm of base.yml.
    pattern: the kinds of the layers, repeated over them. query_divisor: of attention logits; None
    is the root of head_dim. embedding_multiplier: of the looked-up rows.
    attention: the kernel chosen, of choose_kernel.
    rules: logical axis name -> mesh axes. float32_products, float32_factors, scattered_gradients:
    see models/product.py; the first, which is bfloat16 on a CPU, also layers.activated.
    ragged_kernel: see models/moe.py. quantization: see models/quantized.py. on_gpu: whether XLA:GPU
    compiles it, see layers.activated, rope.rotate and loss.py. unrolled: see
    transformer.through_layers. head_chunk: tokens whose logits are formed at once, see loss.py.
    """

    emb_dim: int
    num_layers: int
    mlp_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_mlp_dim: int
    shared_experts: int
    first_num_dense_layers: int
    router: Router
    routed_bias_update_rate: float
    capacity_factor: float
    load_balance_loss_weight: float
    router_z_loss_weight: float
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int
    mlp_activations: tuple[str, ...]
    mlp_activations_limit: float
    mlp_bias: bool
    norm_epsilon: float
    norm_placement: str
    norm_scale_offset: float
    pattern: tuple[LayerKind, ...]
    tied_head: bool
    embedding_multiplier: float
    qk_norm: str
    query_divisor: float | None
    attention_bias: str
    attention_sink: bool
    latent: Latent | None
    attn_logits_soft_cap: float
    final_logits_soft_cap: float
    z_loss_multiplier: float
    dtype: DTypeLike
    weight_dtype: DTypeLike
    attention: str
    remat_policy: str
    precision: str
    quantization: str
    rules: Rules
    float32_products: bool
    float32_factors: bool
    scattered_gradients: bool
    ragged_kernel: str
    on_gpu: bool
    unrolled: bool
    head_chunk: int

    @property
    def rotated_dim(self) -> int:
        """Features of a head that are rotated."""
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim

    @property
    def gradient_dtype(self) -> DTypeLike:
        """In which devices sum the gradients of products; XLA:CPU sums in float32."""
        return jnp.float32 if self.float32_products else self.dtype


def from_config(
    cfg: Config,
    *,
    backend: str,
    length_shards: int = 1,
    compute_capability: str = "",
    device_kind: str = "",
) -> ModelSpec:
    """Read the model's keys from the config.

    backend: `cpu`, `gpu` or `tpu`, as jax.default_backend() names it; few CPUs compute in bfloat16,
    so dtype=auto is float32 there. length_shards: devices that a sequence is spread over.
    compute_capability: see has_kernels. device_kind: of jax.Device; "" is not known and refuses
    nothing. Raises ConfigError for a kernel that the backend lacks, and for products of 8 bits that
    the device lacks; flags has checked the sizes.
    """
    quantized.check_device(cfg.quantization, backend, device_kind, compute_capability)
    auto = "float32" if backend == "cpu" else "bfloat16"
    dtype, keys = jnp.dtype(auto if cfg.dtype == "auto" else cfg.dtype), vars(cfg)
    scaled = {"auto": cfg.logits_via_embedding, "sqrt_emb_dim": True, "one": False}
    on_gpu = "triton" if has_kernels(compute_capability) else ""
    ragged_kernels = {"cpu": "", "gpu": on_gpu, "tpu": "megablox"}
    half_on_cpu = backend == "cpu" and dtype == jnp.bfloat16
    wide_on_cpu = half_on_cpu and processor.float32_is_faster(processor.host_cpuinfo())
    own = dict(
        emb_dim=cfg.base_emb_dim,
        num_layers=cfg.base_num_decoder_layers,
        mlp_dim=cfg.base_mlp_dim,
        moe_mlp_dim=cfg.base_mlp_dim if cfg.base_moe_mlp_dim == -1 else cfg.base_moe_mlp_dim,
        router=Router(**dict(cfg.router)),
        mlp_activations=tuple(cfg.mlp_activations),
        num_query_heads=cfg.base_num_query_heads,
        num_kv_heads=cfg.base_num_kv_heads,
        padded_vocab_size=max(cfg.vocab_size, cfg.padded_vocab_size),
        norm_epsilon=cfg.normalization_layer_epsilon,
        pattern=_pattern(cfg),
        tied_head=cfg.logits_via_embedding,
        embedding_multiplier=math.sqrt(cfg.base_emb_dim) if scaled[cfg.embedding_scale] else 1.0,
        qk_norm="" if cfg.use_qk_norm == "false" else cfg.use_qk_norm,
        query_divisor=math.sqrt(cfg.query_pre_attn_scalar) if cfg.query_pre_attn_scalar else None,
        latent=Latent(**dict(cfg.latent_attention)) if cfg.latent_attention else None,
        dtype=dtype,
        weight_dtype=jnp.dtype(cfg.weight_dtype),
        attention=choose_kernel(
            cfg, backend, dtype, shards=length_shards, compute_capability=compute_capability
        ),
        precision=cfg.matmul_precision,
        rules=rules_with(cfg.logical_axis_rules),
        float32_products=half_on_cpu,
        float32_factors=wide_on_cpu,
        scattered_gradients=backend == "tpu",
        ragged_kernel=ragged_kernels[backend],
        on_gpu=backend == "gpu",
        unrolled=backend == "gpu" and cfg.base_num_decoder_layers <= MOST_UNROLLED,
        head_chunk=_head_chunk(cfg, backend, in_cache=half_on_cpu and not wide_on_cpu),
    )
    # The others have the value of the key with their name.
    alike = {field.name for field in dataclasses.fields(ModelSpec)} - own.keys()
    return ModelSpec(**own, **{name: keys[name] for name in alike})


def _head_chunk(cfg, backend, *, in_cache):
    """Tokens. in_cache: what a chunk writes has to stay there."""
    if backend == "gpu":
        return max(CHUNK_TOKENS, GPU_CHUNK_LOGITS // cfg.vocab_size)
    return CPU_BF16_CHUNK_TOKENS if in_cache else CHUNK_TOKENS


def _pattern(cfg):
    """The kinds of cfg.attention_pattern; without a pattern all layers have the window."""
    rope = RopeConfig(cfg.rope_max_timescale, **dict(cfg.rope_scaling))
    window, base = cfg.sliding_window_size, cfg.local_rope_max_timescale
    local = LayerKind(window, rope if base == -1 else RopeConfig(base))
    kinds = {"local": local, "global": LayerKind(0, rope)}
    return tuple(kinds[name] for name in cfg.attention_pattern) or (LayerKind(window, rope),)


def choose_kernel(
    cfg: Config, backend: str, dtype: DTypeLike, *, shards: int = 1, compute_capability: str = ""
) -> str:
    """The kernel for a backend: `dot_product`, `cudnn`, `cudnn_documents` or `splash`.

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
        by_offsets = _major(compute_capability) in WITH_DOCUMENTS
        kernel, suffix = "cudnn_documents" if by_offsets else "cudnn", " (cuDNN on GPU)"
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
    return not compute_capability or _major(compute_capability) >= CAPABILITY


def _major(compute_capability):
    """Of `8.0` 8; 0 of what is none of CUDA's."""
    major = re.match(r"(\d+)\.\d+$", compute_capability)
    return int(major[1]) if major else 0


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
