"""Which programs may be loaded that were compiled before."""

import functools

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
    """Of data parallelism, all devices are one replica. A compiled file is refused."""
    cfg = load(*argv)
    mesh = mesh_lib.build(cfg, devices)
    assert saved_programs.keep_their_order(cfg, mesh) == sound
    if sound:
        compiled_file.check_order("programs.zip", cfg, mesh)
    else:
        with pytest.raises(ConfigError, match="compiled_trainstep_file=programs.zip: a CPU loses"):
            compiled_file.check_order("programs.zip", cfg, mesh)


@pytest.fixture
def setting():
    """Sets the folder of JAX's own setting, as its variable of the environment does; put back."""
    before = jax.config.values["jax_compilation_cache_dir"]
    yield functools.partial(jax.config.update, "jax_compilation_cache_dir")
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize(
    "keys, source",
    [
        (("jax_cache_dir=kept",), "jax_cache_dir=kept"),
        (("jax_cache_dir=",), "JAX_COMPILATION_CACHE_DIR=own"),
    ],
)
def test_the_compile_cache_is_used_where_it_is_sound_and_put_back(setting, keys, source):
    """Of both sources; a line names the one that is not used. jax_cache_dir comes first."""
    setting("own")
    for argv in ((), ("ici_fsdp_parallelism=2",)):
        cfg = load(*TWO, "enable_diloco=true", *argv, *keys)
        with saved_programs.compile_cache(cfg) as lines:
            inside = jax.config.values["jax_compilation_cache_dir"]
        if argv:
            assert inside is None
            assert lines == [f"note: {source} is not used: {saved_programs.LOSES_ORDER}."]
        else:
            assert (inside, lines) == (source.partition("=")[2], [])
        assert jax.config.values["jax_compilation_cache_dir"] == "own"


def test_without_a_folder_there_is_no_compile_cache(setting):
    setting(None)
    with saved_programs.compile_cache(load(*TWO, "jax_cache_dir=")) as lines:
        assert (jax.config.values["jax_compilation_cache_dir"], lines) == (None, [])
