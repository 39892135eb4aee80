"""Bytes and offsets: from specs and a budget to page grids and kernel rows."""

from ukv.layout.capacity import max_pages as max_pages
from ukv.layout.capacity import max_requests as max_requests
from ukv.layout.capacity import max_tokens as max_tokens
from ukv.layout.capacity import pages_of_request as pages_of_request
from ukv.layout.describe import describe as describe
from ukv.layout.part_view import PartView as PartView
from ukv.layout.placement import place as place
from ukv.layout.placement import spans_fit as spans_fit
from ukv.layout.pool import PoolLayout as PoolLayout
from ukv.layout.pool import packed_bytes as packed_bytes
from ukv.layout.pool import smallest_pool_bytes as smallest_pool_bytes
from ukv.layout.pool import static_layout as static_layout
from ukv.layout.pool import unified_layout as unified_layout
from ukv.layout.request import RequestShape as RequestShape
from ukv.layout.sub_pool import Placement as Placement
from ukv.layout.sub_pool import SubPoolLayout as SubPoolLayout
