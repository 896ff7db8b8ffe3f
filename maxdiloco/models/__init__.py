"""The language model: a decoder-only transformer as Flax NNX modules.

A reading order:

1. `decoder.py`: one layer, and the decoder from tokens to the residual stream.
2. `attention.py` with `rope.py`; `latent_attention.py` is DeepSeek's form of attention.
3. `mlp.py`; `moe.py` and `router.py` are the mixture of experts.
4. `linear.py`, `norms.py` and `embedding.py`: the small modules, and the initial values.
5. `loss.py`: cross-entropy and z-loss, and their gradient.
6. `model.py`: the decoder as pure functions of a nested dict, which other packages call.
7. `sampling.py`: generation with a key/value cache.

`config.py` has the sizes and choices that modules read, and `build.py` makes a model from a run's
keys. `layer_scan.py` applies stacked layers, and `remat.py` selects the values that they keep for
the backward pass. `params.py` names parameters outside of modules. `devices.py` places tokens on
devices. `kernels/` has everything that depends on a backend.
"""
