"""Names of TPU slices, as MaxText and XPK have them, and names that are refused."""

import importlib.util

import pytest

from maxdiloco.errors import ConfigError
from maxdiloco.parallel import chips
from maxdiloco.planning import topology


@pytest.mark.parametrize(
    ("name", "libtpu", "hbm_gib", "links", "of"),
    [
        ("v4-8", "v4:2x2x1", 30.75, 2, 6),  # 8 cores, 4 chips
        ("v4-256", "v4:4x4x8", 30.75, 6, 6),
        ("v5e-4", "v5e:2x2", 15.75, 2, 4),
        ("v5e-16", "v5e:4x4", 15.75, 2, 4),  # a corner of a 4x4 mesh
        ("v5e-128", "v5e:8x16", 15.75, 3, 4),  # a ring along 16
        ("v5e-256", "v5e:16x16", 15.75, 4, 4),
        ("v5p-8", "v5p:2x2x1", 95.74, 2, 6),
        ("v5p-32", "v5p:2x2x4", 95.74, 3, 6),  # no torus
        ("v5p-128", "v5p:4x4x4", 95.74, 6, 6),
        ("v6e-16", "v6e:4x4", 31.25, 2, 4),
        ("v6e-256", "v6e:16x16", 31.25, 4, 4),
        ("tpu7x-8", "tpu7x:2x2x1", 94.75, 2, 6),  # 4 chips of two devices
        ("tpu7x-16", "tpu7x:2x2x2", 94.75, 3, 6),
    ],
)
def test_a_name_is_a_shape_and_a_chip_and_its_slowest_has_so_many_links(
    name, libtpu, hbm_gib, links, of
):
    kind, shape, *_, chip, _ = topology.find(name)
    assert f"{kind}:{'x'.join(map(str, shape))}" == libtpu
    assert chip.hbm == int(hbm_gib * 2**30)
    assert chip.ici_gbps == pytest.approx(chips.CHIPS[kind].ici_gbps * links / of)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("v5-16", "v5e-16"),
        ("v5p-24", "v5p-32"),
        ("h100-3", ""),
        ("h100-12", ""),
        ("a100-x", ""),
        ("h300-8", "h100-8"),
    ],
)
def test_an_unknown_topology_is_refused_with_those_that_are_known(name, known):
    for lookup in (topology.find, lambda name: topology.devices(name, 2)):
        with pytest.raises(ConfigError, match=f"={name} .*{known}"):
            lookup(name)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("v5litepod-16", "v5e-16"),  # xpk --tpu-type, and Cloud TPU
        ("v5litepod-256", "v5e-256"),
        ("v6e-4x4", "v6e-16"),
        ("v5p-2x2x4", "v5p-32"),  # 16 chips, 32 TensorCores
        ("tpu7x-2x2x1", "tpu7x-8"),
        ("tpu-v5-lite-podslice-4x8", "v5e-32"),  # GKE's label and its topology
        ("tpu-v5p-slice-4x4x4", "v5p-128"),
    ],
)
def test_the_names_of_xpk_and_gke_mean_the_same_slices(name, known):
    assert topology.find(name) == topology.find(known)


@pytest.mark.parametrize(("name", "extra"), [("v5e-4", "tpu"), ("h100-8", "cudacompile")])
def test_without_the_compiler_the_extra_is_named(name, extra, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"={name} .*{extra}"):
        topology.devices(name, 2)


def test_every_topology_is_of_a_chip_with_all_facts():
    for name in [name for kind in topology.TPUS for name in topology.names(kind)]:
        found = topology.find(name)
        assert None not in found.chip and found.chip.timed, name
        assert not found.is_gpu and found.capability == ""


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("name", "devices", "kind"),
    [("v4-8", 4, "TPU v4"), ("v5e-16", 16, "TPU v5 lite"), ("v5p-8", 4, "TPU v5"),
     ("v6e-16", 16, "TPU v6 lite"), ("tpu7x-8", 8, "TPU7x")],
)  # fmt: skip
def test_devices_of_two_slices(name, devices, kind):
    found = topology.devices(name, 2)
    assert len(found) == 2 * devices == 2 * topology.find(name).devices
    assert {device.slice_index for device in found} == {0, 1}
    assert {device.device_kind for device in found} == {kind}
    assert kind in topology.find(name).chip.device_kinds
