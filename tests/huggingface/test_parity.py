"""Each model type computes what transformers computes."""

import numpy as np
import pytest
import small_models as small
from tiers import corner

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
import transformers
from safetensors.numpy import load_file, save_file

from benchmarks import parity
from maxdiloco.config import config
from maxdiloco.huggingface import config_json, families

pytestmark = pytest.mark.torch_import  # its import takes 5 s, once

PREFIX = "language_model.model."  # as transformers 5 writes them
FAMILIES = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3")
MODEL_TYPES = [name for name in parity.CASES if "," not in name]
WITH_GRADIENT = ("qwen3", "qwen3_moe", "deepseek_v3")  # a dense one and two with experts


@pytest.mark.parametrize("name", corner(parity.CASES, FAMILIES))
def test_logits_equal_transformers_and_exports_the_same_bits(name, tmp_path):
    """Texts longer than the window, padded and packed, in float32; logits of size 1 to 10."""
    case, gradient = parity.CASES[name], name in WITH_GRADIENT
    found = parity.compare(case, tmp_path, gradient=gradient)
    assert 1 < found.size < 100
    assert found.greatest < parity.TOLERANCE, found
    assert not gradient or found.gradient < parity.TOLERANCE, found
    small.done("export", tmp_path / "ours", tmp_path / "again")
    small.assert_weights(tmp_path / "again", load_file(tmp_path / "theirs/model.safetensors"))


def test_the_text_model_of_files_with_images(tmp_path, capfd):
    """The vision tower is left out, and the log names how many tensors; the export is a text model.

    Tensors have another prefix in files of some versions.
    """
    text = parity.arguments(parity.CASES["gemma3_text"])
    vision = dict(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        image_size=28, patch_size=14, model_type="siglip_vision_model",
    )  # fmt: skip
    attention = text.pop("attn_implementation")
    of_both = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=1,
        image_token_index=parity.VOCABULARY, attn_implementation=attention,
    )  # fmt: skip
    model = parity.random_model(of_both)
    found = parity.imported(model, tmp_path)
    batch = parity.texts()
    (theirs,), *_ = parity.their_logits(model, batch)
    assert np.abs(parity.our_logits(found, batch)[0] - theirs).max() < parity.TOLERANCE

    values = load_file(tmp_path / "theirs/model.safetensors")
    text_values = {
        name.replace(PREFIX, "model."): value for name, value in values.items() if PREFIX in name
    }
    assert len(text_values) == 2 + 13 * text["num_hidden_layers"]
    other = {
        name.replace(PREFIX, "model.language_model.") if PREFIX in name else f"model.{name}": value
        for name, value in values.items()
    }
    assert any(name.startswith("model.vision_tower.") for name in other)
    save_file(other, tmp_path / "theirs/model.safetensors")
    small.done("import", tmp_path / "theirs", tmp_path / "other")
    assert f" {len(other) - len(text_values)} tensors" in capfd.readouterr().out
    for name in ("ours", "other"):
        out = tmp_path / f"{name} exported"
        small.done("export", tmp_path / name, out)
        small.assert_weights(out, text_values)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    assert type(loaded).__name__ == "Gemma3ForCausalLM"
    assert np.abs(parity.their_logits(loaded, batch)[0][0] - theirs).max() < parity.TOLERANCE


@pytest.mark.parametrize("name", ["llama, stretched", "gemma2"])
def test_a_head_of_its_own_beside_tied_and_a_padded_vocabulary(name, tmp_path):
    """transformers 5 keeps a head of the files that is not the table, whatever config.json says;
    its logits are ours, those of 67 rows of padding are -inf, and an export loads as the same."""
    model = parity.torch_model(parity.CASES[name])
    model.save_pretrained(tmp_path / "theirs")
    values = load_file(tmp_path / "theirs/model.safetensors")
    assert "lm_head.weight" not in values
    table = values["model.embed_tokens.weight"]
    values["lm_head.weight"] = np.random.default_rng(0).normal(0, 0.2, table.shape).astype("f4")
    save_file(values, tmp_path / "theirs/model.safetensors", {"format": "pt"})

    def logits_of(folder):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        return parity.their_logits(loaded, batch)[0][0]

    batch = parity.texts()
    theirs = logits_of(tmp_path / "theirs")
    assert np.abs(theirs - parity.their_logits(model, batch)[0][0]).max() > 1  # it is not tied
    ours = parity.our_logits(parity.imported(None, tmp_path, vocab_multiple=128), batch)
    assert ours.shape[-1] == 128 and (ours[..., parity.VOCABULARY :] == -np.inf).all()
    assert np.abs(ours[0, :, : parity.VOCABULARY] - theirs).max() < parity.TOLERANCE
    small.done("export", tmp_path / "ours", tmp_path / "again")
    np.testing.assert_array_equal(logits_of(tmp_path / "again"), theirs)


def test_every_family_has_a_case():
    """In benchmarks/parity.py; gemma3 is the test of files with images."""
    known = {family.model_type for family in families.FAMILIES}
    assert known - set(MODEL_TYPES) == {"gemma3"}


@pytest.mark.parametrize("name", ["gemma2-2b", "gemma3-4b", "gpt-oss-20b", "deepseek-v3"])
def test_transformers_takes_the_config_json_of_a_model_file(name):
    """Its classes refuse a number of another type."""
    _, hf = config_json.family_for(vars(config.load([f"model_name={name}"], {})))
    found = transformers.AutoConfig.for_model(**hf)
    assert (found.model_type, found.hidden_size) == (hf["model_type"], hf["hidden_size"])


def test_another_wavelength_would_be_seen(tmp_path, monkeypatch):
    """A positive control: one key off by a little is 100 times the tolerance off."""
    right = config_json.keys_of

    def wrong(*args):
        return right(*args) | {"rope_max_timescale": 9000.0}

    monkeypatch.setattr(config_json, "keys_of", wrong)
    assert parity.compare(parity.CASES["mistral"], tmp_path).greatest > 100 * parity.TOLERANCE
