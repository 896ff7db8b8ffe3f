"""What the table of chips gives to the compiler."""

import os

import jax
import pytest

from maxdiloco.flags import config
from maxdiloco.parallel import chips, mesh

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
def test_a_step_on_v5e_leaves_more_memory_to_an_operation_and_products_apart(
    device_kind, flags, expected, monkeypatch
):
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
        mesh.choose_platform(config.load(f"hardware={hardware}".split(), {}))
    finally:
        jax.config.update("jax_platforms", before)
    assert os.environ["LIBTPU_INIT_ARGS"] == expected
