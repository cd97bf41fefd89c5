"""Online fidelity: rolling KL by operating point, and what it switches off."""
