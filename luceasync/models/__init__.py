"""Networks: specs, layers, families, formats and the loader. Does not know devices, splits or
owners of lanes."""
