"""Per-role load signals and autoscaling policies."""
