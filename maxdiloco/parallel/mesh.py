"""The device mesh: an outer tier of slices joined by DCN, an inner tier of chips joined by ICI."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from maxdiloco.config import Config
from maxdiloco.errors import ConfigError

AXES = ("diloco", "data", "fsdp", "expert", "context", "tensor")
# CPU devices in one process. Our choice: on two cores collectives of 128 devices ended and those
# of 512 did not within XLA's 40 s.
MOST_EMULATED = 256


def tier(cfg: Config, name: str) -> dict[str, int]:
    """Sizes the config asks of one tier, `dcn` or `ici`, in mesh order; -1 is still open."""
    values = cfg.as_dict()
    return {axis: values[f"{name}_{axis}_parallelism"] for axis in AXES}


def fill(sizes: Mapping[str, int], total: int, name: str) -> dict[str, int]:
    """Replace the one -1 of a tier so that the product is `total` [devices or slices].

    Raises ConfigError with the product written out when the sizes do not fit.
    """
    known = math.prod(size for size in sizes.values() if size != -1)
    filled = {
        axis: (total // known if size == -1 and total % known == 0 else size)
        for axis, size in sizes.items()
    }
    if -1 in filled.values() or math.prod(filled.values()) != total:
        what = "slices" if name == "dcn" else "devices in a slice"
        keys = " ".join(f"{name}_{a}_parallelism={s}" for a, s in sizes.items() if s != 1)
        raise ConfigError(
            f"{keys or f'{name}_*_parallelism=1'} cannot fill the mesh: {product(sizes)}, but "
            f"there are {total} {what}. Change one of them, or set one to -1."
        )
    return filled


def product(sizes: Mapping[str, int]) -> str:
    """The sizes as an equation, those that are 1 or open left out: `diloco 2 * fsdp 4 = 8`."""
    shown = [f"{axis} {size}" for axis, size in sizes.items() if size not in (1, -1)]
    return f"{' * '.join(shown) or 'all 1'} = {abs(math.prod(sizes.values()))}"


def emulated_devices(cfg: Config) -> int:
    """CPU devices the mesh needs; an open size counts as 1."""
    sizes = [*tier(cfg, "dcn").values(), *tier(cfg, "ici").values()]
    slices = max(1, cfg.num_slices) if -1 in tier(cfg, "dcn").values() else 1
    return slices * math.prod(size for size in sizes if size != -1)


def choose_platform(cfg: Config) -> None:
    """Tell JAX which platform to use, before its backends start; auto leaves the choice to JAX."""
    platforms = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}
    if cfg.hardware in platforms:
        jax.config.update("jax_platforms", platforms[cfg.hardware])


def emulate_devices(cfg: Config, *, num_processes: int) -> None:
    """Make as many CPU devices as the mesh needs, before JAX's backends start.

    Each of several processes holds an equal share, MOST_EMULATED at most, and `build` refuses what
    needs more. A number that the user has given JAX stays.
    Raises ConfigError when the devices cannot be dealt out evenly.
    """
    needed = emulated_devices(cfg)
    if needed % num_processes:
        raise ConfigError(
            f"the mesh needs {needed} emulated devices, which {num_processes} processes cannot "
            f"share evenly. Make dcn_diloco_parallelism a multiple of {num_processes}."
        )
    if jax.config.jax_num_cpu_devices == -1:
        jax.config.update("jax_num_cpu_devices", min(needed // num_processes, MOST_EMULATED))


def count_slices(cfg: Config, devices: Sequence[jax.Device]) -> int:
    """Real slices on TPU; elsewhere the product of the dcn tier, num_slices, or the processes."""
    if devices[0].platform == "tpu":
        return len({device.slice_index for device in devices})
    dcn = tier(cfg, "dcn")
    if -1 not in dcn.values():
        return math.prod(dcn.values())
    processes = len({device.process_index for device in devices})
    return cfg.num_slices if cfg.num_slices != -1 else processes


def build(cfg: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh over AXES, DCN parts outermost within each axis.

    devices: those to use, all visible ones when None. On CPU the first of them that the mesh
    needs are taken. On TPU `slice_index` tells the slices apart; on CPU and GPU contiguous
    blocks of devices (or the processes that own them) stand for slices.
    Raises ConfigError when the sizes do not fit the devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    slices = count_slices(cfg, devices)
    dcn = fill(tier(cfg, "dcn"), slices, "dcn")
    ici = tier(cfg, "ici")
    if devices[0].platform == "cpu" and -1 not in ici.values():
        devices = devices[: slices * math.prod(ici.values())]
    known = {axis: dcn[axis] * size for axis, size in ici.items()}
    needed = abs(math.prod(known.values()))
    if len(devices) % needed or (-1 not in ici.values() and len(devices) != needed):
        raise ConfigError(
            f"the mesh {product(known)} devices, but {len(devices)} are visible. Change a "
            f"dcn_*_parallelism or ici_*_parallelism key, or set one of the ici tier to -1."
        )
    ici = fill(ici, len(devices) // slices, "ici")
    return Mesh(_arrange(devices, tuple(dcn.values()), tuple(ici.values())), AXES)


def sizes_over_slices(cfg: Config, devices: Sequence[jax.Device]) -> dict[str, int]:
    """Size of each axis over slices, in mesh order, none left open."""
    return fill(tier(cfg, "dcn"), count_slices(cfg, devices), "dcn")


def _arrange(devices: list[jax.Device], dcn: tuple[int, ...], ici: tuple[int, ...]) -> np.ndarray:
    if devices[0].platform == "tpu" and math.prod(dcn) > 1:
        return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices)
    if devices[0].platform == "tpu":
        return mesh_utils.create_device_mesh(ici, devices)
    blocks = np.array(devices, dtype=object).reshape(*dcn, *ici)
    n = len(dcn)
    pairs = [dim for axis in range(n) for dim in (axis, n + axis)]
    sizes = [outer * inner for outer, inner in zip(dcn, ici, strict=True)]
    return blocks.transpose(pairs).reshape(sizes)


def in_slice_axes(mesh: Mesh) -> tuple[str, ...]:
    """Every axis of the mesh but `diloco`, in mesh order."""
    return tuple(axis for axis in mesh.axis_names if axis != "diloco")


def describe(mesh: Mesh, cfg: Config) -> str:
    """One line for the start of a run."""
    dcn = product(sizes_over_slices(cfg, list(mesh.devices.flat)))
    shape = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    kind = mesh.devices.flat[0].device_kind
    return f"mesh: {mesh.size} x {kind}; {shape or 'one device'} (over slices: {dcn})"
