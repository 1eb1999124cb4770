"""Lanes with pools, for benches."""
