"""Runs on a mixture of sources: resumed to the bit, with other weights, refused by name."""

import json

import pytest
import run_tools as tools

pytestmark = pytest.mark.usefixtures("programs")


@pytest.fixture
def sources(tmp_path):
    """Two folders of text and the keys of a run on them, best-fit packed; weights as given."""
    for name, size in (("web", 400), ("code", 90)):
        (tmp_path / name).mkdir()
        for number in range(21):
            text = bytes(97 + (number * 7 + i) % 26 for i in range(size + number))
            (tmp_path / name / f"{number:02}.txt").write_bytes(text)

    def keys(web=3):
        entries = [
            {"path": str(tmp_path / "web"), "weight": str(web), "name": "web"},
            {"path": str(tmp_path / "code"), "weight": "1", "name": "code"},
        ]
        mixture = json.dumps(entries)
        common = dict(dataset_type="text", vocab_size=257, grain_packing_type="best_fit")
        return common | dict(dataset_mixture=mixture)

    return keys


def test_a_resumed_mixture_equals_one_that_was_not_interrupted(capfd, tmp_path, sources):
    """Steps 1 to 3, then to 6; a step reads 4 sequences of 16. Then other weights go on where
    the sources are, and another text is refused with its name."""
    assert tools.run(tmp_path, "whole", steps=6, **sources()) == 0
    out = capfd.readouterr().out
    assert "source web:" in out and "; 75.0000% of what is read" in out
    assert "of them padding" in out
    assert tools.run(tmp_path, "parts", steps=3, **sources()) == 0
    assert tools.run(tmp_path, "parts", steps=6, **sources()) == 0
    tools.assert_equal_runs(tmp_path / "parts", tmp_path / "whole", steps=6)
    row = tools.rows(tmp_path / "parts")[-1]
    assert row["data/tokens_web"] == 18 * 16 and row["data/tokens_code"] == 6 * 16
    assert 0 <= row["data/padding"] < 0.5

    assert tools.run(tmp_path, "parts", steps=8, **sources(web=1)) == 0
    assert tools.meta(tmp_path / "parts", 8)["position"]["sources"] == {
        "begun": 24,
        "read": {"web": 18, "code": 6},
        "shares": {"web": 1, "code": 1},
    }
    row = tools.rows(tmp_path / "parts")[-1]
    assert row["data/tokens_web"] == 22 * 16 and row["data/tokens_code"] == 10 * 16

    (tmp_path / "code" / "01.txt").write_bytes(b"another text")
    capfd.readouterr()
    assert tools.run(tmp_path, "parts", steps=9, **sources(web=1)) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert line.startswith("CheckpointError: dataset_mixture, sources code: the text is not that")
