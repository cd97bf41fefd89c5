"""Autoscaling: service curves so far; replicas are fixed numbers until policies use them."""
