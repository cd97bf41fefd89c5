"""Autoscaling: signals, forecasts, plans of replicas by load, and a simulator of them."""
