"""Where JAX's compile cache is used, and which programs it keeps."""

import types

import jax
import numpy as np
import pytest

from maxdiloco.config import config
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.run import compile_cache
from maxdiloco.run import settings as run_settings

TWO = ("dcn_diloco_parallelism=2", "num_diloco_replicas=2")


def load(*argv):
    first = ["hardware=cpu", "ici_fsdp_parallelism=1"]
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
    """All devices of data parallelism are one replica."""
    cfg = load(*argv)
    mesh = mesh_lib.build(run_settings.read_mesh(cfg), devices)
    assert compile_cache.keeps_order(mesh, has_replicas=cfg.enable_diloco) == sound


@pytest.fixture
def setting():
    """Sets JAX's own settings, as variables of the environment do; they are put back."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: jax.config.values[name] for name in names}
    yield jax.config.update
    for name, value in before.items():
        jax.config.update(name, value)


def cached(*argv):
    """The context of the compile cache of a run."""
    cfg = load(*argv)
    mesh = mesh_lib.build(run_settings.read_mesh(cfg))
    return compile_cache.compile_cache(cfg.jax_cache_dir, mesh, has_replicas=cfg.enable_diloco)


def cache_of(*argv):
    """The folder that JAX has in a run, and the lines about it."""
    with cached(*argv) as lines:
        return jax.config.values["jax_compilation_cache_dir"], lines


@pytest.mark.parametrize("source", ["jax_cache_dir=kept", "JAX_COMPILATION_CACHE_DIR=own"])
def test_the_compile_cache_is_used_where_it_is_sound_and_put_back(
    setting, monkeypatch, tmp_path, source
):
    """Of both sources; a line names the one that is not used. jax_cache_dir comes first. JAX gets
    the absolute path of the folder that was checked."""
    monkeypatch.chdir(tmp_path)
    keys = [source if source.islower() else "jax_cache_dir="]
    monkeypatch.delattr(compile_cache.shared_folder, "is_shared")  # asked on GPUs alone
    setting("jax_compilation_cache_dir", "own")
    folder = str(tmp_path / source.partition("=")[2])
    assert cache_of(*TWO, "enable_diloco=true", *keys) == (folder, [])
    assert jax.config.values["jax_compilation_cache_dir"] == "own"
    note = f"note: {source} is not used: {compile_cache.LOSES_ORDER}."
    in_two = "ici_fsdp_parallelism=2"
    assert cache_of(*TWO, "enable_diloco=true", in_two, *keys) == (None, [note])
    assert jax.config.values["jax_compilation_cache_dir"] == "own"


def test_programs_that_compile_for_a_tenth_of_a_second_are_kept(setting, monkeypatch, tmp_path):
    """Control: what the user gives JAX stays, except for its default, 1 s, which cannot be told."""
    monkeypatch.chdir(tmp_path)
    name = "jax_persistent_cache_min_compile_time_secs"
    for given, used in ((1.0, compile_cache.KEPT_FROM_S), (5.0, 5.0), (0.0, 0.0)):
        setting(name, given)
        with cached(*TWO, "enable_diloco=true", "jax_cache_dir=kept"):
            assert jax.config.values[name] == used
        assert jax.config.values[name] == given


@pytest.mark.parametrize("shared", [True, False])
def test_gpus_use_a_compile_cache_that_all_their_hosts_see(setting, monkeypatch, tmp_path, shared):
    setting("jax_compilation_cache_dir", None)
    gpus = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform="gpu")]))
    gpus.size, gpus.shape = 1, {"diloco": 1}
    monkeypatch.setattr(compile_cache.mesh_lib, "build", lambda cfg: gpus)
    monkeypatch.setattr(compile_cache.shared_folder, "is_shared", lambda folder: shared)
    note = f"note: jax_cache_dir={tmp_path} is not used: {compile_cache.NOT_SHARED}."
    expected = (str(tmp_path), []) if shared else (None, [note])
    assert cache_of(*TWO, f"jax_cache_dir={tmp_path}") == expected
