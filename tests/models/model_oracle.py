"""The decoder and its loss in float64 NumPy, written from the papers, sharing no code with the
package: one sequence and one head at a time, whole logits, masks as matrices.

    # L tokens  D model  N query heads  K key/value heads  H head dim  V vocabulary
"""

import numpy as np


def rms_norm(x, scale, epsilon):
    """arXiv 1910.07467, eq. 4."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def rope(x_LH, max_timescale):
    """arXiv 2104.09864, eq. 34, with numbers i and i + H/2 as one complex number."""
    L, H = x_LH.shape
    half = H // 2
    angles = np.arange(L)[:, None] / max_timescale ** (2 * np.arange(half) / H)
    rotated = (x_LH[:, :half] + 1j * x_LH[:, half:]) * np.exp(1j * angles)
    return np.concatenate([rotated.real, rotated.imag], axis=1)


def capped(x, cap):
    return cap * np.tanh(x / cap) if cap else x


def activation(name, x):
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu":  # tanh form, arXiv 1606.08415
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return {"relu": np.maximum(x, 0), "linear": x}[name]


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def visible(segments_L, window):
    """[L, L]: row t may look at column s."""
    L = len(segments_L)
    return np.array(
        [
            [
                s <= t and segments_L[t] == segments_L[s] and (not window or t - s < window)
                for s in range(L)
            ]
            for t in range(L)
        ]
    )


def head_attention(q_LH, k_LH, v_LH, see_LL, cap):
    logits = capped(q_LH @ k_LH.T / np.sqrt(q_LH.shape[1]), cap)
    return softmax(np.where(see_LL, logits, -np.inf)) @ v_LH


def attention(x_LD, p, cfg, see_LL):
    heads, share = [], cfg.base_num_query_heads // cfg.base_num_kv_heads
    for n in range(cfg.base_num_query_heads):
        q = x_LD @ p["query"][:, n]
        k, v = x_LD @ p["key"][:, n // share], x_LD @ p["value"][:, n // share]
        if cfg.use_qk_norm:
            q = rms_norm(q, p["query_norm"]["scale"], cfg.normalization_layer_epsilon)
            k = rms_norm(k, p["key_norm"]["scale"], cfg.normalization_layer_epsilon)
        q, k = rope(q, cfg.rope_max_timescale), rope(k, cfg.rope_max_timescale)
        context = head_attention(q, k, v, see_LL, cfg.attn_logits_soft_cap)
        heads.append(context @ p["out"][n])
    return sum(heads)


def mlp(x_LD, p, cfg):
    names = cfg.mlp_activations
    hidden = activation(names[-1], x_LD @ p["w_up"])
    if len(names) == 2:
        hidden = activation(names[0], x_LD @ p["w_gate"]) * hidden
    return hidden @ p["w_out"]


def layer_of(layers, i):
    return {k: layer_of(v, i) if isinstance(v, dict) else v[i] for k, v in layers.items()}


def layer(x_LD, p, cfg, see_LL):
    """Pre-norm: attention and MLP, each added to the residual stream."""
    epsilon = cfg.normalization_layer_epsilon
    y = rms_norm(x_LD, p["attention_norm"]["scale"], epsilon)
    x_LD = x_LD + attention(y, p["attention"], cfg, see_LL)
    return x_LD + mlp(rms_norm(x_LD, p["mlp_norm"]["scale"], epsilon), p["mlp"], cfg)


def sequence_logits(p, tokens_L, segments_L, cfg):
    """Logits [L, V] of one sequence."""
    x = p["embedding"][tokens_L]
    if cfg.logits_via_embedding:
        x = x * np.sqrt(cfg.base_emb_dim)
    see = visible(segments_L, cfg.sliding_window_size)
    for i in range(cfg.base_num_decoder_layers):
        x = layer(x, layer_of(p["layers"], i), cfg, see)
    x = rms_norm(x, p["final_norm"]["scale"], cfg.normalization_layer_epsilon)
    head = p["embedding"].T if cfg.logits_via_embedding else p["head"]
    return capped(x @ head, cfg.final_logits_soft_cap)


def loss(p, tokens_BL, segments_BL, cfg):
    """{"cross_entropy", "z_loss", "tokens"}: sums over the targets that count."""
    cross = z = 0.0
    count = 0
    for tokens, segments in zip(tokens_BL, segments_BL, strict=True):
        logits = sequence_logits(p, tokens, segments, cfg)
        for t in range(len(tokens) - 1):
            if segments[t] == segments[t + 1] != 0:
                log_normaliser = np.log(np.exp(logits[t]).sum())
                cross += log_normaliser - logits[t, tokens[t + 1]]
                z += cfg.z_loss_multiplier * log_normaliser**2
                count += 1
    return {"cross_entropy": cross, "z_loss": z, "tokens": count}


def float64(tree):
    return {
        k: float64(v) if isinstance(v, dict) else np.asarray(v, np.float64) for k, v in tree.items()
    }
