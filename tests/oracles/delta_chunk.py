"""What a chunk of KDA is without the state before it, in NumPy float64.

With the state `S [K, V]` before the chunk, as a chunk kernel and a scan split the work:

    v' = u - w S,   o = (q 2^G) S + P v',   S <- 2^G_end S + (k 2^(G_end - G))^T v'
"""

import numpy as np


def kda_chunk(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    log2_decay: np.ndarray,
    beta: np.ndarray,
    *,
    scale: float,
) -> dict[str, np.ndarray]:
    """The arrays of one head and chunk, of any number of tokens T.

    Args:
        q: normalised, `[T, K]`.
        k: normalised, `[T, K]`.
        v: `[T, V]`.
        log2_decay: at most 0, `[T, K]`.
        beta: `[T]`.
        scale: multiplies q.

    Returns:
        `w`, `q` and `k` (decayed) `[T, K]`, `u [T, V]`, `decay [K]` and `P [T, T]`.

    Source: Kimi Linear, arXiv:2510.26692, section 3.
    """
    total = np.cumsum(log2_decay, axis=0)
    lower = np.tril(np.ones((len(q), len(q))))
    between = np.exp2(np.minimum(total[:, None] - total[None], 0.0)) * lower[..., None]
    A = beta[:, None] * np.einsum("ik,jk,ijk->ij", k, k, between)
    np.fill_diagonal(A, 1.0)
    return {
        "w": np.linalg.solve(A, beta[:, None] * k * np.exp2(total)),
        "u": np.linalg.solve(A, beta[:, None] * v),
        "q": scale * q * np.exp2(total),
        "k": k * np.exp2(total[-1] - total),
        "decay": np.exp2(total[-1]),
        "P": scale * np.einsum("ik,jk,ijk->ij", q, k, between),
    }
