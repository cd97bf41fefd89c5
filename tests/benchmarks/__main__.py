"""`python -m tests.benchmarks NAME`: run one of the project's benchmarks; without a name, list them."""

from __future__ import annotations

import typer

from serving.bench.command import bench_command

typer.run(bench_command("python -m tests.benchmarks", "tests.benchmarks.catalogue"))
