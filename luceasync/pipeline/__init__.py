"""The target model as a chain of groups of shards. Knows no requests and no text."""
