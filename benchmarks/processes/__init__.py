"""Pipelines and shards in several processes."""
