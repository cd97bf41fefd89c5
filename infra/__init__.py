"""Set-up: environments, checkpoints and clusters."""
