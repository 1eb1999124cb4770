"""The command line: builds the Config, and passes its sections to a command."""
