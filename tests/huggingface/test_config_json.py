"""config.json to keys and back, without weights."""

import json

import pytest

from maxdiloco.config import config
from maxdiloco.errors import ConfigError
from maxdiloco.huggingface import config_json, families, tensors
from maxdiloco.models.config import from_keys

# The config.json of published models, without what says nothing of the computation.
PUBLISHED = {
    "llama3.2-1b": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64,
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True,
        "max_position_embeddings": 131072, "vocab_size": 128256,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
    },
    "gemma3-4b": {
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
        "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
        "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "attention_bias": False, "aux_loss_alpha": 0.001,
        "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
        "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "pretraining_tp": 1,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
        "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
    },
}  # fmt: skip


def of_file(name):
    return config.load([f"model_name={name}", "dataset_type=synthetic"], {})


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("llama3.2-1b", "llama"),
        ("mistral-7b", "mistral"),
        ("qwen3-0.6b", "qwen3"),
        ("olmo2-1b", "olmo2"),
        ("gemma2-2b", "gemma2"),
        ("gemma3-4b", "gemma3_text"),
        ("mixtral-8x7b", "mixtral"),
        ("qwen3-30b-a3b", "qwen3_moe"),
        ("gpt-oss-20b", "gpt_oss"),
        ("deepseek-v3", "deepseek_v3"),
    ],
)
def test_each_model_file_is_a_model_type_that_has_its_very_keys(name, model_type):
    cfg = of_file(name)
    family, hf = config_json.family_for(vars(cfg))
    assert family.model_type == model_type
    assert config_json.differences(vars(cfg), json.loads(json.dumps(hf)), family) == {}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_json_has_the_keys_of_our_model_file(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    read = config_json.read(tmp_path)
    assert read.unknown == ()
    keys = vars(of_file(name))
    assert config_json.differences(keys, read.text, read.family) == {}
    other = read.text | {"hidden_size": 4096, "n_group": 2}
    expected = ["base_emb_dim", "router"][: 1 + (name == "deepseek-v3")]
    assert sorted(config_json.differences(keys, other, read.family)) == expected


SIZES = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 8, "num_hidden_layers": 3}
LOCAL, WHOLE = "sliding_attention", "full_attention"


def layers(types, window):
    return {"layer_types": types, "sliding_window": window}


def keys_of_layers(window, pattern):
    return {"sliding_window_size": window, "attention_pattern": pattern}


@pytest.mark.parametrize(
    ("model_type", "entries", "expected"),
    [
        # transformers' Gemma 3 has the key and does not use it.
        ("gemma2", {"attn_logit_softcapping": 5.0}, {"attn_logits_soft_cap": 5.0}),
        ("gemma3_text", {"attn_logit_softcapping": 5.0}, {"attn_logits_soft_cap": 0.0}),
        # Layers that are all alike have a pattern of one, and without a window none.
        ("gemma2", layers([LOCAL] * 3, 5), keys_of_layers(5, ("local",))),
        ("gemma2", layers([LOCAL, LOCAL, WHOLE], 5),
         keys_of_layers(5, ("local", "local", "global"))),
        ("gemma2", layers([LOCAL, LOCAL, WHOLE], None), keys_of_layers(0, ())),
        # As transformers reads the files of gemma-2b; test_refused has llama's.
        ("gemma", {"hidden_act": "gelu"}, {"mlp_activations": ("gelu", "linear")}),
    ],
)  # fmt: skip
def test_an_entry_means_what_transformers_makes_of_it(model_type, entries, expected):
    found = config_json.keys_of(SIZES | entries, config_json.family_of(model_type))
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize("kind", [LOCAL, WHOLE])
def test_a_gemma_3_whose_layers_are_all_alike_is_a_config(kind):
    """The config refuses a local wavelength without local layers, or without a pattern."""
    family = config_json.family_of("gemma3_text")
    keys = config_json.keys_of(SIZES | {"layer_types": [kind] * 3}, family)
    cfg = config.with_changes(of_file("default").as_dict() | keys, [], {}, may_change=())
    assert (
        config_json.differences(vars(cfg), config_json.config_of(vars(cfg), family), family) == {}
    )


NO_LAYER = {"sliding_window_size": 5, "attention_pattern": ("global",)}
ONE_GROUP = {"score_function": "sigmoid", "normalise_weights": True, "balance_bias": True}
SOME_LAYERS = {"sliding_window_size": 5, "attention_pattern": ("global", "local")}
SCALED = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
LIKE_THE_GLOBAL = {"local_rope_max_timescale": -1.0}


def rope(local, **entries):
    """rope_parameters of gemma3-1b, whose global layers have a wavelength of 1e6."""
    whole = {"rope_type": "default"} | entries | {"rope_theta": 1e6}
    own = {"rope_type": "default", "rope_theta": local}
    return {"rope_parameters": {"full_attention": whole, "sliding_attention": own}}


@pytest.mark.parametrize(
    ("name", "changes", "written"),
    [
        ("deepseek-v3", {"router": ONE_GROUP}, {"n_group": 1, "topk_group": 1}),
        ("qwen3-0.6b", NO_LAYER, {"layer_types": ["full_attention"] * 28}),
        ("qwen3-0.6b", SOME_LAYERS, {"layer_types": ["full_attention", "sliding_attention"] * 14}),
        # Of dense layers, which it has none of.
        ("mixtral-8x7b", {"base_mlp_dim": 777}, {}),
        # Experts as wide as a layer.
        ("qwen3-30b-a3b", {"base_moe_mlp_dim": -1}, {"moe_intermediate_size": 6144}),
        # A whole number for the queries, which transformers' class asks for, and none that stands
        # for a word.
        ("gemma3-1b", {}, {"query_pre_attn_scalar": 256} | rope(10000.0)),
        ("gemma3-1b", {"query_pre_attn_scalar": "auto", "head_dim": 64},
         {"query_pre_attn_scalar": 64}),
        ("gemma3-1b", LIKE_THE_GLOBAL, rope(1e6)),
        ("gemma3-1b", SCALED, rope(10000.0, rope_type="linear", factor=2.0)),
    ],
)  # fmt: skip
def test_an_export_keeps_its_type_and_has_transformers_values(name, changes, written):
    """Keys that no layer uses do not matter."""
    cfg = config.from_dict(of_file(name).as_dict() | changes)
    family, theirs = config_json.family_for(vars(cfg))
    assert family.model_type == config_json.family_for(vars(of_file(name)))[0].model_type
    found = {key: theirs[key] for key in written}
    assert json.dumps(found) == json.dumps(written), "of the same types"


PLAIN = {"mlp_activations": ("gelu",), "use_qk_norm": "false"}


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("gemma3-1b", {"query_pre_attn_scalar": 24.5}, "query_pre_attn_scalar=24.5"),
        # Gemma 3 has no soft-cap of attention, and its local layers are never stretched.
        ("gemma3-1b", {"attn_logits_soft_cap": 5.0}, "attn_logits_soft_cap=5.0"),
        ("gemma3-1b", LIKE_THE_GLOBAL | SCALED, "gemma2: use_qk_norm=head"),
        # A soft-cap of the output, with norms of the input only.
        ("default", PLAIN, r"llama: mlp_activations=\[gelu\]"),
        ("default", {"final_logits_soft_cap": 30.0}, "qwen3: final_logits_soft_cap=30.0"),
    ],
)
def test_a_model_that_no_type_covers_is_refused_with_its_keys(name, changes, named):
    cfg = config.from_dict(of_file(name).as_dict() | changes)
    with pytest.raises(ConfigError, match=named):
        config_json.family_for(vars(cfg))


def test_a_scaled_tied_embedding_is_exported_with_a_head():
    """The defaults of base.yml, of which Gemma has the scale and Qwen 3 the rest."""
    family, hf = config_json.family_for(vars(config.load([], {})))
    assert family.model_type == "qwen3"
    keys = config_json.keys_of(hf, family)
    assert (keys["logits_via_embedding"], keys["embedding_scale"]) == (False, "one")


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda family: family.model_type)
def test_a_family_has_a_tensor_for_every_parameter(family):
    cfg = config.load("num_experts=4 first_num_dense_layers=1 shared_experts=1".split(), {})
    found = config_json.keys_of(config_json.config_of(vars(cfg), family), family)
    of_run = from_keys(config.from_dict(cfg.as_dict() | found))
    halves = {}
    for part in tensors.model_parts(of_run, family):  # or it names the leaf
        halves.setdefault(part.name, []).append(part.tensor.half)
    assert all(of_tensor in ([None], [0, 1]) for of_tensor in halves.values())
