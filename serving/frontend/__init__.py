"""From a rendered prompt to an answer: vLLM's engine client over the roles."""
