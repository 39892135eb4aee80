"""Waiting for the parts of a row, for a bounded time.

The CTAs of a row sum it together once all its parts are stored. Nothing says that they
are on the card at the same time: another grid may hold some multiprocessors until this
one ends. So none waits for ever. A word of each row counts, in its low half, the parts
that are stored and, in its high half, the warpgroups that have left without summing
their share:

    stored, then all parts are seen, nobody left    sum the own share
    stored, then all parts are seen, some left      sum the whole row
    stored, not all parts seen in time              leave

Leaving adds to the word and reads it in one step. Whoever finds all parts counted in
that moment stays; if not, the parts that are missing are counted later, and those who
count them find that somebody left. The last one to count sees all parts at once, so the
row is summed by somebody. Two may sum the same share: both write the same bits.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

OWN, ALL, NOTHING = 0, 1, 2
"""What a warpgroup has to sum."""

PATIENCE = 4096
"""Reads of the word before a warpgroup leaves, 0.7 us each: a few milliseconds."""

_WAIT = """{
.reg .pred on;
.reg .b32 word, stored, reads, answer;
mov.u32 answer, 0;
mov.u32 word, %tid.x;
and.b32 word, word, 127;
setp.ne.u32 on, word, 0;
@on bra DONE;
mov.u32 reads, $3;
READ:
ld.relaxed.gpu.global.u32 word, [$1];
and.b32 stored, word, 0xffff;
setp.ge.u32 on, stored, $2;
@on bra SEEN;
setp.ne.u32 on, reads, 0;
sub.u32 reads, reads, 1;
@on bra READ;
atom.relaxed.gpu.global.add.u32 word, [$1], 0x10000;
and.b32 stored, word, 0xffff;
setp.ge.u32 on, stored, $2;
@on bra SEEN;
mov.u32 answer, 2;
bra DONE;
SEEN:
fence.acquire.gpu;
setp.ge.u32 on, word, 0x10000;
selp.u32 answer, 1, 0, on;
DONE:
mov.u32 $0, answer;
}"""

# The answer of one thread to all of the warpgroup, which also waits for it.
_SHARE = """{
.reg .pred mine, any;
.reg .b32 answer;
setp.eq.u32 mine, $1, 1;
barrier.cta.red.or.pred any, $2, 128, mine;
selp.u32 answer, 1, 0, any;
setp.eq.u32 mine, $1, 2;
barrier.cta.red.or.pred any, $2, 128, mine;
selp.u32 $0, 2, answer, any;
}"""


def wait_for_parts(word_ref, parts):
    """Wait until so many parts are stored, or leave; return what there is to sum."""
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    def wait(_ctx, word, parts):
        i32 = ir.IntegerType.get_signless(32)
        answer = utils.inline_ptx(
            _WAIT,
            utils.memref_ptr(word),
            parts.registers.item(),
            utils.c(PATIENCE, i32),
            result_types=i32,
            has_side_effects=True,
        )
        answer = utils.inline_ptx(
            _SHARE,
            answer,
            utils.warpgroup_barrier_idx(sync=False),
            result_types=i32,
            has_side_effects=True,
            convergent=True,
        )
        return mgpu.FragmentedArray.splat(answer, (), is_signed=True)

    arg_types = plgpu.RefType(), plgpu.Layout.WG_SPLAT
    inline: Any = plgpu.inline_mgpu(arg_types=arg_types, return_type=result)
    return inline(wait)(word_ref, parts)
