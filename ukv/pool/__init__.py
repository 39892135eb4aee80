"""Contents of the pool: the state pytree, typed entries, page copies."""

from ukv.pool.entries import entries_to_words as entries_to_words
from ukv.pool.entries import read_blocks as read_blocks
from ukv.pool.entries import read_entries as read_entries
from ukv.pool.entries import write_entries as write_entries
from ukv.pool.page_copy import copy_pages as copy_pages
from ukv.pool.state import HI as HI
from ukv.pool.state import HOLES as HOLES
from ukv.pool.state import LIVE as LIVE
from ukv.pool.state import LO as LO
from ukv.pool.state import PoolState as PoolState
from ukv.pool.state import SubPoolTables as SubPoolTables
from ukv.pool.state import create_pool as create_pool
from ukv.pool.state import page_counts as page_counts
from ukv.pool.state import pool_struct as pool_struct
