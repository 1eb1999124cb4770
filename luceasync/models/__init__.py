"""Networks: specs, layers, families, formats and the loader. Know no device, split or owner of a
lane.
"""
