"""What cannot work ends in one line with the key, its value and what to do; nothing is written."""

import re
import shutil

import pytest
import run_tools as tools

from maxdiloco import train

pytestmark = pytest.mark.usefixtures("programs")


def refused(capfd, folder, name="refused", **keys):
    """The exit code and the one line of a run that is refused."""
    return tools.refused(capfd, train.main, tools.arguments(folder, name, **keys))


@pytest.mark.parametrize(
    "keys, words",
    [
        (dict(diloco_sync_perod=2), ["diloco_sync_perod=2", "Did you mean diloco_sync_period?"]),
        (
            dict(ici_data_parallelism=8),
            ["diloco 2 * data 8 = 16 devices, but 8 are visible", "Change a dcn_*_parallelism"],
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
            dict(tokenizer_type="sentencepiece", tokenizer_path="{}/short.txt", vocab_size=-1),
            ["/short.txt is no tokenizer.model of tokenizer_type=sent", "Give another file"],
        ),
    ],
)
def test_data_that_cannot_work_are_refused_with_3(capfd, tmp_path, keys, words):
    """Held-out text too is looked for before the training starts."""
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
        (
            dict(per_device_batch_size=3),
            "sequences_per_replica=3 (the checkpoint has 2): a resumed run must compute what the "
            "interrupted one would have. sequences_per_replica is per_device_batch_size *",
        ),
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
