"""One byte buffer with moving borders for the memory of hybrid language models."""
