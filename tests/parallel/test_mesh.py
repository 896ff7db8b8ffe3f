"""The mesh: tiers, -1, emulated slices, and equations in the errors."""

import types

import pytest

from maxdiloco import config
from maxdiloco.errors import ConfigError
from maxdiloco.parallel import mesh as mesh_lib


def load(*argv):
    return config.load(argv, {})


def test_one_open_size_takes_what_the_others_leave():
    assert mesh_lib.fill({"data": 2, "fsdp": -1}, 8, "ici") == {"data": 2, "fsdp": 4}


@pytest.mark.parametrize("sizes", [{"data": 3, "fsdp": -1}, {"data": 2, "fsdp": 2}])
def test_sizes_that_do_not_fill_are_an_equation(sizes):
    with pytest.raises(ConfigError, match=r"ici_data_parallelism=.* = \d, but there are 8"):
        mesh_lib.fill(sizes, 8, "ici")


def test_slices_are_contiguous_blocks_of_devices(devices):
    """dcn_diloco 2 * ici_fsdp 2 * ici_tensor 2: slice 0 is devices 0-3, diloco is outermost."""
    cfg = load(
        "dcn_diloco_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"
    )
    mesh = mesh_lib.build(cfg, devices)
    assert dict(mesh.shape) == {
        "diloco": 2, "data": 1, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2
    }
    assert [[d.id for d in half.flat] for half in mesh.devices] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_dcn_is_the_outer_part_of_an_axis(devices):
    """dcn_data 2 * ici_data 2, ici_fsdp 2: data coordinate 0,1 are slice 0 and 2,3 slice 1."""
    cfg = load(
        "dcn_diloco_parallelism=1",
        "dcn_data_parallelism=2",
        "ici_data_parallelism=2",
        "ici_fsdp_parallelism=2",
    )
    mesh = mesh_lib.build(cfg, devices)
    ids = [[d.id for d in row.flat] for row in mesh.devices[0]]
    assert ids == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_product_that_does_not_match_names_both_sides(devices):
    cfg = load("dcn_diloco_parallelism=2", "ici_data_parallelism=3", "ici_fsdp_parallelism=-1")
    with pytest.raises(ConfigError, match=r"diloco 2 \* data 3 = 6 devices, but 8 are visible"):
        mesh_lib.build(cfg, devices)


def test_too_few_devices_are_named(devices):
    cfg = load("dcn_diloco_parallelism=4", "ici_fsdp_parallelism=4")
    with pytest.raises(ConfigError, match=r"diloco 4 \* fsdp 4 = 16 devices, but 8 are visible"):
        mesh_lib.build(cfg, devices)


def test_emulated_devices_are_the_product():
    cfg = load("dcn_diloco_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2")
    assert mesh_lib.emulated_devices(cfg) == 8
    assert mesh_lib.emulated_devices(load("num_slices=3")) == 3  # both open: one device a slice


def test_processes_share_the_devices_evenly():
    cfg = load("dcn_diloco_parallelism=2", "ici_fsdp_parallelism=1")
    with pytest.raises(ConfigError, match=r"2 emulated devices, which 3 .* multiple of 3"):
        mesh_lib.emulate_devices(cfg, num_processes=3)


def test_real_slices_are_told_apart_by_their_index():
    """On TPU the number of slices is read off the devices, not the config."""
    cfg = load()
    tpus = [types.SimpleNamespace(platform="tpu", slice_index=i // 2) for i in range(6)]
    assert mesh_lib.count_slices(cfg, tpus) == 3


def test_no_more_devices_are_emulated_than_collectives_can_join(monkeypatch):
    """XLA would abort the process in its first collective, or while it makes the devices."""
    asked = {}
    fresh = types.SimpleNamespace(
        jax_num_cpu_devices=-1, update=lambda key, value: asked.update({key: value})
    )
    monkeypatch.setattr(mesh_lib.jax, "config", fresh)
    for size, emulated in ((128, 256), (10**9, 256), (100, 200)):
        cfg = load("hardware=cpu", "dcn_diloco_parallelism=2", f"ici_data_parallelism={size}",
                   "ici_fsdp_parallelism=1")
        mesh_lib.emulate_devices(cfg, num_processes=1)
        assert asked["jax_num_cpu_devices"] == emulated
