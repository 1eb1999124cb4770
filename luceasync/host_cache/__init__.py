"""Host memory that holds nodes: where it lies, how it is pinned, copies to and from lanes."""
