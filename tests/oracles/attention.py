"""Softmax attention and MLA in NumPy float64, written to be obviously right.

Every function handles ONE sequence and returns `(out, lse)`; a ragged batch is a
loop over its sequences. Inputs of any float dtype are widened to float64.

Query token `t` stands at absolute position `i = context_len + t`, key row `j` at
position `j`. Only rows that a query sees are read, so rows that nobody sees may hold
NaN.

Legend:
    T, J     query tokens, key rows (`J == context_len + T` in a complete sequence)
    H, G     query heads, key/value heads; query head `h` reads head `h // (H // G)`
    D, E     width of a key, width of a value
    N, R, C  MLA: key part without position, shared rope key, latent
    V        MLA: width of a value head
    s, p     scaled scores, softmax weights
    m, z     running maximum, running sum of `exp(s - m)`
"""

import numpy as np


def dense_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    context_len: int,
    softmax_scale: float,
    window: int | None,
    sinks: np.ndarray | None,
    soft_cap: float | None,
    causal: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Attends one sequence, one query token and one head at a time.

    Args:
        q: Queries, `[T, H, D]`.
        k: Keys, `[J, G, D]`.
        v: Values, `[J, G, E]`.
        context_len: Tokens that stand before the first query token.
        softmax_scale: Factor of `q . k`.
        window: A query at `i` sees `i - window < j <= i`; `None` sees the whole past.
        sinks: `[H]` logits that join the softmax denominator only, neither scaled nor
            capped; `None` for no sinks.
        soft_cap: `c` in `c * tanh(s / c)`, applied to scaled scores; `None` for none.
        causal: Whether a query at `i` sees `j <= i` only. A window needs it.

    Returns:
        `out [T, H, E]` and `lse [T, H]`, natural log, sinks included. A row that sees
        no key is zero, and its lse is the log of an empty sum: the sink, or `-inf`
        without sinks.

    Raises:
        ValueError: On a window without `causal`.

    Source: Vaswani et al., Attention Is All You Need, arXiv:1706.03762. Sinks and
        window bounds: openai/gpt-oss, gpt_oss/torch/model.py, `sdpa`. Soft cap:
        Gemma 2, arXiv:2408.00118, section 2.
    """
    if window is not None and not causal:
        raise ValueError(f"{window=} needs causal=True")
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    num_tokens, num_q_heads, _ = q.shape
    num_rows, num_kv_heads, value_width = v.shape
    out = np.zeros((num_tokens, num_q_heads, value_width))
    lse = np.full((num_tokens, num_q_heads), -np.inf)
    for t in range(num_tokens):
        i = context_len + t
        visible = [
            j
            for j in range(num_rows)
            if (not causal or j <= i) and (window is None or j > i - window)
        ]
        for h in range(num_q_heads):
            g = h // (num_q_heads // num_kv_heads)
            s = softmax_scale * (k[visible, g] @ q[t, h])
            if soft_cap is not None:
                s = soft_cap * np.tanh(s / soft_cap)
            logits = s if sinks is None else np.append(s, np.float64(sinks[h]))
            if logits.size == 0:
                continue
            lse[t, h] = logits.max() + np.log(np.exp(logits - logits.max()).sum())
            out[t, h] = np.exp(s - lse[t, h]) @ v[visible, g]
    return out, lse


def online_softmax_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    context_len: int,
    softmax_scale: float,
    window: int | None,
    sinks: np.ndarray | None,
    soft_cap: float | None,
    causal: bool,
    block_kv: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The same attention as `dense_attention`, one block of keys at a time.

    Keeps `m`, `z` and an unnormalised output, rescaled whenever `m` grows. A sink is
    where `m` and `z` start. The visible keys are found as an interval here, where
    `dense_attention` tests each key.

    Args:
        q: Queries, `[T, H, D]`.
        k: Keys, `[J, G, D]`.
        v: Values, `[J, G, E]`.
        context_len: As in `dense_attention`.
        softmax_scale: As in `dense_attention`.
        window: As in `dense_attention`.
        sinks: As in `dense_attention`.
        soft_cap: As in `dense_attention`.
        causal: As in `dense_attention`.
        block_kv: Keys per block; need not divide `J`.

    Returns:
        As `dense_attention`.

    Raises:
        ValueError: On a window without `causal`.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax,
        arXiv:1805.02867; Dao et al., FlashAttention, arXiv:2205.14135, algorithm 1.
    """
    if window is not None and not causal:
        raise ValueError(f"{window=} needs causal=True")
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    num_tokens, num_q_heads, _ = q.shape
    num_rows, num_kv_heads, value_width = v.shape
    group_size = num_q_heads // num_kv_heads
    out = np.zeros((num_tokens, num_q_heads, value_width))
    lse = np.full((num_tokens, num_q_heads), -np.inf)
    for t in range(num_tokens):
        end = min(num_rows, context_len + t + 1) if causal else num_rows
        begin = 0 if window is None else max(0, context_len + t + 1 - window)
        if sinks is None:
            m = np.full(num_q_heads, -np.inf)
            z = np.zeros(num_q_heads)
        else:
            m = np.array(sinks, np.float64)
            z = np.ones(num_q_heads)
        weighted = np.zeros((num_q_heads, value_width))
        for start in range(begin, end, block_kv):
            rows = slice(start, min(start + block_kv, end))
            k_block = np.repeat(k[rows], group_size, axis=1)
            v_block = np.repeat(v[rows], group_size, axis=1)
            s = softmax_scale * np.einsum("hd,jhd->hj", q[t], k_block)
            if soft_cap is not None:
                s = soft_cap * np.tanh(s / soft_cap)
            m_new = np.maximum(m, s.max(axis=1))
            rescale = np.exp(m - m_new)
            p = np.exp(s - m_new[:, None])
            z = z * rescale + p.sum(axis=1)
            weighted = weighted * rescale[:, None] + np.einsum("hj,jhe->he", p, v_block)
            m = m_new
        some = z > 0
        out[t, some] = weighted[some] / z[some, None]
        lse[t, some] = m[some] + np.log(z[some])
    return out, lse


def attention_at_once(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    context_len: int,
    softmax_scale: float,
    window: int | None,
    sinks: np.ndarray | None,
    soft_cap: float | None,
    causal: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """The same attention as `dense_attention`, all tokens of a head at once.

    For long rows of many heads, which the other takes seconds for.

    Args:
        q: Queries, `[T, H, D]`.
        k: Keys, `[J, G, D]`.
        v: Values, `[J, G, E]`.
        context_len: As in `dense_attention`.
        softmax_scale: As in `dense_attention`.
        window: As in `dense_attention`.
        sinks: As in `dense_attention`.
        soft_cap: As in `dense_attention`.
        causal: As in `dense_attention`.

    Returns:
        As `dense_attention`.

    Raises:
        ValueError: On a window without `causal`.
    """
    if window is not None and not causal:
        raise ValueError(f"{window=} needs causal=True")
    num_tokens, num_q_heads, _ = q.shape
    num_rows, num_kv_heads, value_width = v.shape
    group_size = num_q_heads // num_kv_heads
    is_seen = _seen(num_tokens, num_rows, context_len, window, causal=causal)
    q, keys, values = (np.moveaxis(np.asarray(x, np.float64), 1, 0) for x in (q, k, v))
    values = np.where(is_seen.any(axis=0)[:, None], values, 0.0)
    out = np.zeros((num_tokens, num_q_heads, value_width))
    lse = np.full((num_tokens, num_q_heads), -np.inf)
    for h in range(num_q_heads):
        key, value = keys[h // group_size], values[h // group_size]
        s = _logits(q[h], key, is_seen, softmax_scale, soft_cap)
        sink = -np.inf if sinks is None else float(sinks[h])
        m = s.max(axis=1, initial=sink, keepdims=True)
        m = np.where(np.isneginf(m), 0.0, m)
        p = np.exp(s - m)
        z = p.sum(axis=1, keepdims=True) + np.exp(sink - m)
        some = z[:, 0] > 0
        out[some, h] = (p / np.where(z > 0, z, 1.0))[some] @ value
        lse[some, h] = (m + np.log(np.where(z > 0, z, 1.0)))[some, 0]
    return out, lse


def lse_sizes(
    q: np.ndarray,
    k: np.ndarray,
    *,
    context_len: int,
    softmax_scale: float,
    window: int | None,
    sinks: np.ndarray | None,
    soft_cap: float | None,
) -> np.ndarray:
    """Sizes of the numbers that a causal log-sum-exp is the sum of.

    In floating point `lse = m + log(z)`, and that may cancel in two places:

    * `m` may be as far below 0 as `log(z)` is above. Both are rounded before they are
      added, by `eps |m|` and `eps log(z)`: `z = 1 + rest`, where the 1 of the largest
      logit is exact, so the error of `rest` is one of `eps (z - 1) / z <= eps log(z)`;
    * a logit is itself a sum, of the products of a query and a key. Adding `D` of them
      one by one rounds as many partial sums, which wander as far as
      `sqrt(sum (q_d k_d)^2)` whatever they end at. A soft cap only makes this smaller.
      As `d lse = sum_j p_j d s_j`, those of all keys count by their weights.

    The largest of the three is the size; with one key it is that of the products.

    Args:
        q: As in `dense_attention`.
        k: As in `dense_attention`.
        context_len: As in `dense_attention`.
        softmax_scale: As in `dense_attention`.
        window: As in `dense_attention`.
        sinks: As in `dense_attention`.
        soft_cap: As in `dense_attention`.

    Returns:
        `[T, H]`, 0 for a token that sees no key and no sink.
    """
    (num_tokens, num_q_heads, _), (num_rows, num_kv_heads, _) = q.shape, k.shape
    group_size = num_q_heads // num_kv_heads
    is_seen = _seen(num_tokens, num_rows, context_len, window, causal=True)
    q, keys = (np.moveaxis(np.asarray(x, np.float64), 1, 0) for x in (q, k))
    sizes = np.zeros((num_tokens, num_q_heads))
    for h in range(num_q_heads):
        key = keys[h // group_size]
        s = _logits(q[h], key, is_seen, softmax_scale, soft_cap)
        products = np.where(is_seen, np.sqrt(q[h] ** 2 @ (key**2).T), 0.0)
        sink = -np.inf if sinks is None else float(sinks[h])
        m = s.max(axis=1, initial=sink)
        some = np.isfinite(m)
        s, m = s[some], m[some]
        z = np.exp(s - m[:, None]).sum(axis=1) + np.exp(sink - m)
        p = np.exp(s - m[:, None]) / z[:, None]
        of_logits = softmax_scale * (p * products[some]).sum(axis=1)
        sizes[some, h] = np.maximum(np.maximum(np.abs(m), np.log(z)), of_logits)
    return sizes


def _seen(num_tokens, num_rows, context_len, window, *, causal) -> np.ndarray:
    """Which rows each token sees, `[T, J]`."""
    positions = context_len + np.arange(num_tokens)[:, None]
    rows = np.arange(num_rows)[None]
    is_seen = (rows <= positions) | (not causal)
    return is_seen if window is None else is_seen & (rows > positions - window)


def _logits(q, k, is_seen, softmax_scale, soft_cap) -> np.ndarray:
    """Logits of a head, `[T, J]`, `-inf` where a row is not seen."""
    s = softmax_scale * (q @ k.T)
    if soft_cap is not None:
        s = soft_cap * np.tanh(s / soft_cap)
    return np.where(is_seen, s, -np.inf)


def mla_latent_attention(
    q: np.ndarray,
    rows: np.ndarray,
    *,
    latent_dim: int,
    context_len: int,
    softmax_scale: float,
    causal: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Attends over cached MLA rows: what an absorbed kernel computes.

    Each row is key and value at once, shared by all heads: `C + R` elements as the
    key, the first `C` of them as the value.

    Args:
        q: Absorbed queries, `[T, H, C + R]`.
        rows: Cached rows, `[J, C + R]`, latent part first.
        latent_dim: `C`.
        context_len: As in `dense_attention`.
        softmax_scale: As in `dense_attention`; `1 / sqrt(N + R)` in the models, not
            `1 / sqrt(C + R)`.
        causal: As in `dense_attention`.

    Returns:
        `out [T, H, C]` and `lse [T, H]` as in `dense_attention`.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix C.
    """
    q, rows = (np.asarray(x, np.float64) for x in (q, rows))
    num_tokens, num_heads, _ = q.shape
    out = np.zeros((num_tokens, num_heads, latent_dim))
    lse = np.full((num_tokens, num_heads), -np.inf)
    for t in range(num_tokens):
        seen = rows[: max(context_len + t + 1, 0)] if causal else rows
        if len(seen) == 0:
            continue
        s = softmax_scale * (q[t] @ seen.T)
        m = s.max(axis=1, keepdims=True)
        z = np.exp(s - m).sum(axis=1, keepdims=True)
        out[t] = (np.exp(s - m) / z) @ seen[:, :latent_dim]
        lse[t] = (m + np.log(z))[:, 0]
    return out, lse


def mla_absorbed(
    q_nope: np.ndarray,
    q_rope: np.ndarray,
    latent: np.ndarray,
    k_rope: np.ndarray,
    w_kc: np.ndarray,
    w_vc: np.ndarray,
    *,
    context_len: int,
    softmax_scale: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Causal MLA on latents: the key matrix moves into q, the value matrix after.

    Args:
        q_nope: Queries without position, `[T, H, N]`.
        q_rope: Rope part of the queries, already rotated if at all, `[T, H, R]`.
        latent: Normalised compressed K/V, `[J, C]`.
        k_rope: Shared rope key, `[J, R]`.
        w_kc: Key expansion, `[H, N, C]`.
        w_vc: Value expansion, `[H, V, C]`.
        context_len: As in `dense_attention`.
        softmax_scale: As in `dense_attention`.

    Returns:
        `out [T, H, V]` and `lse [T, H]`.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix C.
    """
    q_nope, q_rope, latent, k_rope, w_kc, w_vc = (
        np.asarray(x, np.float64) for x in (q_nope, q_rope, latent, k_rope, w_kc, w_vc)
    )
    q_latent = np.einsum("thn,hnc->thc", q_nope, w_kc)
    out, lse = mla_latent_attention(
        np.concatenate([q_latent, q_rope], axis=-1),
        np.concatenate([latent, k_rope], axis=-1),
        latent_dim=latent.shape[-1],
        context_len=context_len,
        softmax_scale=softmax_scale,
        causal=True,
    )
    return np.einsum("thc,hvc->thv", out, w_vc), lse


def mla_expanded(
    q_nope: np.ndarray,
    q_rope: np.ndarray,
    latent: np.ndarray,
    k_rope: np.ndarray,
    w_kc: np.ndarray,
    w_vc: np.ndarray,
    *,
    context_len: int,
    softmax_scale: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Causal MLA as ordinary attention with one expanded K and V head per query head.

    Args:
        q_nope: As in `mla_absorbed`.
        q_rope: As in `mla_absorbed`.
        latent: As in `mla_absorbed`.
        k_rope: As in `mla_absorbed`.
        w_kc: As in `mla_absorbed`.
        w_vc: As in `mla_absorbed`.
        context_len: As in `dense_attention`.
        softmax_scale: As in `dense_attention`.

    Returns:
        `out [T, H, V]` and `lse [T, H]`.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix C.
    """
    q_nope, q_rope, latent, k_rope, w_kc, w_vc = (
        np.asarray(x, np.float64) for x in (q_nope, q_rope, latent, k_rope, w_kc, w_vc)
    )
    return dense_attention(
        np.concatenate([q_nope, q_rope], axis=-1),
        mla_keys(latent, k_rope, w_kc),
        np.einsum("jc,hvc->jhv", latent, w_vc),
        context_len=context_len,
        softmax_scale=softmax_scale,
        window=None,
        sinks=None,
        soft_cap=None,
        causal=True,
    )


def mla_keys(latent: np.ndarray, k_rope: np.ndarray, w_kc: np.ndarray) -> np.ndarray:
    """Keys of every head, as `mla_expanded` attends to them.

    Args:
        latent: As in `mla_absorbed`.
        k_rope: As in `mla_absorbed`.
        w_kc: As in `mla_absorbed`.

    Returns:
        `[J, H, N + R]`.
    """
    latent, k_rope, w_kc = (np.asarray(x, np.float64) for x in (latent, k_rope, w_kc))
    k_nope = np.einsum("jc,hnc->jhn", latent, w_kc, optimize=True)
    k_rope_per_head = np.repeat(k_rope[:, None, :], len(w_kc), axis=1)
    return np.concatenate([k_nope, k_rope_per_head], axis=-1)
