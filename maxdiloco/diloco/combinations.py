"""Check for settings of an exchange that cannot be combined; used by the library and the config."""

from types import MappingProxyType
from typing import NamedTuple

RADIAL = "radial_directional_mean"
LOSSLESS = "float32"  # the wire format that leaves no residual
# Settings that reduce-scatter cannot be combined with, each with the reason.
NOT_WITH_REDUCE_SCATTER = MappingProxyType(
    {
        ("aggregation", RADIAL): "a slice has parts of tensors, not their norms",
        ("exchange_dtype", "topk"): "a mean of sparse values is not sparse",
        ("round_overlap", "eager"): "a replica needs the outer gradients of the others one by one",
    }
)


class Names(NamedTuple):
    """The names of the settings in error messages; by default the keyword arguments of DiLoCo."""

    collective: str = "collective"
    aggregation: str = "aggregation"
    exchange_dtype: str = "exchange_dtype"
    round_overlap: str = "round_overlap"
    error_feedback: str = "error_feedback=True"  # with the value that switches it on


ARGUMENTS = Names()


def no_reduce_scatter(
    *, aggregation: str, exchange_dtype: str, round_overlap: str, names: Names = ARGUMENTS
) -> str:
    """Return the setting that excludes reduce-scatter, with the reason; "" if none does."""
    values = {
        "aggregation": aggregation,
        "exchange_dtype": exchange_dtype,
        "round_overlap": round_overlap,
    }
    for (name, value), reason in NOT_WITH_REDUCE_SCATTER.items():
        if values[name] == value:
            return f"{getattr(names, name)}={value}: {reason}"
    return ""


def check(
    *,
    collective: str,
    aggregation: str,
    exchange_dtype: str,
    round_overlap: str,
    error_feedback: bool | None,
    names: Names = ARGUMENTS,
) -> None:
    """Raise ValueError for settings that cannot be combined; for the settings see ExchangeSettings.

    names: the names of the settings in the message.
    """
    if error_feedback and exchange_dtype == LOSSLESS:
        raise ValueError(
            f"{names.error_feedback} has no effect with {names.exchange_dtype}={exchange_dtype}, "
            f"which is lossless. Leave it out, or use another {names.exchange_dtype}."
        )
    reason = no_reduce_scatter(
        aggregation=aggregation,
        exchange_dtype=exchange_dtype,
        round_overlap=round_overlap,
        names=names,
    )
    if collective == "reduce_scatter" and reason:
        raise ValueError(
            f"{names.collective}=reduce_scatter cannot be combined with {reason}. Use "
            f"{names.collective}=all_gather."
        )
    if aggregation == RADIAL and round_overlap == "eager":
        raise ValueError(
            f"{names.aggregation}={RADIAL} cannot be combined with {names.round_overlap}=eager: a "
            "replica's own terms of two rounds cancel in a plain mean only, so the replicas would "
            f"drift apart. Use {names.aggregation}=mean."
        )
