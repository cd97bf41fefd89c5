"""The Ray Serve deployments."""
