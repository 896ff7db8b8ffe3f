"""What the table of chips gives to the compiler."""

import pytest

from maxdiloco.parallel import chips

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
