"""What a library holds: the index of patches, popularity, inventory, archives."""
