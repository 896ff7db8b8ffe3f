"""What cannot work ends in one line with the key, its value and what to do; nothing is written."""

import re
import shutil

import pytest
import run_tools as tools

pytestmark = pytest.mark.usefixtures("programs")


def refused(capfd, folder, name="refused", **keys):
    """The exit code and the one line of a run that is refused."""
    capfd.readouterr()
    code = tools.run(folder, name, **keys)
    line = capfd.readouterr().err.strip()
    assert "\n" not in line
    assert "Traceback" not in line
    return code, line


@pytest.mark.parametrize(
    "keys, words",
    [
        (dict(diloco_sync_perod=2), ["diloco_sync_perod=2", "Did you mean diloco_sync_period?"]),
        (dict(steps="many"), ["steps=many", "is not a whole number", "like the default"]),
        (dict(diloco_sync_period=0), ["diloco_sync_period=0 must be >= 1", "Use such a value"]),
        (
            dict(ici_data_parallelism=8),
            ["diloco 2 * data 8 = 16 devices, but 8 are visible", "Change a dcn_*_parallelism"],
        ),
        (
            dict(dcn_diloco_parallelism=-1, num_slices=2, num_diloco_replicas=3),
            ["num_diloco_replicas=3", "diloco size 2", "Use a multiple of 2"],
        ),
        (
            dict(ici_data_parallelism=2, weight_dtype="bfloat16"),
            ["weight_dtype=bfloat16", "on 2 CPU devices", "Use weight_dtype=float32"],
        ),
        (
            dict(dataset_type="text"),
            ["vocab_size=32 is too small", "Use vocab_size=257 or more"],
        ),
    ],
)
def test_a_key_that_cannot_work_is_refused_with_2(capfd, tmp_path, keys, words):
    code, line = refused(capfd, tmp_path / "runs", **keys)
    assert code == 2
    assert line.startswith("ConfigError: ")
    for word in words:
        assert word in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "keys, words",
    [
        (
            dict(ici_fsdp_parallelism=3),
            "ConfigError: fsdp parallelism 3 does not divide dim",
        ),
        (dict(base_output_directory="/proc/runs"), "CheckpointError: base_output_directory=/proc/"),
    ],
)
def test_what_needs_no_data_is_refused_before_they_are_read(capfd, tmp_path, keys, words):
    """Both are wrong here. A large text takes minutes, and its own error would come first."""
    absent = dict(dataset_type="text", dataset_path=str(tmp_path / "absent"), vocab_size=512)
    code, line = refused(capfd, tmp_path, **absent | keys)
    assert (code, line[: len(words)]) == (2, words)


@pytest.mark.parametrize(
    "keys, words",
    [
        (dict(dataset_path="{}/absent"), ["dataset_path=", "/absent does not exist", "Give a "]),
        (
            dict(dataset_path="{}/empty"),
            ["dataset_path=", "/empty has no files that end in", "Name others by a glob"],
        ),
        (dict(dataset_path="{}/nothing.txt"), ["dataset_path=", "holds no text", "Give text"]),
        (
            # 100 bytes and a document start: 6 sequences, one of them held out.
            dict(dataset_path="{}/short.txt", per_device_batch_size=3),
            ["has 5 sequences", "2 replicas * 3 = 6", "Give more text, or lower"],
        ),
        (
            dict(eval_interval=5, eval_dataset_path="{}/absent"),
            ["eval_dataset_path=", "/absent does not exist", "Give a folder"],
        ),
        (
            dict(tokenizer_type="huggingface", tokenizer_path="{}/absent.json"),
            ["tokenizer_path=", "/absent.json cannot be read (No such", "Give a tokenizer.json"],
        ),
        (
            dict(tokenizer_type="sentencepiece", tokenizer_path="{}/short.txt", vocab_size=-1),
            ["/short.txt is no tokenizer.model of tokenizer_type=sent", "Give another file"],
        ),
    ],
)
def test_data_that_cannot_work_are_refused_with_3(capfd, tmp_path, keys, words):
    """Held-out text too is looked for before the training starts."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.txt").write_text("")
    (tmp_path / "short.txt").write_text("x" * 100)
    keys = {k: v.format(tmp_path) if isinstance(v, str) else v for k, v in keys.items()}
    keys = dict(dataset_type="text", vocab_size=257) | keys
    code, line = refused(capfd, tmp_path / "runs", **keys)
    assert code == 3
    assert line.startswith("DataError: ")
    for word in words:
        assert word in line
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_made_is_refused_with_2(capfd, tmp_path):
    (tmp_path / "file").write_text("")
    code, line = refused(capfd, tmp_path / "file")
    assert code == 2
    assert f"base_output_directory={tmp_path}/file cannot hold run_name=refused" in line
    assert "Choose a folder that can be written" in line


@pytest.mark.parametrize("key", ["load_parameters_path", "load_full_state_path"])
def test_a_checkpoint_that_is_not_there_is_refused_with_2(capfd, tmp_path, key):
    code, line = refused(capfd, tmp_path / "runs", **{key: tmp_path / "absent"})
    assert code == 2
    assert f"CheckpointError: {key}={tmp_path}/absent holds no checkpoint: give the folder" in line
    assert not (tmp_path / "runs" / "refused" / "metrics.jsonl").exists()


def test_parameters_of_another_shape_are_refused_with_the_key_to_set(capfd, finished, tmp_path):
    keys = dict(load_parameters_path=finished, base_mlp_dim=48)
    code, line = refused(capfd, tmp_path / "runs", **keys)
    assert code == 2
    assert re.search(r"float32\[2, 16, 32\] in checkpoint .* but float32\[2, 16, 48\]", line)
    assert line.endswith("Set base_mlp_dim=32.")


@pytest.mark.parametrize(
    "keys, named",
    [
        (dict(base_mlp_dim=48), "base_mlp_dim=48 (the checkpoint has 32)"),
        (dict(adam_b2=0.5), "adam_b2=0.5 (the checkpoint has 0.99)"),
        (
            dict(per_device_batch_size=3),
            "sequences_per_replica=3 (the checkpoint has 2): a resumed run must compute what the "
            "interrupted one would have. sequences_per_replica is per_device_batch_size *",
        ),
        (dict(data_shuffle_seed=1), "data_shuffle_seed=1 (the checkpoint has 0)"),
    ],
)
def test_a_resume_that_would_compute_something_else_is_refused(
    capfd, finished, tmp_path, keys, named
):
    """Nothing that the run has saved is touched."""
    shutil.copytree(finished, tmp_path / "finished")
    code, line = refused(capfd, tmp_path, "finished", steps=99, **keys)
    assert code == 2
    assert line.startswith(f"CheckpointError: {named}")
    assert "Set it back, or set another run_name" in line
    assert tools.saved_steps(tmp_path / "finished") == tools.saved_steps(finished)
    assert tools.rows(tmp_path / "finished") == tools.rows(finished)


def test_other_text_is_refused_on_resume(capfd, text_run, tmp_path):
    run, keys = text_run
    (tmp_path / "other.txt").write_text("the place in one text is none in another. " * 60)
    shutil.copytree(run, tmp_path / "text")
    keys = keys | dict(dataset_path=tmp_path / "other.txt", steps=9)
    code, line = refused(capfd, tmp_path, "text", **keys)
    assert code == 2
    assert re.search(r"dataset_path=\S+other.txt \(the checkpoint has \S+\)", line) or (
        f"dataset_path={tmp_path}/other.txt: the text is not that of the checkpoint" in line
    )


def test_changed_text_in_its_place_is_refused_on_resume(capfd, text_run, tmp_path):
    run, keys = text_run
    text = keys["dataset_path"]
    before = text.read_text()
    shutil.copytree(run, tmp_path / "text")
    try:
        text.write_text(before + "and more")
        code, line = refused(capfd, tmp_path, "text", **(keys | dict(steps=9)))
    finally:
        text.write_text(before)
    assert code == 2
    assert f"dataset_path={text}: the text is not that of the checkpoint of step 4" in line
    assert "Restore the text, or start a new run with load_parameters_path" in line


@pytest.mark.parametrize("key", ["load_parameters_path", "load_full_state_path"])
def test_a_path_to_start_from_without_a_checkpoint_is_refused_before_the_folder_is_made(
    capfd, tmp_path, key
):
    code, line = refused(capfd, tmp_path, "new", **{key: tmp_path / "absent"})
    assert code == 2
    assert line.startswith(f"CheckpointError: {key}={tmp_path}/absent holds no checkpoint: give")
    assert not (tmp_path / "new").exists()


def test_a_run_that_resumes_does_not_ask_for_the_path_it_has_started_from(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "finished")
    assert tools.run(tmp_path, "finished", load_parameters_path=tmp_path / "absent") == 0
