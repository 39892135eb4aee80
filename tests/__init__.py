"""Tests of ukv."""
