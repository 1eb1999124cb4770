"""Measurements: `luceasync bench`.

`report` runs variants in turns and prints tables, `device` has clocks and limits, `model` and
`engines` have models of random weights. The other modules measure one subject each; only the
command line and acceptance checks import this package.
"""
