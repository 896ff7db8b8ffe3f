"""Which programs may be loaded that were compiled before."""

import jax
import pytest

from maxdiloco.errors import ConfigError
from maxdiloco.flags import config
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.trainer import compiled_file, saved_programs

TWO = ("dcn_diloco_parallelism=2", "num_diloco_replicas=2")


def load(*argv):
    first = ["hardware=cpu", "jax_cache_dir=kept", "ici_fsdp_parallelism=1"]
    return config.load([*first, *argv], {})


@pytest.mark.parametrize(
    "argv, sound",
    [
        ((*TWO, "enable_diloco=true"), True),
        ((*TWO, "enable_diloco=true", "ici_fsdp_parallelism=2"), False),
        ((*TWO, "enable_diloco=true", "ici_tensor_parallelism=2"), False),
        (("dcn_diloco_parallelism=2", "enable_diloco=false"), False),
        (("enable_diloco=false",), True),
    ],
)  # fmt: skip
def test_a_cpu_runs_saved_programs_where_no_device_shares_a_replica(devices, argv, sound):
    """Of data parallelism, all devices are one replica. What is not sound is told in one line, and
    a compiled file is refused."""
    cfg = load(*argv)
    mesh = mesh_lib.build(cfg, devices)
    assert saved_programs.keep_their_order(cfg, mesh) == sound
    assert saved_programs.note(cfg, mesh) == ([] if sound else [
        f"note: jax_cache_dir=kept is not used: {saved_programs.LOSES_ORDER}."
    ])  # fmt: skip
    if sound:
        compiled_file.check_order("programs.zip", cfg, mesh)
    else:
        with pytest.raises(ConfigError, match="compiled_trainstep_file=programs.zip: a CPU loses"):
            compiled_file.check_order("programs.zip", cfg, mesh)


@pytest.mark.parametrize("argv, used", [((), "kept"), (("ici_fsdp_parallelism=2",), None)])
def test_the_compile_cache_is_set_for_a_run_and_taken_back_after_it(argv, used):
    cfg = load(*TWO, "enable_diloco=true", *argv)
    before = jax.config.values["jax_compilation_cache_dir"]
    with saved_programs.compile_cache(cfg):
        assert jax.config.values["jax_compilation_cache_dir"] == used
    assert jax.config.values["jax_compilation_cache_dir"] == before
