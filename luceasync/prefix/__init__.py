"""Which prefix of a prompt is kept, and where. Never touches the model."""
