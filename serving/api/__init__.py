"""The OpenAI HTTP surface."""
