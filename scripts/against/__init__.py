"""A checkout's side of bench_against."""
