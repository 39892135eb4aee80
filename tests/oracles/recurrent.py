"""KDA, GDN and Mamba2 recurrences in NumPy float64, each in two forms.

Every function handles ONE sequence; a ragged batch is a loop over its sequences, with
one state each. Inputs of any float dtype are widened to float64. Nothing is hidden:
queries and keys arrive normalised (`l2_normalize`), gates as `log_decay` (natural log,
at most 0) and `beta` (after its sigmoid), and `scale` multiplies the query.

Legend:
    T     tokens
    H     value heads; decays, beta and states are per value head
    I     query/key heads; value head `h` uses head `h // (H // I)`
    K, V  key width, value width of a head
    S     state, `[V, K]` per head (V-first: names end in `_vk`)
    G     cumulative log decay within a chunk, its own token included
    c     tokens of one chunk
    P, N  Mamba2: width of a head, width of its state
    B, C  Mamba2: input and output vectors, shared by the heads of one group
"""

import numpy as np


def l2_normalize(x: np.ndarray, *, eps: float) -> np.ndarray:
    """Divides the last axis by `sqrt(sum(x^2) + eps)`; eps stands inside the root.

    Args:
        x: Any array.
        eps: Added to the sum of squares; 1e-6 in the models.

    Returns:
        The normalised array.

    Source: fla-org/flash-linear-attention, fla/modules/l2norm.py.
    """
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + eps)


def kda_log_decay(
    gate_logits: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray
) -> np.ndarray:
    """Standard KDA gate, `-exp(a_log) * softplus(gate_logits + dt_bias)`.

    Args:
        gate_logits: `[T, H, K]`.
        a_log: `[H]`.
        dt_bias: `[H, K]`.

    Returns:
        `log_decay [T, H, K]`.

    Source: fla-org/flash-linear-attention, fla/ops/kda/gate.py, `naive_kda_gate`.
    """
    gate_logits, a_log, dt_bias = (
        np.asarray(x, np.float64) for x in (gate_logits, a_log, dt_bias)
    )
    return -np.exp(a_log)[:, None] * _softplus(gate_logits + dt_bias)


def kda_log_decay_bounded(
    gate_logits: np.ndarray,
    a_log: np.ndarray,
    dt_bias: np.ndarray,
    *,
    lower_bound: float,
) -> np.ndarray:
    """Bounded KDA gate, `lower_bound * sigmoid(exp(a_log) * (logits + dt_bias))`.

    Args:
        gate_logits: `[T, H, K]`.
        a_log: `[H]`.
        dt_bias: `[H, K]`.
        lower_bound: Smallest log decay, below 0.

    Returns:
        `log_decay [T, H, K]`, between `lower_bound` and 0.

    Source: fla-org/flash-linear-attention, fla/ops/kda/gate.py,
        `naive_kda_lowerbound_gate`.
    """
    gate_logits, a_log, dt_bias = (
        np.asarray(x, np.float64) for x in (gate_logits, a_log, dt_bias)
    )
    z = np.exp(a_log)[:, None] * (gate_logits + dt_bias)
    return lower_bound * np.exp(-_softplus(-z))


def gdn_log_decay(
    gate_logits: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray
) -> np.ndarray:
    """GDN gate, `-exp(a_log) * softplus(gate_logits + dt_bias)`, one per head.

    Args:
        gate_logits: `[T, H]`.
        a_log: `[H]`.
        dt_bias: `[H]`.

    Returns:
        `log_decay [T, H]`.

    Source: Gated Delta Networks, arXiv:2412.06464; huggingface/transformers,
        src/transformers/models/qwen3_next/modeling_qwen3_next.py.
    """
    gate_logits, a_log, dt_bias = (
        np.asarray(x, np.float64) for x in (gate_logits, a_log, dt_bias)
    )
    return -np.exp(a_log) * _softplus(gate_logits + dt_bias)


def kda_recurrent(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    log_decay: np.ndarray,
    beta: np.ndarray,
    state_vk: np.ndarray,
    *,
    scale: float,
) -> tuple[np.ndarray, np.ndarray]:
    """KDA as a loop over time.

    Per head:

        S <- S * exp(log_decay)[None, :]
        S <- S + outer(beta * (v - S k), k)
        o  = S (scale * q)

    Args:
        q: Normalised queries, `[T, I, K]`.
        k: Normalised keys, `[T, I, K]`.
        v: Values, `[T, H, V]`; `H` is a multiple of `I`.
        log_decay: Per key channel, `[T, H, K]`.
        beta: Writing strength, `[T, H]`.
        state_vk: State before the first token, `[H, V, K]`; not changed.
        scale: Factor of q.

    Returns:
        `out [T, H, V]` and the state after the last token, `[H, V, K]`.

    Source: Kimi Linear, arXiv:2510.26692; fla-org/flash-linear-attention,
        fla/ops/kda/naive.py, `naive_recurrent_kda` (K-first there).
    """
    q, k, v, log_decay, beta = (
        np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta)
    )
    heads_per_key = v.shape[1] // k.shape[1]
    state = np.array(state_vk, np.float64)
    out = np.zeros(v.shape)
    for t in range(v.shape[0]):
        for h in range(v.shape[1]):
            q_t, k_t = q[t, h // heads_per_key], k[t, h // heads_per_key]
            s = state[h] * np.exp(log_decay[t, h])[None, :]
            s = s + np.outer(beta[t, h] * (v[t, h] - s @ k_t), k_t)
            out[t, h] = s @ (scale * q_t)
            state[h] = s
    return out, state


def kda_chunked(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    log_decay: np.ndarray,
    beta: np.ndarray,
    state_vk: np.ndarray,
    *,
    scale: float,
    chunk_size: int,
) -> tuple[np.ndarray, np.ndarray]:
    """KDA by chunks in the WY form.

    Per head and chunk, with `S` the state at its start:

        A[i, j] = beta_i * sum_d k_i k_j exp(G_i - G_j)       for i > j
        u, w    = (I + A)^-1 (beta * v),  (I + A)^-1 (beta * k * exp(G))
        v'      = u - w S^T
        o       = scale * ((q * exp(G)) S^T + tril(q k^T exp(G_i - G_j)) v')
        S      <- S * exp(G_last)[None, :] + v'^T (k * exp(G_last - G))

    Differences of `G` are taken before `exp`, and only for `i >= j`, so strong decays
    underflow to 0 and nothing overflows.

    Args:
        q: As in `kda_recurrent`.
        k: As in `kda_recurrent`.
        v: As in `kda_recurrent`.
        log_decay: As in `kda_recurrent`.
        beta: As in `kda_recurrent`.
        state_vk: As in `kda_recurrent`.
        scale: As in `kda_recurrent`.
        chunk_size: Tokens per chunk; need not divide `T`.

    Returns:
        As `kda_recurrent`.

    Source: Kimi Linear, arXiv:2510.26692; fla-org/flash-linear-attention,
        fla/ops/kda/naive.py, `naive_chunk_kda`.
    """
    q, k, v, log_decay, beta = (
        np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta)
    )
    q = scale * np.repeat(q, v.shape[1] // q.shape[1], axis=1)
    k = np.repeat(k, v.shape[1] // k.shape[1], axis=1)
    state = np.array(state_vk, np.float64)
    out = np.zeros(v.shape)
    for start in range(0, v.shape[0], chunk_size):
        chunk = slice(start, min(start + chunk_size, v.shape[0]))
        for h in range(v.shape[1]):
            q_c, k_c, v_c = q[chunk, h], k[chunk, h], v[chunk, h]
            beta_c = beta[chunk, h][:, None]
            cum = np.cumsum(log_decay[chunk, h], axis=0)
            earlier = np.tril(np.ones((len(cum), len(cum)), bool))
            gap = np.where(earlier[:, :, None], cum[:, None] - cum[None, :], -np.inf)
            decay = np.exp(gap)
            k_k = beta_c * np.einsum("ik,jk,ijk->ij", k_c, k_c, decay)
            q_k = np.einsum("ik,jk,ijk->ij", q_c, k_c, decay)
            system = np.eye(len(cum)) + np.tril(k_k, -1)
            u = np.linalg.solve(system, beta_c * v_c)
            w = np.linalg.solve(system, beta_c * k_c * np.exp(cum))
            v_new = u - w @ state[h].T
            out[chunk, h] = (q_c * np.exp(cum)) @ state[h].T + q_k @ v_new
            k_to_end = k_c * np.exp(cum[-1] - cum)
            state[h] = state[h] * np.exp(cum[-1])[None, :] + v_new.T @ k_to_end
    return out, state


def gdn_recurrent(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    log_decay: np.ndarray,
    beta: np.ndarray,
    state_vk: np.ndarray,
    *,
    scale: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Gated delta rule as a loop over time: one decay per head, shared q/k heads.

    Args:
        q: Normalised queries, `[T, I, K]`.
        k: Normalised keys, `[T, I, K]`.
        v: Values, `[T, H, V]`; `H` is a multiple of `I`.
        log_decay: Per value head, `[T, H]`.
        beta: Writing strength, `[T, H]`.
        state_vk: State before the first token, `[H, V, K]`; not changed.
        scale: Factor of q.

    Returns:
        `out [T, H, V]` and the state after the last token, `[H, V, K]`.

    Source: Gated Delta Networks, arXiv:2412.06464;
        huggingface/transformers,
        src/transformers/models/qwen3_next/modeling_qwen3_next.py,
        `torch_recurrent_gated_delta_rule` (K-first there).
    """
    q, k, v, log_decay, beta = (
        np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta)
    )
    heads_per_key = v.shape[1] // k.shape[1]
    state = np.array(state_vk, np.float64)
    out = np.zeros(v.shape)
    for t in range(v.shape[0]):
        for h in range(v.shape[1]):
            q_t, k_t = q[t, h // heads_per_key], k[t, h // heads_per_key]
            s = state[h] * np.exp(log_decay[t, h])
            s = s + np.outer(beta[t, h] * (v[t, h] - s @ k_t), k_t)
            out[t, h] = s @ (scale * q_t)
            state[h] = s
    return out, state


def gdn_chunked(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    log_decay: np.ndarray,
    beta: np.ndarray,
    state_vk: np.ndarray,
    *,
    scale: float,
    chunk_size: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Gated delta rule by chunks: decays are a `[c, c]` mask on plain products.

    Forward substitution finds the written values row by row:

        v'_i = beta_i * (v_i - exp(G_i) S k_i
                         - sum_{j<i} (k_i . k_j) exp(G_i - G_j) v'_j)

    Args:
        q: As in `gdn_recurrent`.
        k: As in `gdn_recurrent`.
        v: As in `gdn_recurrent`.
        log_decay: As in `gdn_recurrent`.
        beta: As in `gdn_recurrent`.
        state_vk: As in `gdn_recurrent`.
        scale: As in `gdn_recurrent`.
        chunk_size: Tokens per chunk; need not divide `T`.

    Returns:
        As `gdn_recurrent`.

    Source: Gated Delta Networks, arXiv:2412.06464, the chunkwise form.
    """
    q, k, v, log_decay, beta = (
        np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta)
    )
    q = scale * np.repeat(q, v.shape[1] // q.shape[1], axis=1)
    k = np.repeat(k, v.shape[1] // k.shape[1], axis=1)
    state = np.array(state_vk, np.float64)
    out = np.zeros(v.shape)
    for start in range(0, v.shape[0], chunk_size):
        chunk = slice(start, min(start + chunk_size, v.shape[0]))
        for h in range(v.shape[1]):
            q_c, k_c, v_c, beta_c = (
                q[chunk, h],
                k[chunk, h],
                v[chunk, h],
                beta[chunk, h],
            )
            cum = np.cumsum(log_decay[chunk, h])
            earlier = np.tril(np.ones((len(cum), len(cum)), bool))
            decay = np.exp(np.where(earlier, cum[:, None] - cum[None, :], -np.inf))
            k_k, q_k = (k_c @ k_c.T) * decay, (q_c @ k_c.T) * decay
            v_new = np.zeros(v_c.shape)
            for i in range(len(cum)):
                read = np.exp(cum[i]) * (state[h] @ k_c[i]) + k_k[i, :i] @ v_new[:i]
                v_new[i] = beta_c[i] * (v_c[i] - read)
            out[chunk, h] = np.exp(cum)[:, None] * (q_c @ state[h].T) + q_k @ v_new
            k_to_end = k_c * np.exp(cum[-1] - cum)[:, None]
            state[h] = state[h] * np.exp(cum[-1]) + v_new.T @ k_to_end
    return out, state


def mamba2_recurrent(
    x: np.ndarray,
    dt_logits: np.ndarray,
    a_log: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    d_skip: np.ndarray,
    dt_bias: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Mamba2 selective state update as a loop over time.

    Per head:

        dt = softplus(dt_logits + dt_bias)
        S <- S * exp(-exp(a_log) * dt) + dt * outer(x, B)
        y  = S C + d_skip * x

    Args:
        x: Inputs, `[T, H, P]`.
        dt_logits: Time steps before bias and softplus, `[T, H]`; not clamped.
        a_log: Per head, `[H]`.
        b: `[T, groups, N]`; head `h` uses group `h // (H // groups)`.
        c: `[T, groups, N]`.
        d_skip: Weight of the direct path, `[H]`.
        dt_bias: `[H]`.
        state: State before the first token, `[H, P, N]`; not changed.

    Returns:
        `y [T, H, P]` and the state after the last token, `[H, P, N]`.

    Source: Dao and Gu, Transformers are SSMs, arXiv:2405.21060; state-spaces/mamba,
        mamba_ssm/ops/triton/selective_state_update.py, `selective_state_update_ref`.
    """
    x, dt_logits, a_log, b, c, d_skip, dt_bias = (
        np.asarray(z, np.float64) for z in (x, dt_logits, a_log, b, c, d_skip, dt_bias)
    )
    state = np.array(state, np.float64)
    heads_per_group = x.shape[1] // b.shape[1]
    y = np.zeros(x.shape)
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            b_t, c_t = b[t, h // heads_per_group], c[t, h // heads_per_group]
            dt = _softplus(dt_logits[t, h] + dt_bias[h])
            decay = np.exp(-np.exp(a_log[h]) * dt)
            state[h] = state[h] * decay + dt * np.outer(x[t, h], b_t)
            y[t, h] = state[h] @ c_t + d_skip[h] * x[t, h]
    return y, state


def mamba2_dual(
    x: np.ndarray,
    dt_logits: np.ndarray,
    a_log: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    d_skip: np.ndarray,
    dt_bias: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The same as `mamba2_recurrent` in its attention-like form, all tokens at once.

        y_i = exp(G_i) S C_i + d_skip * x_i
              + sum_{j<=i} (C_i . B_j) exp(G_i - G_j) dt_j x_j

    Args:
        x: As in `mamba2_recurrent`.
        dt_logits: As in `mamba2_recurrent`.
        a_log: As in `mamba2_recurrent`.
        b: As in `mamba2_recurrent`.
        c: As in `mamba2_recurrent`.
        d_skip: As in `mamba2_recurrent`.
        dt_bias: As in `mamba2_recurrent`.
        state: As in `mamba2_recurrent`.

    Returns:
        As `mamba2_recurrent`.

    Source: Dao and Gu, Transformers are SSMs, arXiv:2405.21060, section 6.
    """
    x, dt_logits, a_log, b, c, d_skip, dt_bias = (
        np.asarray(z, np.float64) for z in (x, dt_logits, a_log, b, c, d_skip, dt_bias)
    )
    state = np.asarray(state, np.float64)
    num_heads = x.shape[1]
    b = np.repeat(b, num_heads // b.shape[1], axis=1)
    c = np.repeat(c, num_heads // c.shape[1], axis=1)
    dt = _softplus(dt_logits + dt_bias)
    cum = np.cumsum(-np.exp(a_log) * dt, axis=0)
    earlier = np.tril(np.ones((len(cum), len(cum)), bool))
    gap = cum[:, None, :] - cum[None, :, :]
    decay = np.exp(np.where(earlier[:, :, None], gap, -np.inf))
    dt_x = dt[:, :, None] * x
    y = (
        np.einsum("ih,hpn,ihn->ihp", np.exp(cum), state, c)
        + np.einsum("ihn,jhn,ijh,jhp->ihp", c, b, decay, dt_x)
        + d_skip[:, None] * x
    )
    if len(cum) == 0:
        return y, state.copy()
    to_end = np.exp(cum[-1] - cum)
    state = np.exp(cum[-1])[:, None, None] * state + np.einsum(
        "jh,jhp,jhn->hpn", to_end, dt_x, b
    )
    return y, state


def _softplus(x: np.ndarray) -> np.ndarray:
    """`log(1 + exp(x))` without a threshold and without overflow."""
    return np.logaddexp(0.0, x)
