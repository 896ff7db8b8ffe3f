"""config.json to the keys of the group model, and back."""

import difflib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from maxdiloco import json_text, small_files
from maxdiloco.config import config as config_lib
from maxdiloco.config.keys import KEYS, Key
from maxdiloco.config.values import show
from maxdiloco.errors import ConfigError
from maxdiloco.huggingface import rules
from maxdiloco.huggingface.families import families
from maxdiloco.huggingface.folders import Folder
from maxdiloco.huggingface.tensors import Family
from maxdiloco.storage.run_folder import refusing

# Keys of the group model that say how to train, not what is computed.
OF_TRAINING = ("model_name", "override_model_config", "z_loss_multiplier", "capacity_factor")
# A key that a family says nothing of has the default of base.yml, but for these.
_NEUTRAL = {"embedding_scale": "one", "use_qk_norm": "false"}
# Keys of config.json that rules read, or that change nothing of what is computed.
NOTED = {
    "_name_or_path", "_sliding_window_pattern", "architectures", "attention_bias",
    "attention_dropout", "attn_implementation", "attn_logit_softcapping", "auto_map",
    "bos_token_id", "cache_implementation", "dtype", "eos_token_id", "final_logit_softcapping",
    "hidden_act", "hidden_activation", "initial_context_length", "initializer_range", "layer_types",
    "max_position_embeddings", "max_window_layers", "model_type", "moe_intermediate_size",
    "n_group", "n_routed_experts", "num_nextn_predict_layers", "q_lora_rank", "qk_head_dim",
    "topk_group", "aux_loss_alpha", "ep_size", "head_dim", "seq_aux",
    "num_experts", "num_local_experts", "output_router_logits", "pad_token_id",
    "router_aux_loss_coef", "router_jitter_noise",
    "pretraining_tp", "rope_local_base_freq", "rope_parameters", "rope_scaling", "rope_theta",
    "sliding_window", "sliding_window_pattern", "tie_word_embeddings", "torch_dtype",
    "transformers_version", "use_cache", "use_sliding_window",
}  # fmt: skip

Values = dict[str, Any]


class Read(NamedTuple):
    """A config.json. whole: all of it; text: the text model's keys; keys: ours."""

    family: Family
    whole: Values
    text: Values
    keys: Values
    unknown: tuple[str, ...]


def read(folder: Folder) -> Read:
    """The model of a folder. Raises ConfigError for one that maxdiloco cannot compute."""
    path = folder / "config.json"
    with refusing(ConfigError, f"{path} cannot be read", "Give the folder of a downloaded model."):
        content = small_files.read_bytes(path)
    try:
        whole = json_text.parse(content)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}. Download it again.") from error
    if not isinstance(whole, dict) or not isinstance(whole.get("model_type"), str):
        raise ConfigError(f"{path} names no model_type. Give the config.json of a model.")
    family = family_of(whole["model_type"])
    text = whole.get(family.inner) if family.inner else whole
    if not isinstance(text, dict):
        raise rules.refused(family.inner, text, "it is a table, the keys of the text model")
    keys = keys_of(text, family)
    known = {rule.key for rule in family.rules} | set(family.must) | NOTED
    return Read(family, whole, text, keys, tuple(sorted(text.keys() - known)))


def untied(model: Read) -> Read:
    """The same model with a head of its own, in its config.json too."""
    changed = {"tie_word_embeddings": False}
    text = model.text | changed
    whole = model.whole | {model.family.inner: text} if model.family.inner else text
    whole |= changed if "tie_word_embeddings" in model.whole else {}
    return model._replace(whole=whole, text=text, keys=keys_of(text, model.family))


def family_of(model_type: str) -> Family:
    """The family of a model type. Raises ConfigError that names the nearest."""
    by_name = {family.model_type: family for family in families()}
    if model_type in by_name:
        return by_name[model_type]
    near = difflib.get_close_matches(model_type, list(by_name), n=1, cutoff=0.5)
    raise ConfigError(
        f"model_type={model_type} of config.json is none that maxdiloco has. "
        f"{f'The nearest is {near[0]}. ' if near else ''}Use one of {', '.join(by_name)}."
    )


def keys_of(
    hf: Mapping[str, Any], family: Family, declared: Mapping[str, Key] | None = None
) -> Values:
    """Our keys of the group model, all but those of training. Raises ConfigError.

    Tables are dicts, without the entries that the family says nothing of. declared: as `misfits`.
    """
    if quantised := hf.get("quantization_config"):
        is_table = isinstance(quantised, dict)
        method = quantised.get("quant_method", "?") if is_table else quantised
        raise ConfigError(
            f"quantization_config of config.json says {method}: quantised weights are not "
            "imported. Save the model with bfloat16 weights (transformers' from_pretrained with "
            "dtype=torch.bfloat16, dequantize(), save_pretrained) and import that."
        )
    layers = hf.get("num_hidden_layers")
    if isinstance(layers, int) and layers > rules.MOST_LAYERS:
        raise rules.refused("num_hidden_layers", layers, f"it is at most {rules.MOST_LAYERS}")
    for key, value in family.must.items():
        if hf.get(key) is not None and hf[key] != value:
            raise rules.refused(key, hf[key], f"{family.model_type} has {key}={value}")
    of_model = _of_model(declared or KEYS)
    keys = {name: key.default for name, key in of_model.items()} | _NEUTRAL
    defaults = _flat(keys, of_model)
    found: Values = {}
    for rule in family.rules:
        read = rule.read(hf | {"model_type": family.model_type})
        for name, value in read.items():
            rules.check_type(rule.key, value, defaults.get(name))
        found |= read
    for name, value in {**found, **family.fixed}.items():
        key, _, entry = name.partition(".")
        keys[key] = dict(keys[key]) | {entry: value} if entry else value
    return keys


def _flat(keys: Values, declared: Mapping[str, Key]) -> Values:
    """Of all keys, with those of tables' entries, as `router.scaling_factor`, beside them."""
    return keys | {
        f"{name}.{entry}": value
        for name, key in declared.items()
        if isinstance(keys[name], dict)
        for entry, value in key.whole(keys[name]).items()
    }


def _of_model(declared: Mapping[str, Key]) -> dict[str, Key]:
    """The keys of the group model, all but those of training."""
    group = declared["model_name"].group
    return {n: k for n, k in declared.items() if k.group == group and n not in OF_TRAINING}


def config_of(keys: Values, family: Family, declared: Mapping[str, Key] | None = None) -> Values:
    """config.json of a config that `misfits` finds nothing in. Arguments: as there."""
    ours = _flat(keys, declared or KEYS)
    if ours["base_moe_mlp_dim"] == -1:
        ours["base_moe_mlp_dim"] = ours["base_mlp_dim"]
    ours["query_pre_attn_scalar"] = ours["query_pre_attn_scalar"] or ours["head_dim"]
    hf = {"architectures": [family.architecture], "model_type": family.model_type}
    hf |= family.must
    for rule in family.rules:
        hf |= rule.write(ours)
    return hf | family.of_exports | {"max_position_embeddings": keys["max_target_length"]}


def misfits(
    config: Values, hf: Values, family: Family, declared: Mapping[str, Key] | None = None
) -> dict[str, tuple[Any, Any]]:
    """{key: (value of the config, value of config.json)} where a model is not the same.

    config: all keys of base.yml. declared: KEYS.
    """
    ours = {name: config[name] for name in _of_model(declared or KEYS)}
    theirs = vars(config_lib.from_dict(keys_of(hf, family, declared)))
    mine, other = _resolved(ours), _resolved(theirs)
    return {name: (ours[name], theirs[name]) for name in ours if not _same(mine[name], other[name])}


def _same(mine: Any, other: Any) -> bool:
    """Whether two values are one in float32, which is what is computed."""
    if isinstance(mine, float) and isinstance(other, float):
        return math.isclose(mine, other, rel_tol=1e-9)
    if isinstance(mine, dict) and isinstance(other, dict) and mine.keys() == other.keys():
        return all(_same(value, other[name]) for name, value in mine.items())
    return mine == other


def _resolved(keys: Values) -> Values:
    """The keys with what their words and their defaults stand for, equal for equal models."""
    kinds = rules.kinds_of_layers(keys)
    # Padding is not computed.
    found = keys | {"attention_pattern": kinds, "padded_vocab_size": "auto"}
    if keys["embedding_scale"] == "auto":
        found["embedding_scale"] = "sqrt_emb_dim" if keys["logits_via_embedding"] else "one"
    if not keys["query_pre_attn_scalar"]:
        found["query_pre_attn_scalar"] = float(keys["head_dim"])
    if not keys["rope_scaling"] and keys["local_rope_max_timescale"] == -1:
        found["local_rope_max_timescale"] = keys["rope_max_timescale"]
    if "local" not in kinds:
        found |= {"sliding_window_size": 0, "local_rope_max_timescale": -1}
    if keys["num_experts"] > 1:
        if keys["base_moe_mlp_dim"] == -1:
            found["base_moe_mlp_dim"] = keys["base_mlp_dim"]
        if not keys["first_num_dense_layers"]:  # no layer is as wide as that
            found["base_mlp_dim"] = found["base_moe_mlp_dim"]
    return found


def family_for(config: Values) -> tuple[Family, Values]:
    """The family that has all options of a config, all keys of base.yml, and its config.json.

    The model has a head of its own, and the scale in the embedding, where no family has a tied one
    whose embedding is scaled. Raises ConfigError that names what none has.
    """
    declared, nearest = KEYS, []
    untied = config | {"logits_via_embedding": False, "embedding_scale": "one"}
    for keys in (config, untied) if config["logits_via_embedding"] else (config,):
        for family in families():
            hf = config_of(keys, family, declared)
            found = misfits(keys, hf, family, declared)
            if not found:
                return family, hf
            nearest.append((family, found))
    family, found = min(nearest, key=lambda near: len(near[1]))
    raise ConfigError(
        f"no model type of Hugging Face has all options of this model. The nearest, "
        f"{family.model_type}: {differing(found)}. Only a model trained with those can be exported."
    )


def differing(found: Mapping[str, tuple[Any, Any]]) -> str:
    """The findings of `misfits`, for a message."""
    pairs = [f"{name}={show(ours)} is not {show(theirs)}" for name, (ours, theirs) in found.items()]
    return ", ".join(pairs)
