"""Keys that cannot work end a run with an exit code and one line, before anything is written."""

import shutil

import pytest
from run import names_key, train
from run_files import metrics_rows, saved_steps

pytestmark = pytest.mark.usefixtures("programs")

# Data that are absent, or too short, in most cases: a large text takes minutes to read, and the
# error about the data would come first.
TEXT = dict(dataset_type="text", vocab_size=257)
ABSENT = TEXT | dict(dataset_path="{}/absent", vocab_size=512)
SHORT = TEXT | dict(dataset_path="{}/short.txt")  # 6 sequences, one of them held out
PIECES = dict(tokenizer_type="sentencepiece", tokenizer_path="{}/short.txt", vocab_size="auto")
# Keys; the exit code; the error and the key that is named.
REFUSED = [
    (dict(ici_data_parallelism=2, weight_dtype="bfloat16"), 2, "ConfigError", "weight_dtype"),
    (ABSENT | dict(ici_fsdp_parallelism=3), 2, "ConfigError", "logical_axis_rules"),
    (
        ABSENT | dict(base_output_directory="/proc/runs"),
        2,
        "CheckpointError",
        "base_output_directory",
    ),
    (dict(load_parameters_path="{}/absent"), 2, "CheckpointError", "load_parameters_path"),
    (dict(load_full_state_path="{}/absent"), 2, "CheckpointError", "load_full_state_path"),
    (SHORT | dict(per_device_batch_size=3), 3, "DataError", "per_device_batch_size"),
    # Held-out text is looked for before the training starts, too.
    (
        TEXT | dict(eval_interval=5, eval_dataset_path="{}/absent"),
        3,
        "DataError",
        "eval_dataset_path",
    ),
    (SHORT | PIECES, 3, "DataError", "tokenizer_type"),
]


@pytest.mark.parametrize("keys, code, error, key", REFUSED)
def test_a_refused_run_names_the_key_and_makes_no_folder(tmp_path, keys, code, error, key):
    (tmp_path / "short.txt").write_text("x" * 100)
    keys = {k: v.format(tmp_path) if isinstance(v, str) else v for k, v in keys.items()}
    run = train(tmp_path / "runs" / "refused", **keys)
    assert run.code == code
    assert run.error.startswith(f"{error}: ") and names_key(run.error, key)
    assert not (tmp_path / "runs").exists()


def test_parameters_of_another_shape_name_the_key_to_set(finished, tmp_path):
    run = train(tmp_path / "refused", load_parameters_path=finished, base_mlp_dim=48)
    assert run.code == 2 and "base_mlp_dim=32" in run.error


def test_a_refused_resume_leaves_the_run_as_it_is(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "finished")
    run = train(tmp_path / "finished", steps=99, per_device_batch_size=3)
    assert run.code == 2 and names_key(run.error, "per_device_batch_size")
    assert saved_steps(tmp_path / "finished") == saved_steps(finished)
    assert metrics_rows(tmp_path / "finished") == metrics_rows(finished)
