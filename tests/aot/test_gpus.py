"""GPUs by name: what one slice has, and what JAX takes of their memory."""

import pytest

from maxdiloco.aot import gpus, topology
from maxdiloco.errors import ConfigError
from maxdiloco.parallel.chips import CHIPS

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "known", "devices", "on_host", "peak"),
    [
        ("h100-8", "h100-8", 8, 8, 989e12),
        ("h100-80gb-8", "h100-8", 8, 8, 989e12),  # XPK's
        ("h200-141gb-16", "h200-16", 16, 8, 989e12),
        ("a100-1", "a100-80gb-1", 1, 1, 312e12),
        ("a100-40gb-4", "a100-40gb-4", 4, 4, 312e12),
        ("b200-64", "b200-64", 64, 8, 2250e12),
        ("l4-2", "l4-2", 2, 2, 121e12),  # XPK's too
        ("rtx5090-8", "rtx5090-8", 8, 8, 209.5e12),
    ],
)
def test_a_name_is_a_kind_and_a_number_of_gpus(name, known, devices, on_host, peak):
    assert topology.is_gpu(name)
    assert gpus.known_name(name) == known
    assert topology.devices_per_slice(name) == devices
    assert topology.devices_per_host(name) == on_host
    assert topology.chip(name).peak_flops == peak
    assert not topology.chip(name).timed


def test_names_of_tpus_are_of_no_gpu():
    assert not any(map(topology.is_gpu, (*topology.TOPOLOGIES, "v5litepod-16", "", "h300-8")))
    assert topology.chip("v5e-16").timed


@pytest.mark.parametrize(
    ("environ", "share"),
    [
        ({}, 0.75),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}, 0.9),
        ({"XLA_CLIENT_MEM_FRACTION": ".5", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}, 0.5),
    ],
)
def test_memory_is_the_share_that_jax_takes(environ, share):
    """An H100 of 80 GB has 84,942,979,072 bytes."""
    assert gpus.chip("h100-8", environ).hbm == pytest.approx(84942979072 * share, abs=1)
    assert gpus.chip("h100-8", environ).ici_gbps == 3600


@pytest.mark.parametrize("raw", ["0", "1.5", "much"])
def test_a_share_that_is_none_is_refused(raw):
    with pytest.raises(ConfigError, match=rf"XLA_PYTHON_CLIENT_MEM_FRACTION={raw} must .*Use 0.9"):
        gpus.chip("h100-8", {"XLA_PYTHON_CLIENT_MEM_FRACTION": raw})


@pytest.mark.parametrize("name", ["h100-3", "h100-12", "a100-x"])
def test_a_number_of_gpus_that_no_hosts_have_is_refused(name):
    for lookup in (topology.chip, topology.devices_per_slice, lambda n: topology.devices(n, 2)):
        with pytest.raises(
            ConfigError, match=rf"={name} is not known: .* counts GPUs .*Use one of"
        ):
            lookup(name)


def test_an_unknown_kind_names_gpus_too():
    with pytest.raises(ConfigError, match=r"h300-8 is not known. .*h100-8; kinds: .*v6e.*, h100"):
        topology.chip("h300-8")


def test_without_the_plugin_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(gpus, "PLUGINS", ("no_such_plugin",))
    with pytest.raises(ConfigError, match=r"=h100-8 needs JAX's plugin .*cudacompile"):
        topology.devices("h100-8", 2)


@pytest.mark.parametrize(
    ("devices", "larger"), [(1, "h200-1"), (3, "h200-4"), (9, "h200-16"), (2000, "")]
)
def test_a_larger_slice_of_the_same_kind(devices, larger):
    assert topology.larger("h200-8", devices) == larger


@pytest.mark.gpu_aot
def test_devices_come_slice_by_slice_and_host_by_host():
    """Two slices of two hosts of eight; the memory of XLA's description is the one in the table."""
    found = gpus.devices("h100-16", 2)
    assert [device.process_index for device in found] == [n // 8 for n in range(32)]
    assert {device.device_kind for device in found} == {"NVIDIA H100 80GB HBM3"}
    assert {device.compute_capability for device in found} == {"9.0"}


@pytest.mark.gpu_aot
@pytest.mark.parametrize("kind", list(gpus.GPUS))
def test_the_table_has_the_capability_of_the_devices(kind):
    (device,) = gpus.devices(f"{kind}-1", 1)
    assert device.compute_capability == topology.compute_capability(f"{kind}-1")
    assert device.device_kind == gpus.GPUS[kind].name in CHIPS[gpus.GPUS[kind].chip].kinds
