"""Each model type computes what transformers computes."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
from safetensors.numpy import load_file

from benchmarks import parity
from maxdiloco import hf

pytestmark = pytest.mark.xdist_group("torch")  # its import takes 5 s, once

WITH_GRADIENT = ("qwen3", "qwen3_moe", "deepseek_v3")  # a dense one and two with experts


@pytest.mark.parametrize("name", parity.CASES)
def test_logits_are_those_of_transformers_and_an_export_has_the_same_bits(name, tmp_path):
    """Texts longer than the window, padded and packed, in float32; logits of size 1 to 10."""
    case, gradient = parity.CASES[name], name in WITH_GRADIENT
    found = parity.compare(case, tmp_path, gradient=gradient)
    assert 1 < found.size < 100
    assert found.greatest < parity.TOLERANCE, found
    assert not gradient or found.gradient < parity.TOLERANCE, found
    assert hf.main(["export", str(tmp_path / "ours"), str(tmp_path / "again")]) == 0
    before, after = (load_file(tmp_path / of / "model.safetensors") for of in ("theirs", "again"))
    assert {name: (value.shape, value.tobytes()) for name, value in before.items()} == {
        name: (value.shape, value.tobytes()) for name, value in after.items()
    }


def test_another_epsilon_would_be_seen(tmp_path, monkeypatch):
    """A positive control: one key off by a little is 100 times the tolerance off."""
    from maxdiloco.huggingface import config_json

    right = config_json.keys_of
    monkeypatch.setattr(
        config_json,
        "keys_of",
        lambda config, family: right(config, family) | {"rope_max_timescale": 9000.0},
    )
    assert parity.compare(parity.CASES["mistral"], tmp_path).greatest > 100 * parity.TOLERANCE


def test_the_table_has_a_row_for_each_type():
    found = parity.Found(1e-6, 2e-6, 3e-6, 4.0, None)
    text = parity.table({"llama": found, "qwen3": found._replace(gradient=5e-6)})
    assert "| llama | 1.0e-06 | 2.0e-06 | 3.0e-06 | 4.0 |  |\n" in text
    assert text.endswith("| qwen3 | 1.0e-06 | 2.0e-06 | 3.0e-06 | 4.0 | 5.0e-06 |\n")
