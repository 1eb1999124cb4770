"""The target model as a chain of shards: plan, shard, group. Knows no requests and no text."""
