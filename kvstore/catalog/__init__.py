"""Contents of a library: patch index, popularity, inventory, archives."""
