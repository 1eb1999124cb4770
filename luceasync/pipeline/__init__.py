"""The target model as a chain of stages of shards. Knows no requests and no text."""
