"""The mesh: tiers, -1, emulated slices, equations in the errors, and flags of the chips."""

import dataclasses
import math
import os
from types import SimpleNamespace

import jax
import pytest

from maxdiloco.config import config
from maxdiloco.errors import ConfigError
from maxdiloco.parallel import chips
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.planning import topology
from maxdiloco.run import settings


def load(*argv):
    return settings.read_mesh(config.load(argv, {}))


def test_one_open_size_gets_the_devices_that_the_others_leave():
    assert mesh_lib.resolve_sizes({"data": 2, "fsdp": -1}, 8, "ici") == {"data": 2, "fsdp": 4}
    for sizes in ({"data": 3, "fsdp": -1}, {"data": 2, "fsdp": 2}):
        with pytest.raises(ConfigError, match="ici_data_parallelism="):
            mesh_lib.resolve_sizes(sizes, 8, "ici")


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        # Of slice 0, devices 0-3: diloco is outermost.
        ("dcn_diloco_parallelism=2 ici_fsdp_parallelism=2 ici_tensor_parallelism=2",
         (2, 1, 2, 1, 1, 2)),
        # Data coordinates 0, 1 are slice 0 and 2, 3 slice 1: dcn is the outer part of an axis.
        ("dcn_diloco_parallelism=1 dcn_data_parallelism=2 ici_data_parallelism=2 "
         "ici_fsdp_parallelism=2", (1, 4, 2, 1, 1, 1)),
    ],
)  # fmt: skip
def test_slices_are_contiguous_blocks_of_devices(devices, keys, sizes):
    mesh = mesh_lib.build(load(*keys.split()), devices)
    assert tuple(mesh.shape) == ("diloco", "data", "fsdp", "expert", "context", "tensor")
    assert tuple(mesh.shape.values()) == sizes
    assert [device.id for device in mesh.devices.flat] == list(range(8))


@pytest.mark.parametrize("more", ["enable_diloco=false", "enable_diloco=true"])
def test_one_slice_for_two_names_a_key_that_makes_two(devices, more):
    keys = ("dcn_data_parallelism=2", "ici_fsdp_parallelism=-1", more)
    with pytest.raises(ConfigError, match="num_slices=2") as refused:
        mesh_lib.build(load(*keys), devices)
    assert mesh_lib.build(load(*keys, "num_slices=2"), devices).shape["data"] == 2
    # Without DiLoCo the diloco axis is an alternative.
    assert ("dcn_diloco_parallelism=2" in str(refused.value)) == (more == "enable_diloco=false")
    other = load("dcn_diloco_parallelism=2", *keys[1:])
    assert mesh_lib.build(other, devices).shape["diloco"] == 2


@pytest.mark.parametrize(
    ("keys", "product"),
    [
        ("dcn_diloco_parallelism=2 ici_data_parallelism=3 ici_fsdp_parallelism=-1", 6),
        ("dcn_diloco_parallelism=4 ici_fsdp_parallelism=4", 16),
    ],
)
def test_a_product_that_does_not_match_names_both_sides(devices, keys, product):
    with pytest.raises(ConfigError, match=f"= {product} devices, .* 8 "):
        mesh_lib.build(load(*keys.split()), devices)


@pytest.mark.parametrize(
    ("keys", "processes", "expected"),
    [
        ("dcn_diloco_parallelism=2 ici_fsdp_parallelism=2 ici_tensor_parallelism=2", 1, 8),
        ("num_slices=3", 1, 3),  # both open: one device a slice
        ("", 2, 2),  # two slices of one device
        ("ici_tensor_parallelism=2", 2, 4),  # fsdp is open still
        ("dcn_data_parallelism=2", 4, 4),
        ("dcn_diloco_parallelism=2", 4, 4),  # two slices of two devices
        ("num_slices=3", 2, 6),  # three slices of two
        ("dcn_diloco_parallelism=3 ici_fsdp_parallelism=2", 2, 6),
    ],
)
def test_open_sizes_give_every_process_as_many_devices(keys, processes, expected):
    assert mesh_lib.emulated_devices(load(*keys.split()), processes) == expected
    with pytest.raises(ConfigError, match="2 emulated devices, .* 3 "):
        mesh_lib.emulated_devices(load("dcn_diloco_parallelism=2", "ici_fsdp_parallelism=1"), 3)


@pytest.mark.parametrize(
    ("keys", "platforms", "processes", "expected"),
    [
        # 16 CPU devices for 8 processes.
        ("hardware=cpu ici_fsdp_parallelism=2 dcn_diloco_parallelism=8", "", 8, 2),
        ("hardware=auto ici_fsdp_parallelism=2 dcn_diloco_parallelism=8", "cpu", 8, 2),
        # On accelerators nothing is asked, set or refused.
        ("hardware=auto ici_fsdp_parallelism=2 dcn_diloco_parallelism=8", "", 3, -1),
        ("hardware=tpu ici_fsdp_parallelism=2 dcn_diloco_parallelism=8", "", 3, -1),
        ("hardware=gpu ici_fsdp_parallelism=2 dcn_diloco_parallelism=8", "", 3, -1),
        # No more than 256, which collectives can join: XLA would abort the process in its first
        # collective, or while it makes the devices.
        ("hardware=cpu ici_fsdp_parallelism=128 dcn_diloco_parallelism=2", "", 1, 256),
        ("hardware=cpu ici_fsdp_parallelism=1000000000 dcn_diloco_parallelism=2", "", 1, 256),
        ("hardware=cpu ici_fsdp_parallelism=100 dcn_diloco_parallelism=2", "", 1, 200),
    ],
)
def test_devices_are_emulated_where_jax_uses_the_cpu_alone(
    monkeypatch, keys, platforms, processes, expected
):
    set_to = {"jax_platforms": platforms, "jax_num_cpu_devices": -1}
    monkeypatch.setattr(jax, "config", SimpleNamespace(**set_to, update=set_to.__setitem__))
    mesh_lib.emulate_devices(load(*keys.split()), num_processes=processes)
    assert set_to["jax_num_cpu_devices"] == expected


def test_absent_hardware_is_refused_with_the_reason_of_jax(monkeypatch):
    """Training would start on the CPU: JAX passes over a platform that is not installed."""
    for hardware in ("gpu", "tpu"):
        with pytest.raises(ConfigError, match=f"hardware={hardware} "):
            mesh_lib.visible_devices(load(f"hardware={hardware}"))
    assert len(mesh_lib.visible_devices(load("hardware=cpu"))) == 8

    def fails():
        raise RuntimeError(f"Unable to start tpu: {why} (set JAX_PLATFORMS='' to choose)\nTrace")

    why = "no device found"
    monkeypatch.setattr(jax, "devices", fails)
    message = r"hardware=tpu .*no device found\..*hardware=cpu"
    for joined in (False, True):
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda: joined)  # noqa: B023
        with pytest.raises(ConfigError, match=message):
            mesh_lib.visible_devices(load("hardware=tpu"))
    why = "DEADLINE_EXCEEDED: GetKeyValue() timed out"  # of a peer that is gone
    with pytest.raises(RuntimeError, match="GetKeyValue"):
        mesh_lib.visible_devices(load("hardware=tpu"))


def test_devices_of_processes_that_were_not_joined_are_refused(monkeypatch):
    """libtpu forms the pod by itself; nobody would notice a lost process."""
    cfg = load("hardware=auto")
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    message = "hardware=auto: .*4 processes.*hardware=tpu"
    with pytest.raises(ConfigError, match=message):
        mesh_lib.visible_devices(cfg)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert len(mesh_lib.visible_devices(cfg)) == 8


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the mesh reads of a GPU."""

    id: int
    process_index: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = "H100"


def gpus(*hosts):
    """One GPU a process; hosts: the host of each process."""
    return [Gpu(i, i, host) for i, host in enumerate(hosts)]


ALONE, TWO_HOSTS = SimpleNamespace(platform="tpu"), gpus(0, 0, 0, 0, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("keys", "devices", "slices"),
    [
        ("", [SimpleNamespace(platform="tpu", slice_index=i // 2) for i in range(6)], 3),
        ("", [ALONE] * 4, 1),  # devices of one TPU slice have no index
        ("", TWO_HOSTS, 2),  # a process each, but a slice is a host
        ("num_slices=4", TWO_HOSTS, 4),
        ("", [SimpleNamespace(platform="cpu", process_index=i) for i in range(8)], 8),
    ],
)
def test_slices_are_counted_by_what_devices_tell(keys, devices, slices):
    assert mesh_lib.count_slices(load(*keys.split()), devices) == slices


@pytest.mark.parametrize(
    ("slices", "hosts", "ids", "of_slices"),
    [
        # Slurm's cyclic distribution: even processes on one host, odd ones on the other.
        ("-1", [0, 1] * 4, [0, 2, 4, 6, 1, 3, 5, 7], [{0}, {1}]),
        ("4", [0, 1] * 4, [0, 2, 4, 6, 1, 3, 5, 7], [{0}, {0}, {1}, {1}]),
        # 4 hosts of 2 GPUs as 2 slices, their processes dealt in turn.
        ("2", [0, 1, 2, 3] * 2, [0, 4, 1, 5, 2, 6, 3, 7], [{0, 1}, {2, 3}]),
    ],
)
def test_a_slice_of_gpus_is_a_part_of_a_host_or_whole_hosts(slices, hosts, ids, of_slices):
    """3 hosts of 2 GPUs as 2 slices of 3 are refused: the second host would be in both."""
    mesh = mesh_lib.build(load(f"num_slices={slices}"), gpus(*hosts))
    assert [device.id for device in mesh.devices.flat] == ids
    assert [{device.slice_index for device in slot.flat} for slot in mesh.devices] == of_slices
    with pytest.raises(ConfigError, match="2 slices of 3 GPUs .* 2, 2, 2"):
        mesh_lib.build(load("num_slices=2"), gpus(0, 0, 1, 1, 2, 2))


SIZES = [{"tensor": size} for size in (1, 2, 4, 8)] + [{"diloco": 2}]


@pytest.mark.tpu_aot
def test_in_every_topology_a_replica_stays_in_its_slice():
    """One slice, whose devices have no slice_index, and two."""
    shared, built, configs = set(), 0, []
    for sizes in SIZES:
        keys = [f"ici_{axis}_parallelism={size}" for axis, size in sizes.items()]
        configs.append((sizes, load("hardware=tpu", *keys)))
    for name in [name for kind in topology.TPUS for name in topology.names(kind)]:
        for slices in (1, 2):
            tpus = topology.devices(name, slices)
            for sizes, cfg in configs:
                if len(tpus) // slices % math.prod(sizes.values()):
                    continue
                mesh = mesh_lib.build(cfg, tpus)
                assert set(mesh.devices.flat) == set(tpus)
                assert mesh.shape["diloco"] == slices * sizes.get("diloco", 1)
                for slot in mesh.devices:
                    assert len({mesh_lib.slice_of(device) for device in slot.flat}) == 1
                built += 1
                if "axes share dimensions of the torus" in mesh_lib.describe(mesh, cfg):
                    shared.add((name, slices, *sizes.items()))
    assert built > 300
    assert ("v5e-16", 2, ("tensor", 2)) in shared  # 2 of a dimension of 4
    assert ("v5e-16", 2, ("tensor", 4)) not in shared  # a whole dimension of 4


# --- what the table of chips gives to the compiler ----------------------------------------------

OPTION = "xla_tpu_scoped_vmem_limit_kib"
APART = {"xla_tpu_dot_dot_fusion": "false"}
BOTH = {OPTION: "32768"} | APART


@pytest.mark.parametrize(
    ("device_kind", "flags", "expected"),
    [
        ("TPU v5 lite", "", BOTH),
        ("TPU v5 lite", "--xla_enable_async_all_gather=true", BOTH),
        ("TPU v5 lite", f"--a=b --{OPTION}=65536", APART),  # the user's own
        ("TPU v5 lite", f"--{OPTION}=65536 --xla_tpu_dot_dot_fusion=true", None),
        ("TPU v6 lite", "", None),  # not tried
        ("cpu", "", None),
    ],
)
def test_compiler_options_of_a_v5e_step(device_kind, flags, expected, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", flags)
    assert chips.step_options(device_kind) == expected


LINK = "--xla_tpu_pcie_bandwidth_multiplier="


@pytest.mark.parametrize(
    ("hardware", "platforms", "flags", "expected"),
    [
        ("tpu", None, "", f"{LINK}0.00001"),
        ("tpu", None, "--a=b", f"--a=b {LINK}0.00001"),
        ("tpu", None, f"{LINK}1 --a=b", f"{LINK}1 --a=b"),  # the user's own
        ("tpu optimizer_memory_host_offload=true", None, "", ""),  # its copies would seem slow
        ("auto", None, "", f"{LINK}0.00001"),  # may be a TPU
        ("auto", "cpu", "", ""),
        ("gpu", None, "", ""),
        ("cpu", None, "", ""),
    ],
)
def test_a_run_that_may_have_tpus_has_libtpu_hide_transfers(
    hardware, platforms, flags, expected, monkeypatch
):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", flags)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        mesh_lib.choose_platform(load(*f"hardware={hardware}".split()))
    finally:
        jax.config.update("jax_platforms", before)
    assert os.environ["LIBTPU_INIT_ARGS"] == expected
