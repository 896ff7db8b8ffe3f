"""Programs compiled by one process are run by another, and by no run that they do not fit."""

import os
import re
import zipfile

import pytest
import run_tools

from maxdiloco import train, train_compile
from maxdiloco.flags import config
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.trainer import compiled_file

KEYS = dict(
    steps=10,
    checkpoint_period=10,
    enable_streaming_diloco="true",
    num_diloco_fragments=2,
    num_communication_overlapping_steps=1,
    diloco_exchange_dtype="int8",
    opt_type="sgd",  # compiles in half the time
)
PROGRAMS = 8  # inner, inner + exchange, two packs, two merges, watch, init


@pytest.fixture(scope="module")
def own(tmp_path_factory, programs):
    """The folder of a run of KEYS that compiled its own programs. JAX's cache has them now, and so
    has this process: from there, by another run of them."""
    folder = tmp_path_factory.mktemp("own")
    with run_tools.Child(folder, "own", **KEYS) as child:
        assert child.end() == 0, child.text
    assert run_tools.run(folder, "from_cache", **KEYS) == 0
    return folder / "own"


@pytest.fixture(scope="module")
def file(tmp_path_factory, own):
    """The programs of KEYS, compiled anew: one that came from the cache is saved incomplete."""
    path = tmp_path_factory.mktemp("compiled") / "folder" / "programs.zip"
    umask = os.umask(0)
    assert train_compile.main(arguments(path.parent, compiled_trainstep_file=path)) == 0
    os.umask(umask)
    return path


def arguments(folder, **keys):
    return run_tools.arguments(folder, "run", **KEYS | keys)


def test_another_process_computes_the_same_bits_without_compiling(own, file, tmp_path, monkeypatch):
    """The run that compiled its own leaves the same checkpoint and the same rows. Sets are ordered
    otherwise there, and the text of a program must not be."""
    monkeypatch.setenv("PYTHONHASHSEED", "7" if os.environ.get("PYTHONHASHSEED") != "7" else "8")
    with run_tools.Child(tmp_path, "loaded", **KEYS, compiled_trainstep_file=file) as child:
        assert child.end() == 0, child.text
    assert f"{PROGRAMS} compiled programs loaded from {file}" in child.text
    assert "compiled inner" not in child.text
    run_tools.assert_equal_runs(tmp_path / "loaded", own, steps=10)


def test_keys_that_change_no_program_of_the_steps_may_differ(file, tmp_path, capsys):
    """H is the host's, the programs of tau = 1 are the same; so are those of another learning rate
    and schedule. Evaluation is compiled beside them."""
    changes = dict(diloco_sync_period=5, steps=3, eval_interval=3, eval_steps=1, log_period=3)
    changes |= dict(learning_rate=0.5, learning_rate_schedule_steps=7, warmup_steps_fraction=0.5)
    changes |= dict(run_name="other")
    argv = arguments(tmp_path, compiled_trainstep_file=file, **changes)
    out = run_tools.printed(capsys, train.main, argv)
    assert f"{PROGRAMS} compiled programs loaded from {file}" in out
    assert "note: " not in out
    assert re.findall(r"compiled (\w+) ", out) == ["programs", "evaluate"]


def refusal(capsys, folder, **keys):
    """The line that a run of KEYS with these is refused with."""
    assert train.main(arguments(folder, **keys)) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith(
        f"ConfigError: compiled_trainstep_file={keys['compiled_trainstep_file']}"
    )
    return line, said.out


@pytest.mark.full
@pytest.mark.parametrize(
    ("key", "before", "now", "names"),
    [
        ("nan_policy", "stop", "skip", "inner, inner + exchange"),
        ("communication_overlapping_alpha", 0.0, 0.5, "merge [2 leaves], merge [2 layers, 11 leav"),
    ],
)
def test_a_program_of_another_text_is_refused_by_name(
    file, tmp_path, capsys, key, before, now, names
):
    line, _ = refusal(capsys, tmp_path, compiled_trainstep_file=file, **{key: now})
    assert f" was compiled for another program {names}" in line
    assert f". Its keys that differ: base_output_directory={file.parent}, here {tmp_path}; " in line
    assert f"; {key}={before}, here {now}" in line
    assert line.endswith("Compile it again with maxdiloco.train_compile, or leave the file out.")


@pytest.mark.full
def test_other_flags_of_the_compiler_are_told(file, monkeypatch):
    """The control is above: with the same flags no note is printed."""
    cfg = config.load(arguments(file.parent), {})
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_a=1")
    assert compiled_file.check(str(file), cfg, mesh_lib.build(cfg)) == [
        f'note: {file} was compiled under LIBTPU_INIT_ARGS="", here --xla_a=1: its programs keep '
        f"theirs."
    ]


def rewritten(path, target, old, new):
    """A copy of the file with other words in its manifest."""
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(target, "w") as copy:
        for name in archive.namelist():
            data = archive.read(name)
            if name == "manifest.json":
                assert old in data
                data = data.replace(old, new)
            copy.writestr(name, data)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b'"jaxlib": "', b'"jaxlib": "9', " was compiled with jaxlib=9"),
        (b'"processor": "', b'"processor": "f', " was compiled for processor=f"),
        (b'"inner + exchange"', b'"other"', " for another program inner + exchange. Its keys"),
        (b'"format": 3', b'"format": 2', " has no programs, or those of another maxdiloco"),
        ("whole", "cut", " cannot be read: not a whole file of compiled programs. Make it again"),
        ("file", "no file", " cannot be read: No such file or directory. Make it with"),
    ],
)
def test_a_file_of_other_software_not_whole_or_not_there_is_refused(
    file, tmp_path, capsys, old, new, words
):
    other = tmp_path / "other.zip"
    if new == "cut":
        other.write_bytes(file.read_bytes()[:-100])
    elif new != "no file":
        rewritten(file, other, old, new)
    assert words in refusal(capsys, tmp_path, compiled_trainstep_file=other)[0]


def test_other_devices_are_refused_before_anything_is_built(file, tmp_path, capsys):
    change = dict(dcn_diloco_parallelism=1, num_diloco_replicas=2)
    line, out = refusal(capsys, tmp_path, compiled_trainstep_file=file, **change)
    assert "was compiled for devices=2, but this run has devices=1. Compile it again" in line
    assert "model: " not in out and not (tmp_path / "run").exists()


def test_programs_that_others_may_have_written_are_refused(file, tmp_path, capsys, monkeypatch):
    """Loading them runs them. What train_compile wrote is one's own, whatever the umask."""
    assert file.stat().st_mode & 0o022 == 0 and file.stat().st_uid == os.geteuid()

    other = tmp_path / "other.zip"
    other.write_bytes(file.read_bytes())
    for mode in (0o664, 0o646):
        other.chmod(mode)
        line, _ = refusal(capsys, tmp_path, compiled_trainstep_file=other)
        assert f"compiled_trainstep_file={other} may be written by others (mode {mode:o})" in line
        assert f"If you trust it, run chmod go-w {other}, or leave it out." in line
    other.chmod(0o644)
    assert compiled_file.stored_keys(str(other))
    owner = os.geteuid()
    os.chown(other, owner + 1, -1) if owner == 0 else monkeypatch.setattr(os, "geteuid", lambda: -1)
    line, _ = refusal(capsys, tmp_path, compiled_trainstep_file=other)
    assert f"belongs to user {other.stat().st_uid}, and a program runs what is" in line


def test_a_place_that_cannot_be_written_is_one_line_before_anything_compiles(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for key in ("compiled_trainstep_file", "report"):
        path = tmp_path / "file" / "programs.zip"
        assert train_compile.main(arguments(tmp_path, **{key: path})) == 2
        said = capsys.readouterr()
        (line,) = said.err.splitlines()
        assert line.startswith(f"ConfigError: {key}={path} cannot be written: ")
        assert "compiled inner" not in said.out
