"""The devices that a run asks for, as plain values."""

from typing import NamedTuple

from maxdiloco.flags.checks import AXES
from maxdiloco.flags.config import Config


class Hardware(NamedTuple):
    """The keys of the mesh. dcn, ici: sizes of AXES over slices and inside one.

    platform: auto, cpu, gpu or tpu. num_slices and one size of each tier may be open, -1.
    offloads: whether optimizer state is kept in host memory.
    """

    platform: str
    num_slices: int
    dcn: dict[str, int]
    ici: dict[str, int]
    offloads: bool


def hardware_of(cfg: Config) -> Hardware:
    """Of a config."""
    dcn, ici = (
        {axis: vars(cfg)[f"{tier}_{axis}_parallelism"] for axis in AXES} for tier in ("dcn", "ici")
    )
    return Hardware(cfg.hardware, cfg.num_slices, dcn, ici, cfg.optimizer_memory_host_offload)
