"""Generated blocks of the Markdown documents, from records and code.

`tests.benchmarks.render` writes them.

`speed` and `fidelity` read `tests/benchmarks/results`, `code` reads declarations. Each block is a function of no
arguments that returns Markdown; `BLOCKS` of its module names it.
"""
