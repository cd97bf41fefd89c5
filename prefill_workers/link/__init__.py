"""The linker: plans a prompt, loads and places KV, decides what is left to compute."""
