"""Which programs may be loaded that were compiled before."""

import errno
import functools
import os
import types
import warnings

import jax
import numpy as np
import pytest
from etils import epath

from maxdiloco.errors import ConfigError
from maxdiloco.flags import config
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.trainer import compiled_file, saved_programs

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
def test_the_compile_cache_is_used_where_it_is_sound_and_put_back(
    setting, monkeypatch, keys, source
):
    """Of both sources; a line names the one that is not used. jax_cache_dir comes first."""
    monkeypatch.delattr(saved_programs.shared_folder, "is_shared")  # asked on GPUs alone
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


@pytest.mark.parametrize("shared", [True, False])
def test_gpus_use_a_compile_cache_that_all_their_hosts_see(setting, monkeypatch, tmp_path, shared):
    setting(None)
    gpus = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform="gpu")]))
    gpus.size, gpus.shape = 1, {"diloco": 1}
    monkeypatch.setattr(saved_programs.mesh_lib, "build", lambda cfg: gpus)
    monkeypatch.setattr(saved_programs.shared_folder, "is_shared", lambda folder: shared)
    with saved_programs.compile_cache(load(*TWO, f"jax_cache_dir={tmp_path}")) as lines:
        inside = jax.config.values["jax_compilation_cache_dir"]
    note = f"note: jax_cache_dir={tmp_path} is not used: {saved_programs.NOT_SHARED}."
    assert (inside, lines) == ((str(tmp_path), []) if shared else (None, [note]))


@pytest.fixture
def every_program():
    """JAX keeps programs that compile fast, too."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, 0.0)
    yield
    jax.config.update(name, before)


def kept_in(folder, n):
    """Compile a program of its own for each of the numbers 0 to n - 1; {file: its bytes}."""
    jax.clear_caches()
    with saved_programs.compile_cache(load("enable_diloco=false", f"jax_cache_dir={folder}")):
        for i in range(n):
            jax.jit(lambda x, i=i: x * 2 + i).lower(1.0).compile()
    return {path: path.read_bytes() for path in folder.iterdir()}


def test_an_entry_cut_off_is_one_line_and_is_written_anew(tmp_path, every_program, capfd):
    """Two programs of one name: each entry is told. Control: what is whole is taken as it is."""
    whole = kept_in(tmp_path, 2)
    assert len(whole) == 2
    capfd.readouterr()
    assert kept_in(tmp_path, 2) == whole
    assert capfd.readouterr() == ("", "")
    for path, content in whole.items():
        path.write_bytes(content[: len(content) // 2])
    assert {path: len(b) for path, b in kept_in(tmp_path, 2).items()} == pytest.approx(
        {path: len(b) for path, b in whole.items()}, rel=0.01
    )  # each has its compile time
    said = capfd.readouterr()
    assert said.err == ""
    for line in said.out.splitlines():
        assert line.startswith(f"note: the compile cache {tmp_path} has an entry that cannot be ")
    assert len(said.out.splitlines()) == 2
    kept_in(tmp_path, 2)
    assert capfd.readouterr() == ("", "")


def test_an_entry_that_cannot_be_written_is_one_line_and_no_file(
    tmp_path, every_program, capfd, monkeypatch
):
    def full(path, content):
        open(path, "wb").close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(type(epath.Path(tmp_path)), "write_bytes", full)
    assert kept_in(tmp_path, 1) == {}
    said = capfd.readouterr()
    (line,) = said.out.splitlines()
    assert line.startswith(f"note: the compile cache {tmp_path} cannot keep a program, which every")
    assert (line.endswith("(OSError: [Errno 28] No space left on device)."), said.err) == (True, "")


def test_another_warning_is_shown_as_before(tmp_path):
    with pytest.warns(UserWarning, match="of another thing"):
        with saved_programs.compile_cache(load("enable_diloco=false", f"jax_cache_dir={tmp_path}")):
            warnings.warn("of another thing", stacklevel=1)
