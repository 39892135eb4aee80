"""Independent NumPy float64 oracles: no JAX, no code under test, no defaults."""
