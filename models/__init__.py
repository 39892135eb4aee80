"""Models that run on a ukv pool."""
