"""Which prefix of a prompt is kept. Pure: touches no tensor, no file and no clock."""
