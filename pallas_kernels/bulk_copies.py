"""Copies of runs of memory by Hopper's copy engine, as device functions in Gluon.

One thread asks for a run of any length; it comes to shared memory without passing the
registers or the queue of a warp's loads. A barrier in shared memory counts the bytes of
a phase, and all threads wait for it:

    expect(barrier, num_bytes, is_wanted)
    copy(tiles, first, COUNT, from_ptr, barrier, is_wanted)   once or more
    wait(barrier, phase)

What is copied is there for loads and for products alike after the wait. Before memory
is copied to again, all threads must have passed a `gl.thread_barrier` behind their last
use of it: the compiler does not know of these copies, and adds none.

Gluon has no number for where an array lies. So all arrays here are views, made by
`_reinterpret`, of the program's largest one: that comes first in its shared memory.
"""

import typing

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _by_one_thread(statements: str) -> gl.constexpr:
    """Assembly of what one thread does if the first operand is not 0.

    It is one of the first warp, elected in a way that the assembler makes no branch of.
    Shared memory begins at `%bulk_at`.
    """
    return gl.constexpr(f"""{{
    .reg .pred %bulk_if, %bulk_one;
    .reg .b32 %bulk_at, %bulk_to;
    mov.u32 %bulk_at, %tid.x;
    setp.lt.u32 %bulk_if, %bulk_at, 32;
    setp.ne.u32 %bulk_one, $1, 0;
    and.pred %bulk_if, %bulk_if, %bulk_one;
    elect.sync _|%bulk_one, -1;
    and.pred %bulk_if, %bulk_if, %bulk_one;
    mov.u32 %bulk_at, global_smem;
    {statements}
    mov.u32 $0, 0;
    }}""")


_START = _by_one_thread("""
    add.u32 %bulk_at, %bulk_at, $2;
    @%bulk_if mbarrier.init.shared::cta.b64 [%bulk_at], 1;
    fence.mbarrier_init.release.cluster;
""")
_EXPECT = _by_one_thread("""
    add.u32 %bulk_at, %bulk_at, $2;
    @%bulk_if mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bulk_at], $3;
""")
_COPY = _by_one_thread("""
    add.u32 %bulk_to, %bulk_at, $2;
    add.u32 %bulk_at, %bulk_at, $5;
    @%bulk_if cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [%bulk_to], [$3], $4, [%bulk_at];
""")
_PREFETCH = _by_one_thread("@%bulk_if cp.async.bulk.prefetch.L2.global [$2], $3;")
_WAIT = gl.constexpr(
    """{
    .reg .pred %bulk_if;
    .reg .b32 %bulk_at;
    mov.u32 %bulk_at, global_smem;
    add.u32 %bulk_at, %bulk_at, $1;
    bulk_wait:
    mbarrier.try_wait.parity.shared::cta.b64 %bulk_if, [%bulk_at], $2;
    @!%bulk_if bra bulk_wait;
    mov.u32 $0, 0;
    }"""
)


@gluon.jit
@typing.no_type_check
def _run(ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, operands):
    gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, operands, dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
@typing.no_type_check
def start_barriers(first, COUNT: gl.constexpr):
    """Makes barriers of `COUNT` words of 8 bytes, and waits until all threads see them.

    Args:
        first: index of the first word from the beginning of shared memory.
        COUNT: how many.
    """
    for n in gl.static_range(COUNT):
        _run(_START, "=r,r,r", [1, 8 * (first + n)])
    gl.thread_barrier()


@gluon.jit
@typing.no_type_check
def expect(barrier, num_bytes, is_wanted):
    """Says how many bytes the barrier's phase has, before they are copied.

    Args:
        barrier: index of its word.
        num_bytes: of all copies.
        is_wanted: whether there is such a phase.
    """
    _run(_EXPECT, "=r,r,r,r", [is_wanted.to(gl.int32), 8 * barrier, num_bytes])


@gluon.jit
@typing.no_type_check
def copy(array, first, COUNT: gl.constexpr, from_ptr, barrier, is_wanted):
    """Starts a copy to `array[first : first + COUNT]`.

    The bytes stay in their order: in global memory they lie as the layout of `array`
    wants them.

    Args:
        array: view from the beginning of shared memory.
        first: index along its first axis.
        COUNT: how many.
        from_ptr: first element, a multiple of 16 bytes.
        barrier: index of the barrier's word.
        is_wanted: whether to copy.
    """
    ONE: gl.constexpr = array.numel // array.shape[0]
    BYTES: gl.constexpr = ONE * array.dtype.primitive_bitwidth // 8
    from_ptr = from_ptr.to(gl.uint64, bitcast=True)
    is_wanted = is_wanted.to(gl.int32)
    operands = (is_wanted, first * BYTES, from_ptr, COUNT * BYTES, 8 * barrier)
    _run(_COPY, "=r,r,r,l,r,r", operands)


@gluon.jit
@typing.no_type_check
def prefetch(from_ptr, num_bytes, is_wanted):
    """Asks for a run of memory in L2.

    Args:
        from_ptr: first element, a multiple of 16 bytes.
        num_bytes: a multiple of 16.
        is_wanted: whether to ask.
    """
    from_ptr = from_ptr.to(gl.uint64, bitcast=True)
    _run(_PREFETCH, "=r,r,l,r", [is_wanted.to(gl.int32), from_ptr, num_bytes])


@gluon.jit
@typing.no_type_check
def wait(barrier, phase):
    """Waits until all bytes of a phase have come.

    Args:
        barrier: index of its word.
        phase: 0 for the first, 1 for the next, and so on in turn.
    """
    _run(_WAIT, "=r,r,r", [8 * barrier, phase])
