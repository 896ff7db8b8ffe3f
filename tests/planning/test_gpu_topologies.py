"""GPUs by name: what one slice has, and what JAX takes of their memory."""

import pytest

from maxdiloco.errors import ConfigError
from maxdiloco.parallel.chips import CHIPS
from maxdiloco.planning import topology


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
    found = topology.find(name)
    assert found == topology.find(known) and found.is_gpu
    assert (found.devices, found.on_host) == (devices, on_host)
    assert found.chip.peak_flops == peak and not found.chip.timed


def test_memory_is_the_share_that_jax_takes(monkeypatch):
    """An H100 of 80 GB has 84,942,979,072 bytes."""
    ours, older = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    for environ, share in (({}, 0.75), ({older: "0.9"}, 0.9), ({ours: ".5", older: "0.9"}, 0.5)):
        for key in (ours, older):
            monkeypatch.setenv(key, environ.get(key, ""))
        found = topology.find("h100-8").chip
        assert found.hbm == pytest.approx(84942979072 * share, abs=1) and found.ici_gbps == 3600
    monkeypatch.delenv(ours)
    for raw in ("0", "1.5", "much"):
        monkeypatch.setenv(older, raw)
        with pytest.raises(ConfigError, match=f"{older}={raw} "):
            topology.find("h100-8")


@pytest.mark.parametrize(
    ("name", "wanted", "found"),
    [
        ("h200-8", 1, "h200-1"),
        ("h200-8", 3, "h200-4"),
        ("h200-8", 9, "h200-16"),
        ("h200-8", 2000, ""),
        ("v5e-4", 5, "v5e-8"),
        ("v5e-4", 4, "v5e-4"),
        ("v5litepod-16", 17, "v5e-32"),
        ("v5p-8", 16, "v5p-32"),  # 16 chips, which are 16 devices
        ("tpu7x-8", 9, "tpu7x-16"),
        ("v5e-4", 257, ""),
    ],
)
def test_the_slice_of_the_same_kind_that_would_do(name, wanted, found):
    assert topology.larger(name, wanted) == found


DEVICES = {
    "a100-40gb": ("8.0", "NVIDIA A100-SXM4-40GB"),
    "a100-80gb": ("8.0", "NVIDIA A100-SXM4-80GB"),
    "h100": ("9.0", "NVIDIA H100 80GB HBM3"),
    "h200": ("9.0", "NVIDIA H200"),
    "b200": ("10.0", "NVIDIA B200"),
    "t4": ("7.5", "Tesla T4"),
    "l4": ("8.9", "NVIDIA L4"),
    "a6000": ("8.6", "NVIDIA RTX A6000"),
    "rtx5090": ("12.0", "NVIDIA GeForce RTX 5090"),
}


def test_kinds_are_chips_and_have_a_capability():
    assert set(DEVICES) == set(topology.GPUS)
    for kind, (capability, device_kind) in DEVICES.items():
        assert topology.find(f"{kind}-1").capability == capability
        assert device_kind in CHIPS[topology.GPUS[kind].chip].device_kinds


@pytest.mark.gpu_aot
def test_devices_are_what_the_names_mean_slice_by_slice_and_host_by_host():
    """Two slices of two hosts of eight."""
    for kind, expected in DEVICES.items():
        (device,) = topology.devices(f"{kind}-1", 1)
        assert (device.compute_capability, device.device_kind) == expected
    assert [d.process_index for d in topology.devices("h100-16", 2)] == [n // 8 for n in range(32)]


def test_experts_on_absent_gpus_that_jax_has_no_name_of_are_refused(monkeypatch):
    """Its table of GPUs is jax 0.12's. Control: other kinds, no experts, the jax before."""
    monkeypatch.setattr(topology.jax, "__version_info__", (0, 12, 0))
    for name, experts in (("l4-1", 8), ("a6000-1", 1), ("v5e-4", 8)):
        topology.check_experts(name, experts)
    with pytest.raises(ConfigError, match="num_experts=8 .*=a6000-4.*l4-4"):
        topology.check_experts("a6000-4", 8)
    monkeypatch.setattr(topology.jax, "__version_info__", (0, 10, 2))
    topology.check_experts("a6000-4", 8)


def test_the_threads_of_a_multiprocessor_are_its_generation_s():
    """NVIDIA's CUDA C++ Programming Guide, technical specifications per compute capability."""
    expected = {"7": 1024, "8.0": 2048, "8.6": 1536, "8.9": 1536, "9": 2048, "10": 2048, "12": 1536}
    for gpu in topology.GPUS.values():
        key = gpu.capability if gpu.capability in expected else gpu.capability.partition(".")[0]
        assert gpu.sm_limits[0] == expected[key]
        assert f"threads_per_core_limit: {expected[key]}\n" in topology.target_config(gpu)
