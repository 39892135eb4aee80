"""What the kernels share: sums without keys, tails, accumulators."""

import math
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode.config import ACC, TILE

LOG2E = math.log2(math.e)


def inverse_sum(total):
    """``1 / total``, and 0 for a query that has seen no key."""
    return jnp.where(total == 0.0, 0.0, 1.0 / total)


def log_sum_exp(maximum, total, softmax_scale: float):
    """Natural log-sum-exp, ``-inf`` for a query that has seen no key."""
    return jnp.where(total == 0.0, -jnp.inf, maximum * softmax_scale + jnp.log(total))


def clear_tail(tile_smem, valid, width: int):
    """Zero the rows of a tile from ``valid`` on, in its first ``width`` elements.

    They may hold NaN, which a weight of zero does not remove.
    """
    for start in range(0, width, 64):
        columns_smem = tile_smem.at[:, pl.ds(start, 64)]
        values = plgpu.load(columns_smem, layout=plgpu.Layout.WGMMA)
        token = plgpu.broadcasted_iota(
            jnp.int32, (TILE, 64), 0, layout=plgpu.Layout.WGMMA
        )
        columns_smem[...] = jnp.where(token < valid, values, jnp.zeros_like(values))


def accumulate(multiply, accs, *, interpret):
    """Run ``multiply(acc_refs)``, whose wgmma add to ``accs``; return the sums."""
    if not interpret:
        return pl.run_state(multiply)(tuple(ACC.init(acc) for acc in accs))

    # The simulator has no `run_state`: sum the products apart, and add them.
    def multiply_apart(*acc_refs):
        multiply(acc_refs)
        return tuple(acc_ref[...] for acc_ref in acc_refs)

    refs = [ACC(acc.shape, jnp.float32) for acc in accs]
    products = pl.run_scoped(multiply_apart, *refs)
    return tuple(acc + product for acc, product in zip(accs, products, strict=True))


def add_products(acc, values_smem, products, finish, *, interpret):
    """Return ``acc`` plus the products ``weights @ values_smem.at[index]``.

    The weights are in registers. ``finish`` runs once all products are issued; it may
    wait for them in turn.
    """
    if interpret:  # the simulator takes no left operand from registers
        for weights, index in products:
            values = values_smem.at[index][...].astype(jnp.float32)
            weights = weights.astype(jnp.float32)
            acc = acc + jnp.dot(weights, values, precision="highest")
        finish()
        return acc

    def multiply(acc_refs):
        for weights, index in products:
            plgpu.wgmma(acc_refs[0], weights, values_smem.at[index])
        finish()

    added: Any = pl.run_state(multiply)((ACC.init(acc),))
    return added[0]
