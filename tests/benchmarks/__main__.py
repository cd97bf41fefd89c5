"""Command line of the project's benchmarks: `python -m tests.benchmarks NAME`.

Without a name it lists them.
"""

from __future__ import annotations

import typer

from serving.bench.command import bench_command

typer.run(bench_command("python -m tests.benchmarks", "tests.benchmarks.catalogue"))
