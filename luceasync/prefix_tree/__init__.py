"""The index of saved prefixes, and what is evicted. Pure: touches no tensor, file or clock."""
