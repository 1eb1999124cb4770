"""The harness of all measurements: variants in turns, medians, ratios, limits, tables.

Owns how a measurement is taken and told. What is measured is said by scripts/bench_*.py;
nobody else imports this package.
"""
