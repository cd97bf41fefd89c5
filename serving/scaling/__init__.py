"""Autoscaling: simulation with the service's own routing, and its command line."""
