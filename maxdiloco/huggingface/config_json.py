"""Convert a config.json to the keys of the group model, and back.

transformers' config classes supply defaults and read old spellings of config.json.
"""

import difflib
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from maxdiloco import json_text, small_files
from maxdiloco.config import config as config_lib
from maxdiloco.config.keys import KEYS, Key
from maxdiloco.config.values import show
from maxdiloco.data import packages
from maxdiloco.errors import ConfigError
from maxdiloco.huggingface import fields
from maxdiloco.huggingface.families import FAMILIES
from maxdiloco.huggingface.fields import FIELDS, Field
from maxdiloco.huggingface.folders import Folder
from maxdiloco.huggingface.tensors import Family
from maxdiloco.storage.os_errors import replace_os_error

FILE = "config.json"
# Limit of num_hidden_layers: 80 times the deepest published model, Llama 3 405B with 126 layers
# (arXiv 2407.21783, Table 3). transformers makes a list of layers before it checks anything.
MAX_LAYERS = 10_000
# Keys of the group model that concern training only, not the computation of the model.
OF_TRAINING = ("model_name", "override_model_config", "z_loss_multiplier")
# Values of keys that config.json does not decide. All other such keys have the default of base.yml.
_NEUTRAL = {"embedding_scale": "one", "use_qk_norm": "false"}
# Keys of published files that no config class has and that do not change the computation, and keys
# in the spelling of transformers 4.
_HARMLESS = {
    "_name_or_path", "attn_implementation", "auto_map", "aux_loss_alpha", "cache_implementation",
    "ep_size", "initial_context_length", "max_window_layers", "moe_intermediate_size",
    "num_experts", "rope_local_base_freq", "rope_scaling", "rope_theta", "seq_aux",
    "sliding_window", "sliding_window_pattern", "torch_dtype",
}  # fmt: skip
# Keys that config classes read but no language model needs: labels, and torch's dtype.
_NOT_READ = {"model_type", "id2label", "label2id", "num_labels", "dtype", "torch_dtype"}

Values = dict[str, Any]


class HfConfig(NamedTuple):
    """The content of a config.json.

    Attributes:
      family: the model type.
      whole: the entries of the file.
      text: the entries for the text model, which are `whole` or a part of it.
      keys: our keys of the group model with their values.
      unknown: keys of `text` that have no effect here.
    """

    family: Family
    whole: Values
    text: Values
    keys: Values
    unknown: tuple[str, ...]


def read(folder: Folder) -> HfConfig:
    """Read the config.json of a folder.

    Raises:
      ConfigError: the file cannot be read, or maxdiloco cannot compute the model. The message names
        the file, and the key if one is wrong.
    """
    path = folder / FILE
    with replace_os_error(
        ConfigError, f"{path} cannot be read", "Give the folder of a downloaded model."
    ):
        content = small_files.read_bytes(path)
    try:
        whole = json_text.parse(content)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}. Download it again.") from error
    if not isinstance(whole, dict) or not isinstance(whole.get("model_type"), str):
        raise ConfigError(f"{path} names no model_type. Give the config.json of a model.")
    try:
        family = family_of(whole["model_type"])
        text = whole.get(family.inner) if family.inner else whole
        if not isinstance(text, dict):
            raise ConfigError(f"{family.inner}={text}: expected the entries of the text model.")
        keys = keys_of(text, family)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    known = _class_keys(family) | {field.theirs for field in FIELDS} | set(family.must) | _HARMLESS
    return HfConfig(family, whole, text, keys, tuple(sorted(text.keys() - known)))


def with_untied_head(model: HfConfig) -> HfConfig:
    """Return the model with a head that is not tied to the embedding, also in its config.json."""
    changed = {"tie_word_embeddings": False}
    text = model.text | changed
    whole = model.whole | {model.family.inner: text} if model.family.inner else text
    whole |= changed if "tie_word_embeddings" in model.whole else {}
    return model._replace(whole=whole, text=text, keys=keys_of(text, model.family))


def family_of(model_type: str) -> Family:
    """Return the family of a model type. Raises ConfigError, which suggests the nearest type."""
    by_name = {family.model_type: family for family in FAMILIES}
    if model_type in by_name:
        return by_name[model_type]
    near = difflib.get_close_matches(model_type, list(by_name), n=1, cutoff=0.5)
    raise ConfigError(
        f"model_type={model_type} is not supported. "
        f"{f'The nearest is {near[0]}. ' if near else ''}Use one of {', '.join(by_name)}."
    )


def with_transformers_defaults(hf: Mapping[str, Any], family: Family) -> Values:
    """Return a complete config: the entries of config.json with the defaults of transformers.

    Args:
      hf: entries of config.json for the text model.
      family: the family of its model type.

    Raises:
      ConfigError: transformers refuses an entry, or is not installed.
    """
    transformers = packages.require("transformers", "A model of Hugging Face", extra="hf")
    errors = packages.require("huggingface_hub.errors", "A model of Hugging Face", extra="hf")
    transformers.utils.logging.set_verbosity_error()
    entries = {name: value for name, value in hf.items() if name not in _NOT_READ}
    try:
        found = transformers.AutoConfig.for_model(family.text_type, **entries).to_dict()
    except (errors.StrictDataclassError, ArithmeticError, AttributeError, LookupError, TypeError,
            ValueError) as error:  # fmt: skip
        message = " ".join(str(error).split()).rstrip(".")
        quoted = (name for name in entries if re.search(rf"['`]{re.escape(name)}['`]", message))
        where = next((f"{name}={entries[name]}: " for name in quoted), "")
        raise ConfigError(
            f"{where}transformers refuses it ({message}). Download it again, or use another model."
        ) from error
    if not family.latent and not found.get("head_dim"):
        found["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
    return found


def _class_keys(family: Family) -> frozenset[str]:
    """Return head_dim and the keys that transformers' config class of a model type has."""
    return frozenset(with_transformers_defaults({}, family))


def _rows(family: Family, known: frozenset[str]) -> list[Field]:
    """Return the fields that apply to a model type. known: the keys of its config class."""
    used = known.difference(family.unused)
    return [*(field for field in FIELDS if field.theirs in used), *family.fields]


def keys_of(hf: Mapping[str, Any], family: Family) -> Values:
    """Return our keys of the group model for a config.json, except OF_TRAINING.

    Args:
      hf: entries of config.json for the text model.
      family: the family of its model type.

    Returns:
      {key: value}. A table is a dict with the entries that config.json decides.

    Raises:
      ConfigError: maxdiloco cannot compute the model.
    """
    if quantised := hf.get("quantization_config"):
        is_table = isinstance(quantised, dict)
        method = quantised.get("quant_method", "?") if is_table else quantised
        raise ConfigError(
            f"quantization_config has {method}: quantised weights are not imported. Save the model "
            "with bfloat16 weights (transformers' from_pretrained with dtype=torch.bfloat16, "
            "dequantize(), save_pretrained) and import that."
        )
    layers = hf.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise ConfigError(f"num_hidden_layers={layers}: expected at most {MAX_LAYERS}.")
    config = with_transformers_defaults(hf, family)
    for key, value in family.must.items():
        if config.get(key) is not None and config[key] != value:
            raise ConfigError(f"{key}={config[key]}: expected {value} for {family.model_type}.")
    known = _class_keys(family)
    config = {name: config[name] for name in known}  # models do not read other keys
    keys = {name: key.default for name, key in _of_model().items()} | _NEUTRAL
    found = {field.ours: fields.read_field(field, config) for field in _rows(family, known)}
    found |= fields.read_rope(config, local=family.local_rope, latent=family.latent)
    found |= fields.read_layers(config)
    for name, value in {**found, **family.fixed}.items():
        key, _, entry = name.partition(".")
        keys[key] = dict(keys[key]) | {entry: value} if entry else value
    return keys


def with_hf_key(message: str) -> str:
    """Replace our key, at the start of a message `key=...`, by its name in config.json."""
    names = {field.ours: field.theirs for field in FIELDS}
    names |= {"rope_max_timescale": "rope_theta", "sliding_window_size": "sliding_window"}
    theirs = names.get(message.partition("=")[0])
    return f"{theirs}: {message}" if theirs else message


def _flat(keys: Values) -> Values:
    """Return the keys and, as further keys such as `router.scaling_factor`, entries of tables."""
    return keys | {
        f"{name}.{entry.name}": table.get(entry.name, entry.example)
        for name, table in keys.items()
        if isinstance(table, dict)
        for entry in KEYS[name].entries.values()
    }


def _of_model() -> dict[str, Key]:
    """Return the keys of the group model, except OF_TRAINING."""
    group = KEYS["model_name"].group
    return {n: k for n, k in KEYS.items() if k.group == group and n not in OF_TRAINING}


def config_of(keys: Values, family: Family) -> Values:
    """Return the config.json of a model.

    Args:
      keys: all keys of base.yml.
      family: the family of the model type. Check the result by `differences`, since the family may
        lack an option of the model.
    """
    ours = _flat(keys)
    if ours["base_moe_mlp_dim"] == -1:
        ours["base_moe_mlp_dim"] = ours["base_mlp_dim"]
    if ours["query_pre_attn_scalar"] == "auto":
        ours["query_pre_attn_scalar"] = ours["head_dim"]
    known = _class_keys(family)
    hf = {"architectures": [family.architecture], "model_type": family.model_type}
    hf |= family.must
    hf |= {field.theirs: field.write(ours[field.ours]) for field in _rows(family, known)}
    hf |= fields.write_layers(ours, known)
    hf |= fields.write_rope(ours, local=family.local_rope, latent=family.latent)
    return hf | family.of_exports | {"max_position_embeddings": keys["max_target_length"]}


def differences(config: Values, hf: Values, family: Family) -> dict[str, tuple[Any, Any]]:
    """Return {key: (value of the config, value of config.json)} of the keys that differ.

    Args:
      config: all keys of base.yml.
      hf: entries of config.json for the text model.
      family: the family of its model type.

    Raises:
      ConfigError: maxdiloco cannot compute the model of config.json.
    """
    ours = {name: config[name] for name in _of_model()}
    theirs = vars(config_lib.from_dict(keys_of(hf, family)))
    mine, other = _resolved(ours), _resolved(theirs)
    return {name: (ours[name], theirs[name]) for name in ours if not _same(mine[name], other[name])}


def _same(mine: Any, other: Any) -> bool:
    """Return True if two values are equal in float32, since models compute in float32."""
    if isinstance(mine, float) and isinstance(other, float):
        return math.isclose(mine, other, rel_tol=1e-9)
    if isinstance(mine, dict) and isinstance(other, dict) and mine.keys() == other.keys():
        return all(_same(value, other[name]) for name, value in mine.items())
    return mine == other


def _resolved(keys: Values) -> Values:
    """Replace words and defaults of keys by values, so that equal models have equal keys."""
    kinds = fields.kinds_of_layers(keys)
    # Padding of the vocabulary does not change the computation.
    found = keys | {"attention_pattern": kinds, "padded_vocab_size": "auto"}
    if keys["embedding_scale"] == "auto":
        found["embedding_scale"] = "sqrt_emb_dim" if keys["logits_via_embedding"] else "one"
    if keys["query_pre_attn_scalar"] == "auto":
        found["query_pre_attn_scalar"] = float(keys["head_dim"])
    if not keys["rope_scaling"] and keys["local_rope_max_timescale"] == -1:
        found["local_rope_max_timescale"] = keys["rope_max_timescale"]
    if "local" not in kinds:
        found |= {"sliding_window_size": 0, "local_rope_max_timescale": -1}
    if keys["num_experts"] > 1:
        if keys["base_moe_mlp_dim"] == -1:
            found["base_moe_mlp_dim"] = keys["base_mlp_dim"]
        if not keys["first_num_dense_layers"]:  # then no layer has this width
            found["base_mlp_dim"] = found["base_moe_mlp_dim"]
    return found


def family_for(config: Values) -> tuple[Family, Values]:
    """Return the first family that has all options of a model, and the model's config.json.

    A model may have both a tied head and a scaled embedding. If no family has both, the exported
    model has a separate head, and the export scales the embedding.

    Args:
      config: all keys of base.yml.

    Raises:
      ConfigError: no family has all options. The message lists the options that the nearest family
        lacks.
    """
    nearest = []
    untied = config | {"logits_via_embedding": False, "embedding_scale": "one"}
    for keys in (config, untied) if config["logits_via_embedding"] else (config,):
        for family in FAMILIES:
            hf = config_of(keys, family)
            try:
                found = differences(keys, hf, family)
            except ConfigError as error:  # transformers has a limit that maxdiloco does not have
                refusal = error
                continue
            if not found:
                return family, hf
            nearest.append((family, found))
    if not nearest:
        raise refusal
    family, found = min(nearest, key=lambda near: len(near[1]))
    raise ConfigError(
        f"no model type of Hugging Face has all options of this model. The nearest, "
        f"{family.model_type}: {format_differences(found)}. Only a model trained with "
        f"those can be exported."
    )


def format_differences(found: Mapping[str, tuple[Any, Any]]) -> str:
    """Return the result of `differences` as text."""
    pairs = [f"{name}={show(ours)} is not {show(theirs)}" for name, (ours, theirs) in found.items()]
    return ", ".join(pairs)
