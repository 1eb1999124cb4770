"""The DFlash drafter: its network, its features, and the process that may run it."""
