"""Networks that know nothing of devices, splits or lanes' owners: spec, layers, one file per
family, loader.
"""
