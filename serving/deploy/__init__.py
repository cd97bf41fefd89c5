"""Ray clusters and the application on them."""
