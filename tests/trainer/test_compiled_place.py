"""Which programs count as the same, and where their file cannot be read from or written to."""

import base64
import json
import os
import re
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.errors import ConfigError
from maxdiloco.flags import config
from maxdiloco.parallel.program import Program
from maxdiloco.storage import durable
from maxdiloco.trainer import compiled_file


@pytest.mark.parametrize("place", ["/dev/full", "/dev/zero", "fifo", "."])
def test_what_is_no_file_is_neither_read_nor_replaced(tmp_path, place):
    """/dev/full is read until memory ends, a pipe is waited for, and a device was moved away."""
    if place == "fifo":
        place = str(tmp_path / "fifo")
        os.mkfifo(place)
    place = str(tmp_path) if place == "." else place
    with pytest.raises(ConfigError, match=f"compiled_trainstep_file={place} .*: not a file. Make"):
        compiled_file._opened(place)
    with pytest.raises(ConfigError, match=f"report={place} is no file, .* Give the path"):
        compiled_file.check_place("report", place)
    assert not list(tmp_path.glob("*.part"))


def test_a_file_of_others_beside_what_is_written_stays(tmp_path):
    """The name of what is half written was that of the file with .part."""
    (tmp_path / "report.html.part").write_text("mine")
    compiled_file.check_place("out", str(tmp_path / "report.html"))
    compiled_file.write_whole("out", str(tmp_path / "report.html"), b"page")
    files = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert files == {"report.html": "page", "report.html.part": "mine"}


def test_a_disk_that_is_full_at_the_end_is_one_line_and_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "programs"
    compiled_file.write_whole("compiled_trainstep_file", str(path), b"old")
    (tmp_path / "programs.1.part").symlink_to("/dev/full")
    monkeypatch.setattr(durable.secrets, "token_hex", lambda count: "1")
    with pytest.raises(ConfigError, match="cannot be written: No space left .* free space"):
        compiled_file.write_whole("compiled_trainstep_file", str(path), b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("programs", b"old")]


@pytest.mark.parametrize("name", ["manifest.json", "program_0"])
@pytest.mark.parametrize("at", range(0, 100, 7))
def test_a_damaged_member_is_not_a_whole_file(tmp_path, name, at):
    """A byte of a member is another: what is deflated ends early, goes wrong, or has another sum.
    Control: as written, the file is read."""
    file = tmp_path / "programs.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        manifest = {"format": compiled_file.FORMAT, "programs": [["inner", "1"]], "keys": {}}
        archive.writestr("manifest.json", json.dumps(manifest | {"filling": [*range(99)]}))
        archive.writestr("program_0", bytes(range(256)))
        start = archive.getinfo(name).header_offset + 30 + len(name)
    compiled_file.load(str(file), config.load([], {}), None, [])
    content = bytearray(file.read_bytes())
    content[start + at] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read: not a whole file .* Make it again, or"):
        compiled_file.load(str(file), config.load([], {}), None, [])


def test_what_an_executable_depends_on_changes_the_fingerprint(devices):
    """One entry of a large constant, an unused argument, where an argument lies, an option."""
    x = jax.ShapeDtypeStruct((4096,), jnp.float32)

    def fingerprint(*args, entry=0.0, **options):
        table = np.arange(4096.0, dtype=np.float32)
        table[2048] += entry
        fn = lambda x, *unused: x + table  # noqa: E731
        return Program("add", fn, on_compile=lambda *_: None, **options).fingerprint(*args)

    mesh = Mesh(np.array(devices[:2]), ("diloco",))
    split, whole = (
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for spec in (P("diloco"), P())
    )
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


def test_the_text_of_a_kernel_has_no_folder_of_this_machine():
    """A Pallas kernel's bytecode is part of the text, and holds the paths of its source."""
    mask = splash.MultiHeadMask([splash.CausalMask((128, 128))])
    kernel = splash.make_splash_mha_single_device(mask)
    q = jax.ShapeDtypeStruct((1, 128, 128), jnp.float32)

    def bytecode():
        text = jax.jit(kernel).trace(q, q, q).lower(lowering_platforms=("tpu",)).as_text()
        (body,) = re.findall(r"body\\22: \\22([^\\]*)", text)
        return base64.b64decode(body)

    folder = os.path.dirname(jax.__file__).encode()
    assert folder in bytecode()
    with compiled_file.without_folders():
        assert b"splash_attention_kernel.py" in bytecode()
        assert folder not in bytecode()


def test_where_no_key_differs_the_line_says_so():
    cfg = config.load([], {})
    assert "No key differs, so the code " in compiled_file._differences(cfg.as_dict(), cfg)
    before = cfg.as_dict() | {"mlp_activations": ["gelu"]}
    del before["steps"]
    assert compiled_file._differences(before, cfg) == (
        'Its keys that differ: steps=none, here 1000; mlp_activations=["gelu"], here '
        '["silu", "linear"].'
    )
