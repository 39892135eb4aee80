"""Calls that must fail, by what they are wrong about."""
