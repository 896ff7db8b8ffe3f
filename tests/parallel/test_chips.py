"""What the table of chips gives to the compiler."""

import pytest

from maxdiloco.parallel import chips

OPTION = "xla_tpu_scoped_vmem_limit_kib"


@pytest.mark.parametrize(
    ("device_kind", "flags", "expected"),
    [
        ("TPU v5 lite", "", {OPTION: "32768"}),
        ("TPU v5 lite", "--xla_enable_async_all_gather=true", {OPTION: "32768"}),
        ("TPU v5 lite", f"--a=b --{OPTION}=65536", None),  # the user's own
        ("TPU v6 lite", "", None),  # not tried
        ("cpu", "", None),
    ],
)
def test_a_step_on_v5e_leaves_more_memory_to_an_operation(
    device_kind, flags, expected, monkeypatch
):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", flags)
    assert chips.step_options(device_kind) == expected
