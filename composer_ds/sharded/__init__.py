"""Sharded checkpoints: every rank writes and reads its own partitions."""
