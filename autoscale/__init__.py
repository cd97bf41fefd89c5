"""Where load signals and autoscaling policies per role will be; there are none yet: replicas are fixed numbers."""
