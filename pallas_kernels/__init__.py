"""Pallas and Triton kernels: arrays and Python ints in, arrays out."""
