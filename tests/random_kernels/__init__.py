"""Random cases of every kernel: few structures, and many draws of data on each.

A STRUCTURE is what a kernel is compiled for: widths, heads, page size, dtypes, where
the sub-pool lies. Compiling takes seconds, a case milliseconds, so each structure is
run on many draws of data: lengths, pages, slots, values, padding. Every case starts
from a poisoned pool, is compared with the float64 oracle, and runs again with the
physical pages in another order, which must give the same bits.

    python -m tests.random_kernels --cases 2000    # on a card
"""
