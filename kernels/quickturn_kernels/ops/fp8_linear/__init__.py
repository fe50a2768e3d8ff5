"""Implementations of `linear` and `linear_silu_and_mul` for weights in e4m3 (`ops/linear/fp8.py`)."""
