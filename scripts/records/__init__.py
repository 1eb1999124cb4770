"""JSON records of a few kinds, each with its schema: what a small model can say by heart."""
