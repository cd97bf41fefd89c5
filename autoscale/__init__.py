"""Autoscaling: service curves so far. Signals and policies per role are to come; replicas are fixed numbers."""
