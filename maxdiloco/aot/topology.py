"""Slices to compile for on a machine without them: their names, chips and devices.

GPUs are in gpus.py. Names of TPUs are MaxText's; XPK's, Cloud TPU's (v5litepod-16) and a kind with
its shape, as GKE has them (v5p-2x2x4, tpu-v5-lite-podslice-4x4), mean the same slices. Sizes are
cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}: a v4 or v5p name counts TensorCores, two a chip
and one JAX device; a v5e or v6e name counts chips; a tpu7x name JAX devices, two a chip.
"""

import importlib.util
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from maxdiloco.aot import gpus
from maxdiloco.errors import ConfigError
from maxdiloco.parallel.chips import CHIPS, Chip

# Name -> libtpu's name of one slice.
TOPOLOGIES = {
    "v4-8": "v4:2x2x1", "v4-16": "v4:2x2x2", "v4-32": "v4:2x2x4", "v4-64": "v4:2x4x4",
    "v4-128": "v4:4x4x4", "v4-256": "v4:4x4x8", "v4-512": "v4:4x8x8", "v4-1024": "v4:8x8x8",
    "v5e-4": "v5e:2x2", "v5e-8": "v5e:2x4", "v5e-16": "v5e:4x4", "v5e-32": "v5e:4x8",
    "v5e-64": "v5e:8x8", "v5e-128": "v5e:8x16", "v5e-256": "v5e:16x16",
    "v5p-8": "v5p:2x2x1", "v5p-16": "v5p:2x2x2", "v5p-32": "v5p:2x2x4", "v5p-64": "v5p:2x4x4",
    "v5p-128": "v5p:4x4x4", "v5p-256": "v5p:4x4x8", "v5p-512": "v5p:4x8x8",
    "v5p-1024": "v5p:8x8x8",
    "v6e-4": "v6e:2x2", "v6e-8": "v6e:2x4", "v6e-16": "v6e:4x4", "v6e-32": "v6e:4x8",
    "v6e-64": "v6e:8x8", "v6e-128": "v6e:8x16", "v6e-256": "v6e:16x16",
    "tpu7x-8": "tpu7x:2x2x1", "tpu7x-16": "tpu7x:2x2x2", "tpu7x-32": "tpu7x:2x2x4",
    "tpu7x-64": "tpu7x:2x4x4", "tpu7x-128": "tpu7x:4x4x4", "tpu7x-256": "tpu7x:4x4x8",
}  # fmt: skip
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
    """The chip that is one device of a topology, with the ICI links that all of its slice have.

    Raises ConfigError for an unknown name.
    """
    if is_gpu(name):
        return gpus.chip(name)
    kind, _, shape = _libtpu_name(name).partition(":")
    links, of = ici_links(kind, tuple(map(int, shape.split("x"))))
    whole = CHIPS[kind]
    return whole._replace(ici_gbps=whole.ici_gbps * links / of)


def compute_capability(name: str) -> str:
    """Of GPUs, as jax.Device has it; "" for a name that means none."""
    return gpus.GPUS[gpus.kind_of(name)].capability if is_gpu(name) else ""


def devices_per_slice(name: str) -> int:
    """JAX devices of one slice. Raises ConfigError for an unknown name."""
    if is_gpu(name):
        return gpus.size_of(name)
    kind, _, shape = _libtpu_name(name).partition(":")
    return math.prod(map(int, shape.split("x"))) * (2 if kind == "tpu7x" else 1)


def devices_per_host(name: str) -> int:
    """JAX devices of one host of a slice: four chips, and eight of v5e-8, v6e-8 and of GPUs.

    Raises ConfigError for an unknown name.
    """
    if is_gpu(name):
        return min(gpus.size_of(name), gpus.ON_HOST)
    if known_name(name) in ("v5e-8", "v6e-8"):
        return 8
    return 8 if _libtpu_name(name).startswith("tpu7x") else 4


def ici_links(kind: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """ICI links of a corner chip of a slice, and of a chip in a torus.

    The corner is the slowest, and a collective waits for it. A dim of a v5e or v6e slice closes to
    a ring when it is 16 long; all dims of the others, when each is a multiple of 4
    (cloud.google.com/tpu/docs/{v5e,v6e,v4,v5p,tpu7x}, "slice topology").
    """
    if kind in ("v5e", "v6e"):
        rings = [size == 16 for size in shape]
    else:
        rings = [all(size % 4 == 0 for size in shape)] * len(shape)
    links = sum(2 if ring else min(size - 1, 1) for size, ring in zip(shape, rings, strict=True))
    return links, 2 * len(shape)


def devices(name: str, num_slices: int) -> list[jax.Device]:
    """Devices of `num_slices` slices to compile for; nothing can run on them.

    Raises ConfigError for an unknown name, and where libtpu, or JAX's plugin for CUDA, is not
    installed.
    """
    if is_gpu(name):
        return gpus.devices(name, num_slices)
    topology_name = _libtpu_name(name)
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"compile_topology={name} needs libtpu, which is not installed. Install the extra: "
            f"pip install -e '.[tpu]' in a checkout of maxdiloco."
        )
    from jax.experimental import topologies

    with _pretending():
        # A real v4 chip joins its two cores into one device; a topology needs this option for it.
        options = {"chip_config_name": "megacore"} if topology_name.startswith("v4") else {}
        slices = topologies.get_topology_desc(
            platform="tpu", topology_name=topology_name, num_slices=num_slices, **options
        )
    return list(slices.devices)


def known_name(name: str) -> str:
    """The name in TOPOLOGIES of a slice by any of its names.

    Raises ConfigError for another name, with those of its kind, or the kinds.
    """
    kind, _, size = name.rpartition("-")
    kind = OTHER_KINDS.get(kind, kind)
    shapes = {libtpu: known for known, libtpu in TOPOLOGIES.items()}
    found = shapes.get(f"{kind}:{size}") or f"{kind}-{size}"
    if found in TOPOLOGIES:
        return found
    same_kind = [known for known in TOPOLOGIES if known.rpartition("-")[0] == kind]
    if not same_kind:
        kinds = dict.fromkeys([*(known.rpartition("-")[0] for known in TOPOLOGIES), *gpus.GPUS])
        raise ConfigError(
            f"compile_topology={name} is not known. Use a kind and its size, as v5e-16, "
            f"v5litepod-16 or h100-8; kinds: {', '.join(kinds)}."
        )
    shape = TOPOLOGIES[same_kind[1]].partition(":")[2]
    raise ConfigError(
        f"compile_topology={name} is not known: {kind} counts {_COUNTED[kind]}. Use one of "
        f"{', '.join(same_kind)}, or a shape as {kind}-{shape}."
    )


def larger(name: str, num_devices: float) -> str:
    """The smallest known slice of the same kind with at least so many devices; "" for none."""
    if is_gpu(name):
        sizes = (size for size in gpus.SIZES if size >= num_devices)
        return next((f"{gpus.kind_of(name)}-{size}" for size in sizes), "")
    kind = known_name(name).rpartition("-")[0]
    same_kind = (known for known in TOPOLOGIES if known.rpartition("-")[0] == kind)
    return next((known for known in same_kind if devices_per_slice(known) >= num_devices), "")


_COUNTED = {
    "v4": "TensorCores, two a chip",
    "v5p": "TensorCores, two a chip",
    "v5e": "chips",
    "v6e": "chips",
    "tpu7x": "devices, two a chip",
}


def _libtpu_name(name: str) -> str:
    return TOPOLOGIES[known_name(name)]


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
