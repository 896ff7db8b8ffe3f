"""Which programs may be loaded that were compiled before, which count as the same, and where their
file cannot be read from or written to.
"""

import base64
import errno
import json
import os
import re
import types
import warnings
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.errors import ConfigError
from maxdiloco.flags import config
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.parallel.program import Program
from maxdiloco.storage import durable
from maxdiloco.trainer import compiled_file, job

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
    assert job.keep_their_order(cfg, mesh) == sound
    if sound:
        compiled_file.check_order("programs.zip", cfg, mesh)
    else:
        with pytest.raises(ConfigError, match="compiled_trainstep_file=programs.zip: a CPU loses"):
            compiled_file.check_order("programs.zip", cfg, mesh)


@pytest.fixture
def setting():
    """Sets JAX's own settings, as variables of the environment do; they are put back."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: jax.config.values[name] for name in names}
    yield jax.config.update
    for name, value in before.items():
        jax.config.update(name, value)


def cache_of(*argv):
    """The folder that JAX has in a run, and the lines about it."""
    with job.compile_cache(load(*argv)) as lines:
        return jax.config.values["jax_compilation_cache_dir"], lines


@pytest.mark.parametrize("source", ["jax_cache_dir=kept", "JAX_COMPILATION_CACHE_DIR=own"])
def test_the_compile_cache_is_used_where_it_is_sound_and_put_back(setting, monkeypatch, source):
    """Of both sources; a line names the one that is not used. jax_cache_dir comes first."""
    keys = [source if source.islower() else "jax_cache_dir="]
    monkeypatch.delattr(job.shared_folder, "is_shared")  # asked on GPUs alone
    setting("jax_compilation_cache_dir", "own")
    assert cache_of(*TWO, "enable_diloco=true", *keys) == (source.partition("=")[2], [])
    assert jax.config.values["jax_compilation_cache_dir"] == "own"
    note = f"note: {source} is not used: {job.LOSES_ORDER}."
    in_two = "ici_fsdp_parallelism=2"
    assert cache_of(*TWO, "enable_diloco=true", in_two, *keys) == (None, [note])
    assert jax.config.values["jax_compilation_cache_dir"] == "own"


def test_programs_that_compile_for_a_tenth_of_a_second_are_kept(setting):
    """Control: what the user gives JAX stays, but for its default, 1 s, which cannot be told."""
    name = "jax_persistent_cache_min_compile_time_secs"
    for given, used in ((1.0, job.KEPT_FROM_S), (5.0, 5.0), (0.0, 0.0)):
        setting(name, given)
        with job.compile_cache(load(*TWO, "enable_diloco=true", "jax_cache_dir=kept")):
            assert jax.config.values[name] == used
        assert jax.config.values[name] == given


@pytest.mark.parametrize("shared", [True, False])
def test_gpus_use_a_compile_cache_that_all_their_hosts_see(setting, monkeypatch, tmp_path, shared):
    setting("jax_compilation_cache_dir", None)
    gpus = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform="gpu")]))
    gpus.size, gpus.shape = 1, {"diloco": 1}
    monkeypatch.setattr(job.mesh_lib, "build", lambda cfg: gpus)
    monkeypatch.setattr(job.shared_folder, "is_shared", lambda folder: shared)
    note = f"note: jax_cache_dir={tmp_path} is not used: {job.NOT_SHARED}."
    expected = (str(tmp_path), []) if shared else (None, [note])
    assert cache_of(*TWO, f"jax_cache_dir={tmp_path}") == expected


def kept_in(folder, n):
    """Compile a program of its own for each of the numbers 0 to n - 1; {file: its bytes}."""
    jax.clear_caches()
    with job.compile_cache(load("enable_diloco=false", f"jax_cache_dir={folder}")):
        for i in range(n):
            jax.jit(lambda x, i=i: x * 2 + i).lower(1.0).compile()
    return {path: path.read_bytes() for path in folder.iterdir()}


def test_an_entry_cut_off_is_one_line_and_is_written_anew(tmp_path, setting, capfd):
    """Two programs of one name: each entry is told. Control: what is whole is taken as it is."""
    setting("jax_persistent_cache_min_compile_time_secs", 0.0)
    whole = kept_in(tmp_path, 2)
    assert len(whole) == 2
    capfd.readouterr()
    assert kept_in(tmp_path, 2) == whole
    assert capfd.readouterr() == ("", "")
    for path, content in whole.items():
        path.write_bytes(content[: len(content) // 2])
    sizes, anew = (jax.tree.map(len, kept) for kept in (whole, kept_in(tmp_path, 2)))
    assert anew == pytest.approx(sizes, rel=0.01)  # each has its compile time
    said = capfd.readouterr()
    note = f"note: the compile cache {tmp_path} has an entry that cannot be "
    starts = [line[: len(note)] for line in said.out.splitlines()]
    assert (starts, said.err) == ([note] * 2, "")
    kept_in(tmp_path, 2)
    assert capfd.readouterr() == ("", "")


def test_an_entry_that_cannot_be_written_is_one_line_and_no_file(
    tmp_path, setting, capfd, monkeypatch
):
    """Another warning is shown as before."""
    setting("jax_persistent_cache_min_compile_time_secs", 0.0)

    def full(path, content):
        open(path, "wb").close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(type(epath.Path(tmp_path)), "write_bytes", full)
    assert kept_in(tmp_path, 1) == {}
    said = capfd.readouterr()
    (line,) = said.out.splitlines()
    assert line.startswith(f"note: the compile cache {tmp_path} cannot keep a program, which every")
    assert (line.endswith("(OSError: [Errno 28] No space left on device)."), said.err) == (True, "")
    with pytest.warns(UserWarning, match="of another thing"):
        with job.compile_cache(load("enable_diloco=false", f"jax_cache_dir={tmp_path}")):
            warnings.warn("of another thing", stacklevel=1)


@pytest.mark.parametrize("place", ["/dev/full", "/dev/zero", "fifo", "."])
def test_what_is_no_file_is_neither_read_nor_replaced(tmp_path, place):
    """/dev/full is read until memory ends, a pipe is waited for, and a device was moved away."""
    if place == "fifo":
        place = str(tmp_path / "fifo")
        os.mkfifo(place)
    place = str(tmp_path) if place == "." else place
    with pytest.raises(ConfigError, match=f"compiled_trainstep_file={place} .*: not a file. Make"):
        compiled_file.stored_keys(place)
    with pytest.raises(ConfigError, match=f"report={place} is no file, .* Give the path"):
        compiled_file.check_place("report", place)
    assert not list(tmp_path.glob("*.part"))


def test_what_is_written_leaves_the_file_of_others_beside_it_and_the_old_one_on_a_full_disk(
    tmp_path, monkeypatch
):
    """The name of what is half written was that of the file with .part."""
    path = tmp_path / "programs"
    (tmp_path / "programs.part").write_bytes(b"mine")
    compiled_file.check_place("compiled_trainstep_file", str(path))
    compiled_file.write_whole("compiled_trainstep_file", str(path), b"old")
    (tmp_path / "programs.1.part").symlink_to("/dev/full")
    monkeypatch.setattr(durable.secrets, "token_hex", lambda count: "1")
    with pytest.raises(ConfigError, match="cannot be written: No space left .* free space"):
        compiled_file.write_whole("compiled_trainstep_file", str(path), b"new")
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert files == {"programs": b"old", "programs.part": b"mine"}


@pytest.mark.parametrize("name", ["manifest.json", "program_0"])
def test_a_damaged_member_is_not_a_whole_file(tmp_path, name):
    """A byte of a member is another: what is deflated ends early, goes wrong, or has another sum.
    Control: as written, the file is read."""
    file, cfg = tmp_path / "programs.zip", config.load([], {})
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        manifest = {"format": compiled_file.FORMAT, "programs": [["inner", "1"]], "keys": {}}
        archive.writestr("manifest.json", json.dumps(manifest | {"filling": [*range(99)]}))
        archive.writestr("program_0", bytes(range(256)))
        start = archive.getinfo(name).header_offset + 30 + len(name)
    compiled_file.load(str(file), cfg, None, [])
    whole = file.read_bytes()
    for at in range(start, start + 100, 7):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with pytest.raises(ConfigError, match="cannot be read: not a whole file .* Make it again,"):
            compiled_file.load(str(file), cfg, None, [])


def test_what_an_executable_depends_on_changes_the_fingerprint(devices):
    """One entry of a large constant, an unused argument, where an argument lies, an option."""
    x = jax.ShapeDtypeStruct((4096,), jnp.float32)

    def fingerprint(*args, entry=0.0, **options):
        table = np.arange(4096.0, dtype=np.float32)
        table[2048] += entry
        fn = lambda x, *unused: x + table  # noqa: E731
        return Program("add", fn, on_compile=lambda *_: None, **options).fingerprint(*args)

    mesh = Mesh(np.array(devices[:2]), ("diloco",))
    split, whole = (x.update(sharding=NamedSharding(mesh, P(*axes))) for axes in (["diloco"], []))
    one = fingerprint(x)
    assert fingerprint(x) == one
    others = [
        fingerprint(x, entry=0.5),
        fingerprint(x, x),
        fingerprint(split),
        fingerprint(whole),
        fingerprint(x, donate=(0,)),
        fingerprint(x, compiler_options={"xla_llvm_disable_expensive_passes": True}),
    ]
    assert len({one, *others}) == 1 + len(others)


def test_a_loaded_program_does_not_compile_for_what_it_returned_itself(devices):
    """Nor at its first call. Control: for another shape it does."""
    compiled = []
    note = lambda *_: compiled.append(1)  # noqa: E731
    saved, loaded = (Program("step", jnp.sin, on_compile=note) for _ in range(2))
    mesh = Mesh(np.array(devices[:2]), ("diloco",))
    x = jax.device_put(np.zeros((2, 3), np.float32), NamedSharding(mesh, P("diloco")))
    data = saved.serialized(x)
    loaded.load(data, devices[:2], jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding))
    assert loaded(loaded(x)).shape == x.shape and compiled == [1]
    assert loaded(x[:, :2]).shape == (2, 2) and compiled == [1, 1]


def test_the_text_of_a_kernel_has_no_folder_of_this_machine():
    """A Pallas kernel's bytecode is part of the text. jax 0.10's holds the paths of its source."""
    mask = splash.MultiHeadMask([splash.CausalMask((128, 128))])
    kernel = splash.make_splash_mha_single_device(mask)
    q = jax.ShapeDtypeStruct((1, 128, 128), jnp.float32)

    def bytecode():
        text = jax.jit(kernel).trace(q, q, q).lower(lowering_platforms=("tpu",)).as_text()
        (body,) = re.findall(r"body\\22: \\22([^\\]*)", text)
        return base64.b64decode(body)

    folder = os.path.dirname(jax.__file__).encode()
    with_paths = jax.__version_info__ < (0, 11)
    assert (folder in bytecode()) == with_paths
    with compiled_file.without_folders():
        assert (b"splash_attention_kernel.py" in bytecode()) == with_paths
        assert folder not in bytecode()


def test_where_no_key_differs_the_line_says_so():
    """Control: a key that is younger than the file, and a list."""
    cfg = config.load([], {})
    same = cfg.as_dict()
    assert "No key differs, so the code " in compiled_file._differences(same, cfg)
    before = {key: same[key] for key in same if key != "steps"} | {"mlp_activations": ["gelu"]}
    lists = 'mlp_activations=["gelu"], here ["silu", "linear"].'
    words = f"Its keys that differ: steps=none, here 1000; {lists}"
    assert compiled_file._differences(before, cfg) == words
