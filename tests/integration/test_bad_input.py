"""What cannot work ends in one line with the key, its value and what to do; nothing is written."""

import re
import shutil

import pytest
import run_tools as tools

pytestmark = pytest.mark.usefixtures("programs")

# Where data are asked for they are absent or wrong in many cases: a large text takes minutes, and
# its own error would come first.
TEXT = dict(dataset_type="text", vocab_size=257)
ABSENT = TEXT | dict(dataset_path="{}/absent", vocab_size=512)
SHORT = TEXT | dict(dataset_path="{}/short.txt")  # 6 sequences, one of them held out
CASES = [
    (
        dict(ici_data_parallelism=2, weight_dtype="bfloat16"),
        2,
        "weight_dtype=bfloat16 .*on 2 CPU devices.* Use weight_dtype=float32",
    ),
    (ABSENT | dict(ici_fsdp_parallelism=3), 2, "ConfigError: fsdp parallelism 3 does not divide "),
    (
        ABSENT | dict(base_output_directory="/proc/runs"),
        2,
        "CheckpointError: base_output_directory=/proc/",
    ),
    (dict(load_parameters_path="{}/absent"), 2, "load_parameters_path={}/absent holds no checkp"),
    (dict(load_full_state_path="{}/absent"), 2, "load_full_state_path={}/absent holds no checkp"),
    (
        SHORT | dict(per_device_batch_size=3),
        3,
        r"has 5 sequences.* 2 replicas \* 3 = 6.* Give more text, or lower",
    ),
    (  # held-out text too is looked for before the training starts
        TEXT | dict(eval_interval=5, eval_dataset_path="{}/absent"),
        3,
        "eval_dataset_path=.*/absent does not exist.* Give a folder",
    ),
    (
        SHORT | dict(tokenizer_type="sentencepiece", tokenizer_path="{}/short.txt", vocab_size=-1),
        3,
        "/short.txt is no tokenizer.model of tokenizer_type=sent.* Give another file",
    ),
]


@pytest.mark.parametrize("keys, code, words", CASES)
def test_what_cannot_work_is_refused_before_a_folder_is_made(capfd, tmp_path, keys, code, words):
    (tmp_path / "short.txt").write_text("x" * 100)
    keys = {k: v.format(tmp_path) if isinstance(v, str) else v for k, v in keys.items()}
    found, line = tools.refused_run(capfd, tmp_path / "runs", "refused", **keys)
    assert found == code
    assert re.match(r"ConfigError: |CheckpointError: " if code == 2 else "DataError: ", line)
    assert re.search(words.format(tmp_path), line)
    assert not (tmp_path / "runs").exists()


def test_parameters_of_another_shape_are_refused_with_the_key_to_set(capfd, finished, tmp_path):
    keys = dict(load_parameters_path=finished, base_mlp_dim=48)
    code, line = tools.refused_run(capfd, tmp_path, "refused", **keys)
    assert code == 2
    assert re.search(r"float32\[2, 16, 32\] in checkpoint .* but float32\[2, 16, 48\]", line)
    assert line.endswith("Set base_mlp_dim=32.")


def test_a_resume_that_would_compute_something_else_is_refused(capfd, finished, tmp_path):
    """Nothing that the run has saved is touched."""
    shutil.copytree(finished, tmp_path / "finished")
    keys = dict(steps=99, per_device_batch_size=3)
    code, line = tools.refused_run(capfd, tmp_path, "finished", **keys)
    assert code == 2
    assert line.startswith(
        "CheckpointError: sequences_per_replica=3 (the checkpoint has 2): a resumed run must "
        "compute what the interrupted one would have. sequences_per_replica is per_device_batch_"
    )
    assert "Set it back, or set another run_name" in line
    assert tools.saved_steps(tmp_path / "finished") == tools.saved_steps(finished)
    assert tools.rows(tmp_path / "finished") == tools.rows(finished)
