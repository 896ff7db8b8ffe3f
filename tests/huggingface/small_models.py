"""Folders in Hugging Face's layout, written without its packages: llama and its like."""

import json

import numpy as np
from safetensors.numpy import load_file, save_file

from maxdiloco import hf

SIZES = {
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "vocab_size": 31,
    "rms_norm_eps": 1e-6,
}


def config(**changes):
    """Of a llama. A value of None is null, as transformers writes what is not set."""
    return {"model_type": "llama", **SIZES, "rope_theta": 500000.0} | changes


def shapes():
    """{name: shape} of the tensors."""
    found = {
        "model.embed_tokens.weight": (31, 8),
        "model.norm.weight": (8,),
        "lm_head.weight": (31, 8),
    }
    in_layer = {
        "input_layernorm": (8,),
        "post_attention_layernorm": (8,),
        "self_attn.q_proj": (12, 8),
        "self_attn.k_proj": (6, 8),
        "self_attn.v_proj": (6, 8),
        "self_attn.o_proj": (8, 12),
        "mlp.gate_proj": (12, 8),
        "mlp.up_proj": (12, 8),
        "mlp.down_proj": (8, 12),
    }
    for layer in range(3):
        found |= {f"model.layers.{layer}.{name}.weight": in_layer[name] for name in in_layer}
    return found


def weights(dtype=np.float32):
    """{name: values}, every value another one: a layer or a transposed matrix cannot be mixed up.

    bfloat16 holds 256 numbers between powers of two, so values repeat there, but no two rows.
    """
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes().items()}


def save(folder, values, shards=1, **changes):
    """Write a model's folder, in several files when asked."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(**changes)))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    names = list(values)
    if shards == 1:
        save_file(values, folder / "model.safetensors")
        return folder
    files = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: values[n] for n in names if files[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def done(*arguments):
    """Import or export."""
    assert hf.main([str(argument) for argument in arguments]) == 0


def there_and_back(source, place, *options):
    """Import a folder with the options to `ours` of a place, and export that to `theirs`."""
    done("import", source, place / "ours", *options)
    done("export", place / "ours", place / "theirs")


def assert_weights(folder, expected):
    """The tensors of a folder's files are the expected ones, bit for bit."""
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    found = {name: value for file in files for name, value in file.items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert found[name].tobytes() == value.tobytes(), name
