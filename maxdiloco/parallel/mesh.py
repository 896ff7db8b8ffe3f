"""The device mesh: an outer tier of slices joined by DCN, an inner tier of chips joined by ICI."""

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from maxdiloco.cluster.start import launcher
from maxdiloco.errors import ConfigError
from maxdiloco.parallel import chips, processor

# Axes of a mesh. Replicas are divided only over `diloco`.
AXES = ("diloco", "data", "fsdp", "expert", "context", "tensor")
# CPU devices in one process. On two cores the collectives of 128 devices ended within XLA's 40 s,
# and the collectives of 512 did not.
MOST_EMULATED = 256
_PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}
_EXTRAS = {"gpu": "cuda13", "tpu": "tpu"}  # of setup.py
# Codes in the error of a backend that waits for other processes while it starts.
_OF_A_PEER = ("DEADLINE_EXCEEDED", "UNAVAILABLE", "CANCELLED", "ABORTED")


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """Which devices a run uses, and how its mesh divides them.

    Attributes:
      hardware: `auto`, `cpu`, `gpu` or `tpu`.
      dcn: size of each axis over slices, in the order of AXES; -1 for one: all that remain.
      ici: size of each axis inside a slice, in the same form.
      num_slices: number of slices. -1: found from the devices.
      enable_diloco: whether the axis `diloco` has replicas.
      hide_transfers: whether libtpu is set to hide transfers behind compute. False where copies
        of the optimizer state would also count as slow, and start early.
    """

    hardware: str
    dcn: Mapping[str, int]
    ici: Mapping[str, int]
    num_slices: int = -1
    enable_diloco: bool = True
    hide_transfers: bool = True


def resolve_sizes(
    sizes: Mapping[str, int], total: int, name: str, *, remedy: str = ""
) -> dict[str, int]:
    """Replace the -1 among the sizes so that their product is `total`.

    Args:
      sizes: of the axes.
      total: number of slices, or of devices in a slice.
      name: `dcn` or `ici`, for messages.
      remedy: for the error, instead of a general one.

    Raises:
      ConfigError: the sizes do not fit.
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
            f"there {'is' if total == 1 else 'are'} {total} "
            f"{what.replace('slices', 'slice') if total == 1 else what}. "
            f"{remedy or 'Change one of them, or set one to -1.'}"
        )
    return filled


def product(sizes: Mapping[str, int]) -> str:
    """Format sizes as an equation without those that are 1 or open: `diloco 2 * fsdp 4 = 8`."""
    shown = [f"{axis} {size}" for axis, size in sizes.items() if size not in (1, -1)]
    return f"{' * '.join(shown) or 'all 1'} = {abs(math.prod(sizes.values()))}"


# -- before JAX's backends start -------------------------------------------------------------------


def choose_platform(settings: MeshSettings) -> None:
    """Set JAX's platform; hardware=auto leaves the choice to JAX."""
    if settings.hardware == "tpu" or (settings.hardware == "auto" and not uses_only_cpu(settings)):
        configure_libtpu(settings)
    if settings.hardware in _PLATFORMS:
        jax.config.update("jax_platforms", _PLATFORMS[settings.hardware])


def configure_libtpu(settings: MeshSettings) -> None:
    """Set libtpu's flags for the programs of a run."""
    if settings.hide_transfers:
        chips.hide_transfers()


def uses_only_cpu(settings: MeshSettings) -> bool:
    """Tell whether JAX may use nothing but the CPU."""
    on_cpu = settings.hardware == "auto" and jax.config.jax_platforms == "cpu"
    return settings.hardware == "cpu" or on_cpu


def set_up_cpu(settings: MeshSettings) -> None:
    """Set memory and threads of XLA:CPU, if JAX may use nothing else."""
    if not uses_only_cpu(settings):
        return
    count = jax.config.jax_num_cpu_devices
    count = emulated_devices(settings, num_processes=1) if count == -1 else count
    in_caller = count == 1 and not launcher(os.environ, on_tpu=False)
    if in_caller:
        run_in_caller()
    processor.keep_freed_memory(in_caller=in_caller)


def run_in_caller() -> None:
    """Let XLA:CPU run a program in the calling thread, which then allocates its arrays."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def emulated_devices(settings: MeshSettings, num_processes: int) -> int:
    """Return the number of CPU devices that the mesh needs, the same in each process.

    An open size counts as one slice a process in the dcn tier, and as one device a process in the
    ici tier.

    Raises:
      ConfigError: all sizes are set, and the processes cannot share the devices evenly.
    """
    slices = known = math.prod(size for size in settings.dcn.values() if size != -1)
    if -1 in settings.dcn.values():
        slices = (
            settings.num_slices if settings.num_slices != -1 else math.lcm(known, num_processes)
        )
    needed = slices * math.prod(size for size in settings.ici.values() if size != -1)
    if -1 in settings.ici.values():
        return math.lcm(needed, num_processes)
    if needed % num_processes:
        raise ConfigError(
            f"the mesh needs {needed} emulated devices, which {num_processes} processes cannot "
            f"share evenly. Make dcn_diloco_parallelism a multiple of {num_processes}."
        )
    return needed


def emulate_devices(settings: MeshSettings, *, num_processes: int) -> None:
    """Make the CPU devices that the mesh needs, if JAX may use nothing else.

    It makes at most MOST_EMULATED; `build` refuses a mesh that needs more. An explicit
    jax_num_cpu_devices is respected.

    Raises:
      ConfigError: as emulated_devices.
    """
    if uses_only_cpu(settings) and jax.config.jax_num_cpu_devices == -1:
        needed = emulated_devices(settings, num_processes)
        jax.config.update("jax_num_cpu_devices", min(needed // num_processes, MOST_EMULATED))


# -- the devices, and the mesh ---------------------------------------------------------------------


def visible_devices(settings: MeshSettings) -> list[jax.Device]:
    """Return all devices of the run; this starts JAX's backends.

    Raises:
      ConfigError: they are not of the kind that `hardware` names, or they belong to several
        processes without jax.distributed, where a lost process would go unnoticed.
    """
    needs_extra = settings.hardware in _EXTRAS
    remedy = (
        "See that this machine has one and JAX can use it (in a checkout of maxdiloco: pip install "
        f"-e '.[{_EXTRAS.get(settings.hardware)}]'), or set hardware=cpu."
    )
    try:
        devices = jax.devices()
    except RuntimeError as error:
        lost_peer = jax.distributed.is_initialized() and any(map(str(error).count, _OF_A_PEER))
        if lost_peer or not needs_extra:
            raise
        reason = str(error).splitlines()[0].partition(" (set JAX_PLATFORMS")[0].rstrip(".")
        raise ConfigError(
            f"hardware={settings.hardware} does not work here: {reason}. {remedy}"
        ) from error
    if needs_extra and devices[0].platform != settings.hardware:
        raise ConfigError(
            f"hardware={settings.hardware} but JAX finds only {devices[0].platform} devices. "
            f"{remedy}"
        )
    if jax.process_count() > 1 and not jax.distributed.is_initialized():
        raise ConfigError(
            f"hardware={settings.hardware}: the devices belong to {jax.process_count()} processes, "
            f"but this one has joined no other. On a TPU pod set hardware=tpu; elsewhere set "
            f"JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
        )
    return devices


def slice_of(device: jax.Device) -> int:
    """Return the index of the slice of a device.

    XLA numbers the slices of TPUs, and the hosts of GPUs unless JAX_PARTITION_INDEX gives each
    process a number. The devices of a single TPU slice may have no number; CPUs have none.
    """
    try:
        return device.slice_index
    except AttributeError:
        return 0


def count_slices(settings: MeshSettings, devices: Sequence[jax.Device]) -> int:
    """Count the slices: real ones on TPU, otherwise by the dcn tier, num_slices, or hosts."""
    numbered, platform = len({slice_of(device) for device in devices}), devices[0].platform
    if platform != "tpu" and -1 not in settings.dcn.values():
        return math.prod(settings.dcn.values())
    if platform != "tpu" and settings.num_slices != -1:
        return settings.num_slices
    if platform in ("tpu", "gpu"):
        return numbered
    return len({device.process_index for device in devices})


def on_gpus(mesh: Mesh) -> bool:
    """Tell whether the devices of a mesh are GPUs, by any of the platform's names."""
    return mesh.devices.flat[0].platform in ("gpu", "cuda", "rocm")


def backend(mesh: Mesh) -> str:
    """Return `cpu`, `gpu` or `tpu`, as jax.default_backend() names it."""
    return "gpu" if on_gpus(mesh) else mesh.devices.flat[0].platform


def build(settings: MeshSettings, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Build the mesh over AXES, with the parts over slices outermost within each axis.

    A TPU slice has the devices of one `slice_index`. A GPU slice is some whole hosts or a part of
    one. A CPU slice is any contiguous block of devices.

    Args:
      settings: of the mesh.
      devices: to use; None: all visible ones, of which CPU meshes take the first ones they need.

    Raises:
      ConfigError: the sizes do not fit the devices.
    """
    devices = visible_devices(settings) if devices is None else list(devices)
    platform, ici = devices[0].platform, settings.ici
    if platform == "gpu":  # a launcher may assign processes to hosts in turn
        devices.sort(key=lambda device: (slice_of(device), device.process_index, device.id))
    slices, dcn = count_slices(settings, devices), sizes_over_slices(settings, devices)
    is_open = -1 in ici.values()
    if platform == "cpu" and not is_open:
        devices = devices[: slices * math.prod(ici.values())]
    known = {axis: dcn[axis] * size for axis, size in ici.items()}
    needed = abs(math.prod(known.values()))
    if len(devices) % needed or (not is_open and len(devices) != needed):
        emulate = platform == "cpu" and settings.hardware != "cpu"
        raise ConfigError(
            f"the mesh {product(known)} devices, but {len(devices)} are visible. Change a "
            f"dcn_*_parallelism or ici_*_parallelism key, or set one of the ici tier to -1"
            f"{'; hardware=cpu emulates devices' if emulate else ''}."
        )
    ici = resolve_sizes(ici, len(devices) // slices, "ici")
    if platform == "gpu":
        _check_hosts(devices, slices)
    return Mesh(_arrange(devices, tuple(dcn.values()), tuple(ici.values()))[0], AXES)


def _check_hosts(devices: list[jax.Device], slices: int) -> None:
    """Raise ConfigError for a slice of parts of several hosts: its traffic would leave them."""
    size = len(devices) // slices
    hosts = Counter(map(slice_of, devices))
    for start in range(0, len(devices), size):
        inside = Counter(map(slice_of, devices[start : start + size]))
        if len(inside) > 1 and any(count < hosts[host] for host, count in inside.items()):
            raise ConfigError(
                f"{slices} slices of {size} GPUs cut through hosts, which have "
                f"{', '.join(str(count) for count in hosts.values())}. Choose num_slices or the "
                f"dcn_*_parallelism keys so that a slice is a part of one host or whole hosts."
            )


def sizes_over_slices(settings: MeshSettings, devices: Sequence[jax.Device]) -> dict[str, int]:
    """Return the size of each axis over slices, in mesh order, with none left open."""
    sizes, slices = settings.dcn, count_slices(settings, devices)
    known, remedy = math.prod(size for size in sizes.values() if size != -1), ""
    if devices[0].platform != "tpu" and settings.num_slices == -1 and slices % known:
        remedy = f"Use num_slices={known}, which divides these devices into slices."
        if not settings.enable_diloco and sizes["data"] == known:
            remedy = (
                f"Use num_slices={known}, or dcn_diloco_parallelism={known} instead of "
                f"dcn_data_parallelism: without DiLoCo it is data parallelism too."
            )
    return resolve_sizes(sizes, slices, "dcn", remedy=remedy)


def _arrange(
    devices: list[jax.Device], dcn: tuple[int, ...], ici: tuple[int, ...]
) -> tuple[np.ndarray, bool]:
    """Return the devices in the shape of the mesh, and whether axes share a torus dimension."""
    if devices[0].platform == "tpu":
        make, shapes = mesh_utils.create_hybrid_device_mesh, (ici, dcn)
        if math.prod(dcn) == 1:
            make, shapes = mesh_utils.create_device_mesh, (ici,)
        try:
            return make(*shapes, devices), False
        except NotImplementedError:  # an axis is smaller than a dimension, as 2 on a torus of 4 x 4
            return make(*shapes, devices, allow_split_physical_axes=True), True
    blocks = np.array(devices, dtype=object).reshape(*dcn, *ici)
    n = len(dcn)
    pairs = [dim for axis in range(n) for dim in (axis, n + axis)]
    sizes = [outer * inner for outer, inner in zip(dcn, ici, strict=True)]
    return blocks.transpose(pairs).reshape(sizes), False


def in_slice_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return every axis of the mesh except `diloco`, in mesh order."""
    return tuple(axis for axis in mesh.axis_names if axis != "diloco")


def devices_of_slice(mesh: Mesh) -> int:
    """Return the number of devices of one position of `diloco`."""
    return mesh.size // mesh.shape["diloco"]


def joins_processes(mesh: Mesh) -> bool:
    """Tell whether slices are in different processes, so that exchanges are between processes."""
    slices = mesh.devices.reshape(mesh.shape["diloco"], -1)
    return len({frozenset(device.process_index for device in each) for each in slices}) > 1


def describe(mesh: Mesh, settings: MeshSettings) -> str:
    """Describe the mesh in one line, for the start of a run."""
    devices = list(mesh.devices.flat)
    dcn = sizes_over_slices(settings, devices)
    ici = tuple(mesh.shape[axis] // size for axis, size in dcn.items())
    shape = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    shared = _arrange(devices, tuple(dcn.values()), ici)[1]
    return (
        f"mesh: {mesh.size} x {devices[0].device_kind}; {shape or 'one device'} "
        f"(over slices: {product(dcn)})"
        f"{'; axes share dimensions of the torus, and their links' if shared else ''}"
    )
