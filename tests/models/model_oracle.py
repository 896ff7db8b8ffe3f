"""The decoder and its loss in float64 NumPy, written from the papers, sharing no code with the
package: one sequence and one head at a time, whole logits, masks as matrices.

    # L tokens  D model  N query heads  K key/value heads  H head dim  V vocabulary
"""

import numpy as np


def rms_norm(x, p, cfg):
    """arXiv 1910.07467, eq. 4. Gemma's scale is 1 + p."""
    root = np.sqrt((x**2).mean(-1, keepdims=True) + cfg.normalization_layer_epsilon)
    return x / root * (cfg.norm_scale_offset + p["scale"].reshape(-1))


def frequency(pair, H, cfg, local):
    """Radians that a pair of a head turns by from one token to the next."""
    if local and cfg.local_rope_max_timescale > 0:
        return cfg.local_rope_max_timescale ** (-2 * pair / H)
    base, scaling = cfg.rope_max_timescale, dict(cfg.rope_scaling)
    kind, stretch = scaling.get("rope_type"), scaling.get("factor")
    kept = base ** (-2 * pair / H)
    length = scaling.get("original_max_position_embeddings", 0)
    turns = length * kept / (2 * np.pi)
    if kind == "linear":
        return kept / stretch
    if kind == "llama3":  # arXiv 2407.21783: kept above 4, divided below 1, mixed between
        if turns > 4:
            return kept
        if turns < 1:
            return kept / stretch
        mix = (turns - 1) / (4 - 1)
        return mix * kept + (1 - mix) * kept / stretch
    if kind == "yarn":  # arXiv 2309.00071; its authors' program mixes by the pair
        borders = [
            H / 2 * np.log(length / (2 * np.pi * b)) / np.log(base)
            for b in (scaling.get("beta_fast", 32.0), scaling.get("beta_slow", 1.0))
        ]
        if scaling.get("truncate", True):
            borders = [np.floor(borders[0]), np.ceil(borders[1])]
        low, high = max(borders[0], 0), min(borders[1], H - 1)
        divided = min(max((pair - low) / (high - low), 0), 1)
        return divided * kept / stretch + (1 - divided) * kept
    return kept


def rope(x_LH, cfg, local):
    """arXiv 2104.09864, eq. 34, with numbers i and i + H/2 as one complex number."""
    L, H = x_LH.shape
    half = H // 2
    angles = np.outer(np.arange(L), [frequency(i, H, cfg, local) for i in range(half)])
    rotated = (x_LH[:, :half] + 1j * x_LH[:, half:]) * np.exp(1j * angles)
    scaling = dict(cfg.rope_scaling)
    if scaling.get("rope_type") == "yarn" and not (local and cfg.local_rope_max_timescale > 0):
        rotated *= scaling.get("attention_factor") or 0.1 * np.log(scaling["factor"]) + 1
    return np.concatenate([rotated.real, rotated.imag], axis=1)


def capped(x, cap):
    return cap * np.tanh(x / cap) if cap else x


def activation(name, x):
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu":  # tanh form, arXiv 1606.08415
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    if name == "quick_gelu":  # arXiv 1606.08415, section 2
        return x / (1 + np.exp(-1.702 * x))
    return {"relu": np.maximum(x, 0), "linear": x, "plus_one": x + 1}[name]


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def visible(segments_L, window):
    """[L, L]: row t may look at column s."""
    distance = np.subtract.outer(np.arange(len(segments_L)), np.arange(len(segments_L)))
    near = (distance >= 0) & (distance < (window or np.inf))
    return near & np.equal.outer(segments_L, segments_L)


def head_attention(q_LH, k_LH, v_LH, see_LL, cfg, sink):
    """A sink takes its part of the softmax and gives nothing (gpt-oss)."""
    scalar = cfg.query_pre_attn_scalar
    scale = np.sqrt(q_LH.shape[1] if scalar == "auto" else scalar)
    logits = np.where(see_LL, capped(q_LH @ k_LH.T / scale, cfg.attn_logits_soft_cap), -np.inf)
    if sink is None:
        return softmax(logits) @ v_LH
    with_sink = np.concatenate([logits, np.full((len(logits), 1), sink)], axis=1)
    return softmax(with_sink)[:, :-1] @ v_LH


def projected(x_LD, p, name, cfg):
    """Queries, keys or values, a list of heads, before the rotation."""
    heads = [x_LD @ p[name][:, n] for n in range(p[name].shape[1])]
    if cfg.attention_bias != "none":
        heads = [head + p[f"{name}_bias"][n] for n, head in enumerate(heads)]
    if name == "value" or cfg.use_qk_norm == "false":
        return heads
    if cfg.use_qk_norm == "projection":  # OLMo 2, arXiv 2501.00656, section 3.1
        return np.split(rms_norm(np.hstack(heads), p[f"{name}_norm"], cfg), len(heads), axis=1)
    return [rms_norm(head, p[f"{name}_norm"], cfg) for head in heads]


def latent_attention(x_LD, p, cfg, see_LL):
    """DeepSeek-V2, arXiv 2405.04434, section 2.1.2 and 2.1.3."""
    sizes = dict(cfg.latent_attention)
    is_low, rank = "q_lora_rank" in sizes, sizes["kv_lora_rank"]
    low_q = rms_norm(x_LD @ p["query_down"], p["query_norm"], cfg) if is_low else x_LD
    query = p["query_up"] if is_low else p["query"]
    down = x_LD @ p["kv_down"]
    low = rms_norm(down[:, :rank], p["kv_norm"], cfg)
    shared = rope(down[:, rank:], cfg, False)
    P, out = sizes["qk_nope_head_dim"], 0
    for n in range(cfg.base_num_query_heads):
        q, kv = low_q @ query[:, n], low @ p["kv_up"][:, n]
        q = np.hstack([q[:, :P], rope(q[:, P:], cfg, False)])
        k = np.hstack([kv[:, :P], shared])
        out = out + head_attention(q, k, kv[:, P:], see_LL, cfg, None) @ p["out"][n]
    return out


def attention(x_LD, p, cfg, see_LL, local):
    if cfg.latent_attention:
        return latent_attention(x_LD, p, cfg, see_LL)
    share = cfg.base_num_query_heads // cfg.base_num_kv_heads
    q, k, v = (projected(x_LD, p, name, cfg) for name in ("query", "key", "value"))
    out = p["out_bias"] if cfg.attention_bias == "all" else 0
    for n in range(cfg.base_num_query_heads):
        q_LH, k_LH = rope(q[n], cfg, local), rope(k[n // share], cfg, local)
        sink = p["sinks"][n] if cfg.attention_sink else None
        out = out + head_attention(q_LH, k_LH, v[n // share], see_LL, cfg, sink) @ p["out"][n]
    return out


def mlp(x_LD, p, cfg):
    names, limit = cfg.mlp_activations, cfg.mlp_activations_limit
    bound = np.inf if limit == -1 else limit
    bias = lambda name: p[f"{name}_bias"] if cfg.mlp_bias else 0  # noqa: E731
    hidden = activation(names[-1], np.clip(x_LD @ p["w_up"] + bias("w_up"), -bound, bound))
    if len(names) == 2:
        gate = np.minimum(x_LD @ p["w_gate"] + bias("w_gate"), bound)
        hidden = activation(names[0], gate) * hidden
    return hidden @ p["w_out"] + bias("w_out")


def layer_of(layers, i):
    return {k: layer_of(v, i) if isinstance(v, dict) else v[i] for k, v in layers.items()}


def layer(x_LD, p, cfg, see_LL, local=False):
    """Attention and MLP, each added to the residual stream, with norms before, after or both."""
    blocks = {
        "attention": lambda y: attention(y, p["attention"], cfg, see_LL, local),
        "mlp": lambda y: mlp(y, p["mlp"], cfg),
    }
    for name, block in blocks.items():
        y_LD = x_LD
        if cfg.norm_placement in ("pre", "sandwich"):
            y_LD = rms_norm(y_LD, p[f"{name}_norm"], cfg)
        y_LD = block(y_LD)
        if cfg.norm_placement in ("sandwich", "post"):
            y_LD = rms_norm(y_LD, p[f"post_{name}_norm"], cfg)
        x_LD = x_LD + y_LD
    return x_LD


def sequence_logits(p, tokens_L, segments_L, cfg):
    """Logits [L, V] of one sequence."""
    x = p["embedding"][tokens_L]
    scaled = cfg.logits_via_embedding if cfg.embedding_scale == "auto" else cfg.embedding_scale
    if scaled not in (False, "one"):
        x = x * np.sqrt(cfg.base_emb_dim)
    pattern = cfg.attention_pattern or ("local",)
    for i in range(cfg.base_num_decoder_layers):
        local = pattern[i % len(pattern)] == "local"
        see = visible(segments_L, cfg.sliding_window_size if local else 0)
        x = layer(x, layer_of(p["layers"], i), cfg, see, local)
    x = rms_norm(x, p["final_norm"], cfg)
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
