"""What a start says of the files it reads, leaves out and holds out."""

import re

from data.shards_on_disk import open_dataset

from maxdiloco.config import config
from maxdiloco.data import registry
from maxdiloco.run import data as run_data
from maxdiloco.run import settings as run_settings
from maxdiloco.run.assemble import BatchShape


def test_the_summary_counts_files_read_and_files_left_out(settings, tmp_path):
    """42 tokens with the 2 starts in sequences of 4: 10, of which one is held out."""
    for name, size in (("a.txt", 30), ("b.txt", 10)):
        (tmp_path / name).write_text("x" * size)
    data = open_dataset(settings(dataset_path=str(tmp_path), max_target_length=4))
    (line,) = data.summary(data.first_position(2, 1))
    assert f"dataset_path={tmp_path}" in line and "4.5 steps" in line
    assert [int(number) for number in re.findall(r"\b(\d+) ", line)][:4] == [2, 2, 42, 9]
    (tmp_path / "sub").mkdir()
    for name in ("c.json", "d.parquet", "e.TXT", "f.html", ".hidden.bin", "README", "sub/g.html"):
        (tmp_path / name).write_text("x")
    (line,) = registry.left_out_lines(registry.Source("text", str(tmp_path), "text"), "SOURCE")
    for named in ("2 .html", "1 .json", "1 .parquet", "1 .TXT"):
        assert named in line
    assert ".bin" not in line
    for path in ("", str(tmp_path / "a.txt"), str(tmp_path / "*.json")):
        assert not list(registry.left_out_lines(registry.Source("text", path, "text"), "SOURCE"))


def warned(*argv):
    """The warnings of a start that reads text and evaluates."""
    cfg = config.load(["max_target_length=4", "vocab_size=257", *argv], {})
    text, held = (open_dataset(cfg, split=split) for split in ("train", "eval"))
    lines = run_data.lines(run_settings.read_data(cfg), text, {"": held}, BatchShape(2, 1, 4))
    return [line for line in lines if line.startswith("warning: ")]


def test_a_start_warns_of_a_large_held_out_part_and_unread_files(tmp_path):
    """One sequence of 5 is 20 %, of 20 it is 5 %; the source of a mixture is named."""
    for name, tokens in (("small", 20), ("large", 80)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("x" * (tokens - 1))
    small, large = f"dataset_path={tmp_path}/small", f"dataset_path={tmp_path}/large"
    (warning,) = warned(small)
    assert f"20% of {small} " in warning
    for argv in ([large], [small, "eval_fraction=0.1"], [small, f"eval_{large}"]):
        assert warned(*argv) == []
    sources = ", ".join(f"{{path: {tmp_path}/{name}, name: {name}}}" for name in ("small", "large"))
    (warning,) = warned(f"dataset_mixture=[{sources}]")
    assert "20% of dataset_mixture, source small " in warning
    (tmp_path / "large" / "b.parquet").write_bytes(b"?")
    (warning,) = warned(f"dataset_mixture=[{{path: {tmp_path}/large, name: a}}]")
    assert f"source a={tmp_path}/large" in warning and "1 .parquet" in warning
