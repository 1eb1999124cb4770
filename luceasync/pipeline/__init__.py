"""The target model as a chain of stages of shards. Does not know requests or text."""
