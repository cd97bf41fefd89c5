"""Small vision-language models that really read pages and bind across them, and how they are made.

Their weights lie in this folder, one Hugging Face checkpoint per family, each with a card that says how it was trained
and what it scores. `python -m infra.reference` trains, evaluates and draws (`--help`).
"""
