"""What DeepSeek-V3 has that no other model type has: pairs of neighbours, a bias, a module more."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxdiloco import hf
from maxdiloco.flags import config
from maxdiloco.huggingface import config_json, layout, tensors
from maxdiloco.huggingface.tensors import Leaf, Tensor

THEIRS = {
    "model_type": "deepseek_v3", "hidden_size": 8, "intermediate_size": 12, "vocab_size": 31,
    "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "q_lora_rank": 5, "kv_lora_rank": 3, "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 7, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "num_nextn_predict_layers": 1, "max_position_embeddings": 64,
    "rope_scaling": {
        "type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "mscale": 0.5,
        "mscale_all_dim": 2,
    },
}  # fmt: skip
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture
def source(tmp_path):
    """A folder of bfloat16 weights and a float32 bias, with the module of another token."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(THEIRS))
    keys = config_json.keys_of(THEIRS, config_json.family_of("deepseek_v3"))
    cfg = config.from_dict(config.load([], {}).as_dict() | keys)
    plan = layout.of_model(cfg, config_json.family_of("deepseek_v3"))
    rng = np.random.default_rng(0)
    values = {
        part.name: rng.normal(size=part.shape).astype(ml_dtypes.bfloat16) for part in plan.parts
    }
    values[BIAS] = rng.normal(size=4).astype(np.float32)
    values["model.layers.2.eh_proj.weight"] = np.ones((8, 16), ml_dtypes.bfloat16)
    save_file(values, folder / "model.safetensors")
    return folder


def test_the_module_for_another_token_is_left_out_and_the_bias_stays_in_float32(
    source, tmp_path, capfd
):
    assert hf.main(["import", str(source), str(tmp_path / "ours")]) == 0
    line = "note: the module for the token after the next is left out, 1 tensors of the files."
    assert line in capfd.readouterr().out.splitlines()
    arguments = ["export", str(tmp_path / "ours"), str(tmp_path / "again"), "dtype=bfloat16"]
    assert hf.main(arguments) == 0
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "again"))
    del before["model.layers.2.eh_proj.weight"]
    assert {name: (x.dtype, x.tobytes()) for name, x in before.items()} == {
        name: (x.dtype, x.tobytes()) for name, x in after.items()
    }
    written = json.loads((tmp_path / "again/config.json").read_text())
    assert written == THEIRS | {"dtype": "bfloat16", "num_nextn_predict_layers": 0}


def test_pairs_of_neighbours_become_pairs_of_two_halves():
    """2 heads of 1 + 4 features: 0 is not rotated, (1, 2) and (3, 4) are pairs."""
    leaf = Leaf("query", (1, 2, 5), None)
    (part,) = tensors.parts_of(leaf, Tensor("q", inputs=1, in_pairs=True), 4)
    theirs = np.arange(10)[:, None]
    ours = tensors.to_part(theirs, part)
    assert ours.tolist() == [[[0, 1, 3, 2, 4], [5, 6, 8, 7, 9]]]
    again = np.zeros_like(theirs)
    for first, last in ((0, 2), (2, 5)):  # in pieces, as a checkpoint may have them
        box = (slice(0, 1), slice(0, 2), slice(first, last))
        tensors.put(again, part, box, ours[:, :, first:last])
    np.testing.assert_array_equal(again, theirs)
    (plain,) = tensors.parts_of(leaf, Tensor("q", inputs=1), 4)
    np.testing.assert_array_equal(tensors.to_part(theirs, plain).reshape(-1), np.arange(10))


def test_scales_of_yarn_are_the_factor_of_the_rotation_and_of_the_logits():
    """Factor 4: 0.1 ln 4 = 0.138629; (0.5 * it + 1) / (2 * it + 1); 6 features / (2 * it + 1)^4."""
    keys = config_json.keys_of(THEIRS, config_json.family_of("deepseek_v3"))
    assert keys["rope_attention_factor"] == pytest.approx(1.069315 / 1.277259, rel=1e-5)
    assert keys["query_pre_attn_scalar"] == pytest.approx(6 / 1.277259**4, rel=1e-5)


@pytest.mark.parametrize(
    ("scalar", "factor"), [(0.0, 0.0), (5.0, 0.0), (5.0, 1.0), (7.0, 0.3), (0.0, 1.0)]
)
def test_every_pair_of_factors_has_a_config_json(scalar, factor):
    family = config_json.family_of("deepseek_v3")
    keys = config_json.keys_of(THEIRS, family)
    keys |= {"query_pre_attn_scalar": scalar, "rope_attention_factor": factor}
    cfg = config.from_dict(config.load([], {}).as_dict() | keys)
    written = config_json.config_of(cfg, family)
    assert config_json.misfits(cfg, written, family) == {}
    assert config_json.misfits(cfg, written | {"q_lora_rank": 4}, family) == {"q_lora_rank": (5, 4)}


def test_a_rank_of_null_is_a_whole_matrix_and_none_is_the_default():
    family = config_json.family_of("deepseek_v3")
    without = {name: value for name, value in THEIRS.items() if name != "q_lora_rank"}
    assert config_json.keys_of(without, family)["q_lora_rank"] == 1536
    assert config_json.keys_of(without | {"q_lora_rank": None}, family)["q_lora_rank"] == 0
