"""The one encoding of quantised weights, whatever file they come from: w = (D s) c - (M m).

Codes c, small numbers s and m of each group of columns, numbers D and M of each super-group.
"""
