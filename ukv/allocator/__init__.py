"""Ownership: who holds which page, and where pages move to."""

from ukv.allocator.alloc import Grant as Grant
from ukv.allocator.alloc import alloc as alloc
from ukv.allocator.alloc import alloc_decode as alloc_decode
from ukv.allocator.alloc import alloc_extend as alloc_extend
from ukv.allocator.alloc import append_pages as append_pages
from ukv.allocator.compact import Compaction as Compaction
from ukv.allocator.compact import compact as compact
from ukv.allocator.compact import make_room as make_room
from ukv.allocator.copy_page import copy_page as copy_page
from ukv.allocator.error_word import ErrorBit as ErrorBit
from ukv.allocator.error_word import clear_error as clear_error
from ukv.allocator.error_word import describe_error as describe_error
from ukv.allocator.error_word import raise_on_error as raise_on_error
from ukv.allocator.free import free as free
from ukv.allocator.free import free_full as free_full
from ukv.allocator.free import free_window as free_window
from ukv.allocator.free import share as share
from ukv.allocator.mirror import PoolMirror as PoolMirror
from ukv.allocator.verify import verify as verify
