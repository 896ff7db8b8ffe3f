"""Slices to compile for on a machine without them: their names, chips and devices.

GPUs are in gpus.py. Names of TPUs are MaxText's; XPK's, Cloud TPU's (v5litepod-16) and a kind with
its shape, as GKE has them (v5p-2x2x4, tpu-v5-lite-podslice-4x4), mean the same slices. Sizes are
cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}.
"""

import importlib.util
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax

from maxdiloco.aot import gpus
from maxdiloco.errors import ConfigError
from maxdiloco.parallel.chips import CHIPS, Chip


class Tpu(NamedTuple):
    """A kind of TPU.

    counted: what the number of a name counts, and how many of it a chip has. devices: JAX devices
    of a chip. shapes: of its slices, in chips.
    """

    counted: str
    per_chip: int
    devices: int
    shapes: str


_IN_3D = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8"
_IN_2D = "2x2 2x4 4x4 4x8 8x8 8x16 16x16"
TPUS = {
    "v4": Tpu("TensorCores, two a chip", 2, 1, f"{_IN_3D} 4x8x8 8x8x8"),
    "v5e": Tpu("chips", 1, 1, _IN_2D),
    "v5p": Tpu("TensorCores, two a chip", 2, 1, f"{_IN_3D} 4x8x8 8x8x8"),
    "v6e": Tpu("chips", 1, 1, _IN_2D),
    "tpu7x": Tpu("devices, two a chip", 2, 2, _IN_3D),
}
# A kind by other names: XPK's --tpu-type and Cloud TPU's accelerator type, GKE's node label.
OTHER_KINDS = {
    "v5litepod": "v5e",
    "tpu-v4-podslice": "v4",
    "tpu-v5-lite-podslice": "v5e",
    "tpu-v5p-slice": "v5p",
    "tpu-v6e-slice": "v6e",
}
# Without these libtpu asks a cloud's metadata server and locks the chip.
_PRETEND = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def is_gpu(name: str) -> bool:
    """Whether a name means GPUs; no name is of GPUs and of TPUs."""
    return gpus.kind_of(name) is not None


def chip(name: str) -> Chip:
    """The chip that is one device of a topology, with the ICI links of a corner of its slice.

    The corner is the slowest, and a collective waits for it. A dim of a v5e or v6e slice closes to
    a ring when it is 16 long; all dims of the others, when each is a multiple of 4
    (cloud.google.com/tpu/docs/{v5e,v6e,v4,v5p,tpu7x}, "slice topology").
    Raises ConfigError for an unknown name.
    """
    if is_gpu(name):
        return gpus.chip(name)
    kind, shape = kind_and_shape(name)
    rings = [all(size % 4 == 0 for size in shape)] * len(shape)
    if kind in ("v5e", "v6e"):
        rings = [size == 16 for size in shape]
    links = sum(2 if ring else min(size - 1, 1) for size, ring in zip(shape, rings, strict=True))
    torus_gbps = CHIPS[kind].ici_gbps  # of a chip with two links in each dim
    return CHIPS[kind]._replace(ici_gbps=torus_gbps * links / (2 * len(shape)))


def compute_capability(name: str) -> str:
    """Of GPUs, as jax.Device has it; "" for a name that means none."""
    return gpus.GPUS[gpus.kind_of(name)].capability if is_gpu(name) else ""


def devices_per_slice(name: str) -> int:
    """JAX devices of one slice. Raises ConfigError for an unknown name."""
    if is_gpu(name):
        return gpus.size_of(name)
    kind, shape = kind_and_shape(name)
    return math.prod(shape) * TPUS[kind].devices


def devices_per_host(name: str) -> int:
    """JAX devices of one host of a slice: four chips, and eight of v5e-8, v6e-8 and of GPUs.

    Raises ConfigError for an unknown name.
    """
    if is_gpu(name):
        return min(gpus.size_of(name), gpus.ON_HOST)
    kind, shape = kind_and_shape(name)
    return (8 if shape == (2, 4) else 4) * TPUS[kind].devices


def devices(name: str, num_slices: int) -> list[jax.Device]:
    """Devices of `num_slices` slices to compile for; nothing can run on them.

    Raises ConfigError for an unknown name, and where libtpu, or JAX's plugin for CUDA, is not
    installed.
    """
    if is_gpu(name):
        return gpus.devices(name, num_slices)
    kind, shape = kind_and_shape(name)
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"compile_topology={name} needs libtpu, which is not installed. Install the extra: "
            f"pip install -e '.[tpu]' in a checkout of maxdiloco."
        )
    from jax.experimental import topologies

    with _pretending():
        # A real v4 chip joins its two cores into one device; a topology needs this option for it.
        options = {"chip_config_name": "megacore"} if kind == "v4" else {}
        libtpu_name = f"{kind}:{_written(shape)}"
        slices = topologies.get_topology_desc(
            platform="tpu", topology_name=libtpu_name, num_slices=num_slices, **options
        )
    return list(slices.devices)


def kind_and_shape(name: str) -> tuple[str, tuple[int, ...]]:
    """The kind in TPUS of a slice by any of its names, and its shape in chips.

    Raises ConfigError for another name, with those of its kind, or the kinds.
    """
    kind, _, size = name.rpartition("-")
    kind = OTHER_KINDS.get(kind, kind)
    if kind not in TPUS:
        raise ConfigError(
            f"compile_topology={name} is not known. Use a kind and its size, as v5e-16, "
            f"v5litepod-16 or h100-8; kinds: {', '.join([*TPUS, *gpus.GPUS])}."
        )
    known = names(kind)
    for other, shape in known.items():
        if size in (_written(shape), other.removeprefix(f"{kind}-")):
            return kind, shape
    raise ConfigError(
        f"compile_topology={name} is not known: {kind} counts {TPUS[kind].counted}. Use one of "
        f"{', '.join(known)}, or a shape as {kind}-{TPUS[kind].shapes.split()[1]}."
    )


def names(kind: str) -> dict[str, tuple[int, ...]]:
    """MaxText's names of the slices of a kind of TPU, with their shapes; the smallest first."""
    shapes = [tuple(map(int, text.split("x"))) for text in TPUS[kind].shapes.split()]
    return {f"{kind}-{math.prod(shape) * TPUS[kind].per_chip}": shape for shape in shapes}


def _written(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def larger(name: str, num_devices: float) -> str:
    """The smallest known slice of the same kind with at least so many devices; "" for none."""
    if is_gpu(name):
        same_kind = [f"{gpus.kind_of(name)}-{size}" for size in gpus.SIZES]
    else:
        same_kind = names(kind_and_shape(name)[0])
    return next((known for known in same_kind if devices_per_slice(known) >= num_devices), "")


@contextmanager
def _pretending() -> Iterator[None]:
    """Set the variables of _PRETEND that the user has not set."""
    missing = {key: value for key, value in _PRETEND.items() if key not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for key in missing:
            del os.environ[key]
