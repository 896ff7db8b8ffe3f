"""The mesh: tiers, -1, emulated slices, and equations in the errors."""

import dataclasses
import math
from types import SimpleNamespace

import jax
import pytest

from maxdiloco.aot import topology
from maxdiloco.errors import ConfigError
from maxdiloco.flags import config
from maxdiloco.parallel import mesh as mesh_lib


def load(*argv):
    return config.load(argv, {})


def test_one_open_size_takes_what_the_others_leave():
    assert mesh_lib.fill({"data": 2, "fsdp": -1}, 8, "ici") == {"data": 2, "fsdp": 4}


@pytest.mark.parametrize("sizes", [{"data": 3, "fsdp": -1}, {"data": 2, "fsdp": 2}])
def test_sizes_that_do_not_fill_are_an_equation(sizes):
    with pytest.raises(ConfigError, match=r"ici_data_parallelism=.* = \d, but there are 8"):
        mesh_lib.fill(sizes, 8, "ici")


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


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("dcn_diloco_parallelism=2 ici_data_parallelism=3 ici_fsdp_parallelism=-1",
         r"diloco 2 \* data 3 = 6 devices, but 8 are visible"),
        ("dcn_diloco_parallelism=4 ici_fsdp_parallelism=4",
         r"diloco 4 \* fsdp 4 = 16 devices, but 8 are visible.*; hardware=cpu emulates devices"),
    ],
)  # fmt: skip
def test_a_product_that_does_not_match_names_both_sides(devices, keys, message):
    with pytest.raises(ConfigError, match=message):
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


def test_processes_share_the_devices_evenly():
    cfg = load("dcn_diloco_parallelism=2", "ici_fsdp_parallelism=1")
    with pytest.raises(ConfigError, match=r"2 emulated devices, which 3 .* multiple of 3"):
        mesh_lib.emulated_devices(cfg, 3)


@pytest.mark.parametrize(
    ("hardware", "platforms", "expected"),
    [("cpu", "", 2), ("auto", "cpu", 2), ("auto", "", -1), ("tpu", "", -1), ("gpu", "", -1)],
)
def test_devices_are_emulated_where_jax_uses_the_cpu_alone(
    monkeypatch, hardware, platforms, expected
):
    """16 CPU devices for 8 processes; on accelerators nothing is asked, set or refused."""
    set_to = {"jax_platforms": platforms, "jax_num_cpu_devices": -1}
    monkeypatch.setattr(jax, "config", SimpleNamespace(**set_to, update=set_to.__setitem__))
    keys = ["dcn_diloco_parallelism=8", "ici_fsdp_parallelism=2"]
    mesh_lib.emulate_devices(load(f"hardware={hardware}", *keys), num_processes=8)
    assert set_to["jax_num_cpu_devices"] == expected
    if expected == -1:
        mesh_lib.emulate_devices(load(f"hardware={hardware}", *keys), num_processes=3)


@pytest.mark.parametrize("hardware", ["gpu", "tpu"])
def test_hardware_that_is_not_there_is_refused(hardware):
    """Training would start on the CPU: JAX passes over a platform that is not installed."""
    with pytest.raises(ConfigError, match=f"hardware={hardware} but JAX finds only cpu devices"):
        mesh_lib.visible_devices(load(f"hardware={hardware}"))
    assert len(mesh_lib.visible_devices(load("hardware=cpu"))) == 8


def test_hardware_that_does_not_start_is_refused_with_jax_s_reason(monkeypatch):
    def fails():
        raise RuntimeError(f"Unable to start tpu: {why} (set JAX_PLATFORMS='' to choose)\nTrace")

    why = "no device found"
    monkeypatch.setattr(jax, "devices", fails)
    message = r"hardware=tpu does not work here: .*no device found\. See that.*'.\[tpu\]'.*=cpu"
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
    message = r"hardware=auto: the devices belong to 4 processes.*On a TPU pod set hardware=tpu"
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


@pytest.mark.parametrize("slices", ["-1", "4"])
def test_a_slice_of_gpus_stays_on_its_host_when_processes_were_dealt_in_turn(slices):
    """Slurm's cyclic distribution: even processes on one host, odd ones on the other."""
    mesh = mesh_lib.build(load(f"num_slices={slices}"), gpus(0, 1, 0, 1, 0, 1, 0, 1))
    assert mesh.devices.shape[0] == (2 if slices == "-1" else 4)
    assert [device.id for device in mesh.devices.flat] == [0, 2, 4, 6, 1, 3, 5, 7]
    for slot in mesh.devices:
        assert len({device.slice_index for device in slot.flat}) == 1


def test_a_slice_of_gpus_may_be_several_whole_hosts():
    """4 hosts of 2 GPUs as 2 slices, their processes dealt in turn."""
    mesh = mesh_lib.build(load("num_slices=2"), gpus(0, 1, 2, 3, 0, 1, 2, 3))
    hosts = [{device.slice_index for device in slot.flat} for slot in mesh.devices]
    assert hosts == [{0, 1}, {2, 3}]


def test_a_slice_of_gpus_that_cuts_through_hosts_is_refused():
    """3 hosts of 2 GPUs as 2 slices of 3: the second host would be in both."""
    with pytest.raises(ConfigError, match=r"2 slices of 3 GPUs cut .* have 2, 2, 2\. Choose"):
        mesh_lib.build(load("num_slices=2"), gpus(0, 0, 1, 1, 2, 2))


SIZES = [{"tensor": size} for size in (1, 2, 4, 8)] + [{"diloco": 2}]


@pytest.mark.tpu_aot
def test_every_topology_takes_ordinary_sizes_and_a_replica_stays_in_its_slice():
    """One slice, whose devices have no slice_index, and two."""
    shared, built, configs = set(), 0, []
    for sizes in SIZES:
        keys = [f"ici_{axis}_parallelism={size}" for axis, size in sizes.items()]
        configs.append((sizes, load("hardware=tpu", *keys)))
    for name in topology.TOPOLOGIES:
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


def test_no_more_devices_are_emulated_than_collectives_can_join(monkeypatch):
    """XLA would abort the process in its first collective, or while it makes the devices."""
    asked = {}
    fresh = SimpleNamespace(
        jax_num_cpu_devices=-1, update=lambda key, value: asked.update({key: value})
    )
    monkeypatch.setattr(mesh_lib.jax, "config", fresh)
    for size, emulated in ((128, 256), (10**9, 256), (100, 200)):
        cfg = load("hardware=cpu", "dcn_diloco_parallelism=2", f"ici_data_parallelism={size}",
                   "ici_fsdp_parallelism=1")
        mesh_lib.emulate_devices(cfg, num_processes=1)
        assert asked["jax_num_cpu_devices"] == emulated
