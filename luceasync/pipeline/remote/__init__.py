"""A stage in another process: its messages, its nodes, and the processes of a plan."""
