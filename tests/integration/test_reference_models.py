"""Every bundled reference model but the default one, on a real engine: it answers, it binds, and patches keep that."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from infra.reference import DEFAULT_MODEL, WEIGHTS, weights
from infra.reference.families import FAMILIES
from infra.reference.scenes import ASKED, Form, Split
from prefill_workers.engine.attention import attention_shares
from prefill_workers.engine.batch import Attending
from prefill_workers.sequence import Run
from serving.bench.fidelity.arms import Repaired
from serving.bench.fidelity.bench import ITEMS as TABLES
from serving.bench.fidelity.items import items
from serving.bench.fidelity.masses import FirstLayer
from serving.bench.fidelity.reader import Reader
from serving.bench.fidelity.scores import figures
from serving.bench.fidelity.study import Study

pytestmark = pytest.mark.engine
SMALL = Form(3, 8, 6)
ITEMS = 24
BUNDLED = [family for family in FAMILIES if family != DEFAULT_MODEL and (WEIGHTS / family).exists()]
EACH_TIME = "kimi_vl"  # whose attention differs most from the default one's


@pytest.fixture(
    scope="module",
    params=[pytest.param(family, marks=[] if family == EACH_TIME else pytest.mark.slow) for family in BUNDLED],
)
def study(request: pytest.FixtureRequest, only_engines) -> Iterator[Study]:
    only_engines.close()
    reader = Reader(weights(request.param), trust_remote_code=request.param == "kimi_vl")
    with torch.inference_mode():
        yield Study(reader, FAMILIES[request.param])
    reader.close()


@pytest.mark.parametrize(("split", "least"), [(Split.single, 0.95), (Split.multi, 0.90)])
def test_it_answers_the_first_questions_of_the_tables(study: Study, split: Split, least: float):
    drawn = items(study.reader, study.kind, split, TABLES, ASKED[split])
    prompts = [item.prompt(study.reader) for item in islice(drawn, 60)]
    reads = study.reader.exact(prompts, keep=[])
    right = [
        read.answers.argmax(-1).tolist() == list(prompt.answer) for read, prompt in zip(reads, prompts, strict=True)
    ]
    assert sum(right) / len(right) >= least


def test_the_engine_tells_the_attention_that_transformers_computes(study: Study):
    reader, engine = study.reader, study.reader.engine
    if engine.config.model_config.use_mla:
        assert not engine.tells_attention
        return
    (item,) = islice(items(reader, study.kind, Split.multi, TABLES, SMALL), 1)
    prompt, block = item.prompt(reader), engine.block_size
    first = FirstLayer(reader.checkpoint, engine.config.model_config.hf_text_config)
    *before, last = (Run(place.start, place.stop) for place in prompt.places)
    blocks = range(1, 2 + len(prompt) // block)
    sequence = reader.sequence(prompt, blocks)
    (told,) = engine.attend_first(
        [(sequence, [Run(0, last.stop)])], [Attending(last, last.start, blocks, tuple(before))]
    )
    torch.testing.assert_close(told, attention_shares(first.ratios(prompt)), rtol=1e-3, atol=1e-5)


def test_it_binds_across_pages_blind_reuse_loses_that_and_patches_keep_it(study: Study):
    arms = {"blind": lambda page: Repaired(page.canonical), "patch": study.arms.patch(32)}
    found = {split: study.scored(study.gathered(split, ITEMS, SMALL), arms) for split in (Split.single, Split.multi)}
    right = {split: {arm: sum(one.right) / ITEMS for arm, one in scores.items()} for split, scores in found.items()}
    assert right[Split.single]["exact"] >= 0.95
    assert right[Split.single]["blind"] >= right[Split.single]["exact"] - 0.05
    assert right[Split.multi]["exact"] >= 0.90
    assert right[Split.multi]["blind"] <= right[Split.multi]["exact"] - 0.10
    assert right[Split.multi]["patch"] >= right[Split.multi]["exact"] - 0.05
    multi = found[Split.multi]
    assert figures(multi["patch"], multi["blind"], multi["exact"])["eta"].value >= 0.95
