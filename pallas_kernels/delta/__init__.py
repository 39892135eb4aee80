"""The gated delta rule on states in the pool: decode step and chunked prefill."""
