"""Files that a user or another program names are read up to a limit, and only regular ones."""

import os
import pathlib
import types

import pytest
from ssh_keys import make

from maxdiloco import generate
from maxdiloco.cluster import peers
from maxdiloco.config import config
from maxdiloco.data import shards, tokenizer
from maxdiloco.errors import USER_ERRORS, CheckpointError, ConfigError
from maxdiloco.huggingface import safetensors_files, sidecar_files
from maxdiloco.islands import signatures
from maxdiloco.report import run_data

LARGE = 1 << 36  # bytes of a sparse file: more than any limit


def place(path, kind):
    """Put what is not a small file at a path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch(mode=0o600)
        os.truncate(path, LARGE)
    return path


def yml(folder, kind):
    config.load([str(place(folder / "keys.yml", kind))], {})


def model_name(folder, kind):
    config.load([f"model_name={place(folder / 'model.yml', kind)}"], {})


def prompts_file(folder, kind):
    path = place(folder / "prompts", kind)
    generate.read_prompts(types.SimpleNamespace(prompts_file=str(path), prompt=""))


def tokenizer_path(folder, kind):
    tokenizer.read("huggingface", str(place(folder / "tokenizer.json", kind)))


def saved_tokenizer(folder, kind):
    place(folder / "tokenizer.json", kind)
    (folder / tokenizer.SETTINGS).write_text(
        '{"tokenizer_type": "huggingface", "bos": null, "eos": null}'
    )
    try:
        tokenizer.load(folder)
    except OSError as error:  # its callers name the checkpoint
        raise CheckpointError(f"tokenizer.json {error.strerror}") from error


def islands_key(folder, kind):
    signatures.read(str(place(folder / "a", kind)))


def public_key(folder, kind):
    own = make(folder, "a")
    place(folder / "b.pub", kind)
    signatures.read(own)


def exchange_secret_file(folder, kind):
    peers.secret_of_file(str(place(folder / "secret", kind)))


def dataset_path(folder, kind):
    place(folder / shards.MANIFEST, kind)
    shards.open_shards(str(folder), "dataset_path")


def metrics(folder, kind):
    place(folder / "metrics.jsonl", kind)
    run_data.load([str(folder)], base_output_directory="runs", defaults={})


def event_file(folder, kind):
    place(folder / "events.out.tfevents.1", kind)
    run_data.load([str(folder)], base_output_directory="runs", defaults={})


def index(folder, kind):
    place(folder / safetensors_files.INDEX, kind)
    safetensors_files.tensors_of(folder)


def weights(folder, kind):
    place(folder / safetensors_files.SINGLE, kind)
    safetensors_files.tensors_of(folder)


def chat_template(folder, kind):
    place(folder / "additional_chat_templates" / "a.jinja", kind)
    sidecar_files.copy(folder, folder / "copy")


READERS = {  # what reads a file, and what its error names
    yml: "keys.yml",
    model_name: "model_name=",
    prompts_file: "prompts_file=",
    tokenizer_path: "tokenizer_path=",
    saved_tokenizer: "tokenizer.json",
    islands_key: "islands_key=",
    public_key: "islands_key=",
    exchange_secret_file: "exchange_secret_file=",
    dataset_path: "dataset_path=",
    metrics: "RUN=",
    event_file: "RUN=",
    index: safetensors_files.INDEX,
    weights: safetensors_files.SINGLE,
    chat_template: "a.jinja",
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "device", "large"])
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_what_is_not_a_small_file_is_refused_at_once(tmp_path, reader, kind):
    with pytest.raises(USER_ERRORS) as error:
        reader(tmp_path, kind)
    assert error.value.exit_code in (2, 3)
    assert READERS[reader] in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_secret_that_others_may_read_is_refused(tmp_path, mode):
    secret = tmp_path / "secret"
    secret.write_text("known to every host of the run\n")
    for path, read, key in (
        (make(tmp_path, "a"), signatures.read, "islands_key"),
        (secret, peers.secret_of_file, "exchange_secret_file"),
    ):
        os.chmod(path, 0o600)
        assert read(str(path)), "the control"
        os.chmod(path, mode)
        with pytest.raises(ConfigError, match=f"{key}={path}.*chmod 600 {path}"):
            read(str(path))


def test_a_secret_of_another_user_may_be_readable(tmp_path, monkeypatch):
    """A mounted secret belongs to root, and its group is that of the job."""
    path = pathlib.Path(make(tmp_path, "a"))
    path.chmod(0o640)
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(path).st_uid + 1)
    assert signatures.read(str(path)).own
