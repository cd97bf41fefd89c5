"""Online fidelity: rolling KL by operating point, and the points that it disables."""
