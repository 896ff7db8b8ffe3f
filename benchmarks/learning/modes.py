"""The comparison: the modes as keys of the trainer, and the sizes of model and run."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

DATA_PARALLEL = "data parallel"
DILOCO = "DiLoCo, H=30"
DELAYED = "delayed"
FEWEST = "DiLoCo, muon, int2, H=166, momentum 0.3"
STREAMING = {"enable_streaming_diloco": True, "num_diloco_fragments": 3}
TAU = "num_communication_overlapping_steps"
ALPHA = "communication_overlapping_alpha"
OVERLAP = "diloco_round_overlap"
WIRE = "diloco_exchange_dtype"
FOUR_BITS = {WIRE: "float4_e3m0"}
FEEDBACK = "diloco_error_feedback"
RADIAL = "radial_directional_mean"
MOMENTUM = "diloco_outer_momentum"


class Mode(NamedTuple):
    """A mode. keys: of the trainer, above the scale's; inner: opt_type.

    inner_lr: 0: the best of data parallelism, which is tuned first; else this one.
    outer_lr: "sweep": the best of a grid; a number: that one; (mode, factor): that mode's best
    times the factor. "" for data parallelism, which has none. rates: the grid instead
    of the scale's. every_seed: False for only one seed, so that all rows take less than three
    hours. extra: True for a mode that lost, so that the table does not need it; it runs if it is
    named.
    """

    name: str
    keys: Mapping[str, Any]
    inner: str = "adamw"
    outer_lr: str | float | tuple[str, float] = "sweep"
    rates: tuple[float, ...] = ()
    every_seed: bool = True
    extra: bool = False
    inner_lr: float = 0.0


def _diloco(
    name: str,
    inner="adamw",
    outer_lr="sweep",
    rates=(),
    every_seed=True,
    extra=False,
    inner_lr=0.0,
    **keys: Any,
) -> Mode:
    keys = {"enable_diloco": True, "diloco_sync_period": 30, MOMENTUM: 0.6} | keys
    return Mode(name, keys, inner, outer_lr, rates, every_seed and not extra, extra, inner_lr)


def _streaming(name: str, *, tau: int, alpha: float = 0.0, **keys: Any) -> Mode:
    return _diloco(name, **(STREAMING | {TAU: tau, ALPHA: alpha} | keys))


AS_STREAMING = ("streaming, tau=1", 1.0)
AS_EAGER = ("eager, 4 bits", 1.0)
# The published momentum, which averages over ten rounds: a fifth of the runs at scale=cpu.
LONG = {MOMENTUM: 0.9, "rates": (0.2, 0.4, 0.7, 1.0), "every_seed": False}


def _few_bits() -> list[Mode]:
    """int2 and topk with error feedback and without, in three modes; 4 bits with it.

    At the outer rate of the mode that sends float32, or of eager, 4 bits.
    """
    rows = []
    for wire in ("int2", "topk"):
        for feedback, said in (("always", ""), ("never", ", no feedback")):
            keys = {WIRE: wire, FEEDBACK: feedback, "every_seed": False}
            rows.append(_diloco(f"DiLoCo, {wire}{said}", outer_lr=(DILOCO, 1.0), **keys))
            rows.append(
                _streaming(f"streaming, tau=1, {wire}{said}", tau=1, outer_lr=AS_STREAMING, **keys)
            )
            rows.append(
                _diloco(f"eager, {wire}{said}", outer_lr=AS_EAGER, **{OVERLAP: "eager"}, **keys)
            )
    rows.append(
        _diloco(
            "eager, 4 bits, feedback",
            outer_lr=AS_EAGER,
            every_seed=False,
            **{OVERLAP: "eager", FEEDBACK: "always"},
            **FOUR_BITS,
        )
    )
    # SparseLoCo (arXiv 2508.15706) has no outer momentum: the residual is one.
    rows.append(
        _diloco("DiLoCo, topk, no momentum", every_seed=False, **{WIRE: "topk", MOMENTUM: 0.0})
    )
    # Over 1,177 times fewer bytes than data parallelism: topk at H=33, int2 at H=166.
    far = {FEEDBACK: "always", "diloco_sync_period": 166, WIRE: "int2"}
    rows += [
        _diloco(FEWEST, "muon", every_seed=False, **far, **{MOMENTUM: 0.3}),
        _diloco(
            f"{FEWEST}, rda",
            "muon",
            diloco_aggregation=RADIAL,
            **far,
            **{MOMENTUM: 0.3},
        ),
        _diloco("DiLoCo, muon, int2, H=166", "muon", extra=True, **far),
        _diloco(
            "DiLoCo, muon, int2, H=166, no momentum",
            "muon",
            extra=True,
            rates=(0.98, 1.372, 1.92),
            **far,
            **{MOMENTUM: 0.0},
        ),
        _diloco(
            "DiLoCo, muon, topk, H=33",
            "muon",
            extra=True,
            **far | {"diloco_sync_period": 33, WIRE: "topk"},
        ),
        _diloco("DiLoCo, int2, H=166", every_seed=False, **far),
        _streaming(
            "streaming, tau=1, muon, int2, H=166, momentum 0.3",
            tau=1,
            inner="muon",
            outer_lr=(FEWEST, 1.0),
            extra=True,
            **far,
            **{MOMENTUM: 0.3},
        ),
        # The cost of H by itself, at the rate of the same rounds in int2.
        _diloco(
            "DiLoCo, muon, H=166, momentum 0.3",
            "muon",
            diloco_sync_period=166,
            outer_lr=(FEWEST, 1.0),
            every_seed=False,
            **{MOMENTUM: 0.3},
        ),
    ]
    return rows  # fmt: skip


def _reduce_scatter() -> list[Mode]:
    """4 bits by all-gather, or by reduce-scatter with 8-bit means: at the rates of 32 bits."""
    return [
        _diloco(f"DiLoCo, M={M}, 4 bits{said}", outer_lr=0.98, inner_lr=0.008, extra=True,
                num_diloco_replicas=M, diloco_collective=exchange, **FOUR_BITS)
        for M in (4, 8)
        for exchange, said in (("all_gather", ""), ("reduce_scatter", ", reduce-scatter"))
    ]  # fmt: skip


def _many_replicas() -> list[Mode]:
    """Muon and a short period, which fewer bits pay for, at the rates of the defaults."""
    kinds = (("DiLoCo", _diloco), ("streaming, tau=1", functools.partial(_streaming, tau=1)))
    return [
        make(f"{name}, M={M}, muon, H={H}, {said}", inner="muon", inner_lr=0.01, outer_lr=0.98,
             extra=True, num_diloco_replicas=M, diloco_sync_period=H, **wire)
        for name, make in kinds
        for M in (4, 8)
        for H in (10, 15, 30)
        for wire, said in ((FOUR_BITS, "4 bits"), ({WIRE: "int2", FEEDBACK: "always"}, "int2"))
    ]  # fmt: skip


def _half_a_moment() -> list[Mode]:
    """The mean of gradients in bfloat16, in data parallelism and in DiLoCo at the rates of both."""
    half = {"mu_dtype": "bfloat16"}
    plain = {"enable_diloco": False} | half
    return [
        Mode("data parallel, mu bfloat16", plain, outer_lr="", extra=True, inner_lr=0.008),
        _diloco("DiLoCo, H=30, mu bfloat16", outer_lr=0.98, inner_lr=0.008, extra=True, **half),
    ]


def _eight_bits() -> list[Mode]:
    """The layers' products in 8 bits, at the rates of DiLoCo, H=30, which runs next to them."""
    return [
        _diloco(f"DiLoCo, H=30, {name}", outer_lr=0.7, inner_lr=0.008, extra=True,
                quantization=name)
        for name in ("none", "int8", "fp8")
    ]  # fmt: skip


# The outer momentum is 0.6, the better one of two for DiLoCo (and MuLoCo's, arXiv 2505.23725).
MODES = (
    Mode(DATA_PARALLEL, {"enable_diloco": False}, outer_lr=""),
    _diloco(DILOCO),
    _diloco("DiLoCo, H=10", every_seed=False, diloco_sync_period=10),
    _diloco("DiLoCo, H=100", every_seed=False, diloco_sync_period=100),
    _streaming("streaming, tau=0", tau=0, every_seed=False),
    _streaming("streaming, tau=1", tau=1),
    _streaming("streaming, tau=5", tau=5, every_seed=False),
    _streaming("streaming, tau=1, alpha=0.5", tau=1, alpha=0.5),
    _streaming("streaming, tau=5, alpha=0.5", tau=5, alpha=0.5, every_seed=False),
    _streaming("streaming, tau=1, 4 bits", tau=1, **FOUR_BITS),
    _streaming("streaming, tau=1, 4 bits, H=100", tau=1, every_seed=False, **FOUR_BITS,
               diloco_sync_period=100),
    _diloco("eager", **{OVERLAP: "eager"}),
    _diloco("eager, 4 bits", **{OVERLAP: "eager"}, **FOUR_BITS),
    # The others' part is a round late, so a smaller momentum may be the better one.
    _diloco("eager, momentum 0.3", extra=True, **{OVERLAP: "eager", MOMENTUM: 0.3}),
    _diloco("eager, no momentum", extra=True, **{OVERLAP: "eager", MOMENTUM: 0.0}),
    _diloco(DELAYED, every_seed=False, **{OVERLAP: "delayed"}),
    _diloco("delayed, DiLoCo's outer rate", outer_lr=(DILOCO, 1.0), every_seed=False,
            **{OVERLAP: "delayed"}),
    _diloco("delayed, a quarter of it", outer_lr=(DILOCO, 0.25), every_seed=False,
            **{OVERLAP: "delayed"}),
    _diloco("DiLoCo, M=1", every_seed=False, num_diloco_replicas=1),
    _diloco("DiLoCo, M=4", every_seed=False, num_diloco_replicas=4),
    _diloco("DiLoCo, M=8", every_seed=False, num_diloco_replicas=8),
    Mode("data parallel, muon", {"enable_diloco": False}, "muon", outer_lr=""),
    _diloco("DiLoCo, muon", "muon"),
    # Details, whose differences are small: at the rate of streaming, tau=1.
    # P=2 has all layers in one fragment; with P=3 they are strided unless given.
    _streaming("streaming, tau=1, P=2", tau=1, num_diloco_fragments=2, outer_lr=AS_STREAMING,
               every_seed=False),
    _streaming("streaming, tau=1, sequential", tau=1, outer_lr=AS_STREAMING,
               every_seed=False, use_sequential_layers=True),
    _streaming("streaming, tau=1, two nonlayer fragments", tau=1, num_diloco_fragments=4,
               outer_lr=AS_STREAMING, every_seed=False, num_nonlayer_fragments=2),
    _streaming("streaming, tau=1, P=5", tau=1, num_diloco_fragments=5, outer_lr=AS_STREAMING,
               every_seed=False),
    *_few_bits(),
    *_reduce_scatter(),
    *_many_replicas(),
    *_half_a_moment(),
    *_eight_bits(),
    # It keeps the norm that the mean loses, so that its steps are longer.
    _diloco("DiLoCo, rda", extra=True, diloco_aggregation=RADIAL),
    _diloco("DiLoCo, M=4, rda", num_diloco_replicas=4, extra=True, diloco_aggregation=RADIAL),
    _diloco("DiLoCo, M=8, rda", num_diloco_replicas=8, every_seed=False, diloco_aggregation=RADIAL),
    _diloco("DiLoCo, H=30, momentum 0.9", **LONG),
    _diloco("DiLoCo, H=10, momentum 0.9", diloco_sync_period=10, **LONG),
    _diloco("DiLoCo, H=100, momentum 0.9", diloco_sync_period=100, **LONG),
    _streaming("streaming, tau=1, momentum 0.9", tau=1, **LONG),
    _streaming("streaming, tau=1, alpha=0.5, momentum 0.9", tau=1, alpha=0.5, **LONG),
    _streaming("streaming, tau=0, momentum 0.9", tau=0, extra=True, **LONG),
    _streaming("streaming, tau=5, momentum 0.9", tau=5, extra=True, **LONG),
    _streaming("streaming, tau=5, alpha=0.5, momentum 0.9", tau=5, alpha=0.5, extra=True, **LONG),
)  # fmt: skip
BY_NAME = {mode.name: mode for mode in MODES}


OUTER_RATES = (0.4, 0.7)  # the middle of arXiv 2503.09799 Fig. 7; it grows where its end is best
MUON_RATES = (5e-3, 1e-2, 2e-2)


class Scale(NamedTuple):
    """Sizes of model and run.

    batch: sequences a step over all replicas; keys: of the trainer. all_alike: every mode runs
    with every seed.
    """

    keys: Mapping[str, Any]
    batch: int
    steps: int
    inner_rates: Mapping[str, tuple[float, ...]]
    seeds: int
    outer_rates: tuple[float, ...] = OUTER_RATES
    evaluations: int = 10
    all_alike: bool = False

    def seeds_of(self, mode: Mode) -> range:
        """The seeds that a mode runs with at its best rates."""
        return range(self.seeds if mode.every_seed or self.all_alike else 1)

    def rates_of(self, mode: Mode) -> tuple[float, ...]:
        """The outer rates that a mode is swept over."""
        return mode.rates or self.outer_rates


COMMON = {
    "eval_steps": 32,
    "enable_checkpointing": False,
    "enable_tensorboard": False,
    "num_diloco_replicas": 2,
}
SCALES = {
    # 279,296 parameters: a step of 1,024 bytes takes a core about 50 ms.
    "cpu": Scale(
        keys=COMMON | {
            "hardware": "cpu",
            "base_emb_dim": 64,
            "base_num_decoder_layers": 4,
            "base_mlp_dim": 256,
            "base_num_query_heads": 4,
            "base_num_kv_heads": 4,
            "head_dim": 16,
            "vocab_size": 257,
            "max_target_length": 64,
            "remat_policy": "none",
        },
        batch=16,
        steps=1500,
        inner_rates={"adamw": (2e-3, 4e-3, 8e-3), "muon": MUON_RATES},
        seeds=3,
    ),
    "gpu": Scale(
        keys=COMMON | {
            "hardware": "gpu",
            "model_name": "35m",
            "dtype": "bfloat16",
            "max_target_length": 1024,
        },
        batch=64,
        steps=3000,
        inner_rates={"adamw": (5e-4, 1e-3, 2e-3), "muon": MUON_RATES},
        seeds=2,
    ),
}  # fmt: skip
