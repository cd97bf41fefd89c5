"""The fidelity benchmark's reader and arms on a real engine and the bundled reference model."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import chain
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from PIL.Image import Image
from rich.console import Console

from infra.reference import DEFAULT_MODEL, weights
from infra.reference.families import FAMILIES
from infra.reference.pictures import page_picture
from infra.reference.scenes import Form, Split, draw_items
from kvstore.operator.patch import Patch, PatchKind
from kvstore.records.patch_form import PatchForm
from prefill_workers.link.keys import ChunkKeys
from prefill_workers.modes import OperatingPoint
from prefill_workers.settings import FidelitySettings
from serving.bench.fidelity import composition, envelope, growth, online, prefix, reorder, storage, windows
from serving.bench.fidelity.arms import Repaired
from serving.bench.fidelity.items import SEED, items
from serving.bench.fidelity.probe import Probe
from serving.bench.fidelity.reader import Prompt, Reader
from serving.bench.fidelity.scores import Scores, figures
from serving.bench.fidelity.shape import Shape
from serving.bench.fidelity.study import Study
from serving.bench.fidelity.tables import Section, tables
from serving.bench.fidelity.window_cases import Pictures
from serving.bench.kept import Kept
from serving.bench.worker import Worker

pytestmark = pytest.mark.engine
SMALL = Form(3, 8, 6)
ITEMS = 24


@pytest.fixture(scope="module")
def study(only_engines) -> Iterator[Study]:
    only_engines.close()
    reader = Reader(weights(DEFAULT_MODEL))
    with torch.inference_mode():
        yield Study(reader, FAMILIES[DEFAULT_MODEL])
    reader.close()


@pytest.fixture(scope="module")
def item(study: Study):
    return next(items(study.reader, study.kind, Split.multi, 1, SMALL))


def test_a_prompt_is_what_the_server_renders(study: Study, item):
    scenes, _ = draw_items(Split.multi, 1, SMALL, torch.Generator().manual_seed(SEED))
    pictures = [page_picture(scenes, 0, page, study.kind.cell) for page in range(3)]
    rendered = study.reader.rendered(pictures, item.question)
    prompt = item.prompt(study.reader)
    assert prompt.token_ids[: len(rendered.token_ids)].tolist() == rendered.token_ids
    assert [(place.start, place.stop) for place in prompt.places] == [(c.start, c.stop) for c in rendered.chunks]


BLOCK = 32  # tokens of vLLM's prefix cache; its attention on processors takes no 16
ASKED = (  # one after another, each with the leading pages that it shares with one before
    ((0, 1, 2), 0),
    ((0, 1, 2), 3),
    ((0, 2, 1), 1),
    ((1, 0, 2), 0),
    ((1, 2, 0), 1),
)


def cached_by_vllm(requests: Sequence[tuple[list[Image], str, str]]) -> list[int]:
    """Tokens that vLLM takes from its prefix cache for each request of pictures, a system prompt and a question."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(weights(DEFAULT_MODEL)), dtype="float32", max_model_len=1024, block_size=BLOCK, enable_prefix_caching=True,
        enforce_eager=True, limit_mm_per_prompt={"image": SMALL.pages},
    )  # fmt: skip
    found = []
    for pictures, system, question in requests:
        content = [*({"type": "image_pil", "image_pil": one} for one in pictures), {"type": "text", "text": question}]
        messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": content}]
        (answer,) = llm.chat(messages, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        found.append(answer.num_cached_tokens)
    return found


def test_prefix_caching_is_told_as_vllm_does_it(study: Study, item):
    scenes, _ = draw_items(Split.multi, 1, SMALL, torch.Generator().manual_seed(SEED))
    pictures = [page_picture(scenes, 0, page, study.kind.cell) for page in range(SMALL.pages)]
    requests = [([pictures[i] for i in order], "", item.question) for order, _ in ASKED]
    requests.append((pictures, "You are a helpful assistant.", item.question))  # all else is as it was
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = pool.submit(cached_by_vllm, requests).result()
    said = [prefix.cached(item.prompt(study.reader, order), leading, BLOCK) for order, leading in ASKED]
    assert found == [*said, 0]
    assert said[1] > said[2] > 0 == said[0]


def test_full_rank_patches_and_full_recomputation_are_an_exact_prefill(study: Study, item):
    (one,) = study.gather([item])
    arms = study.arms
    whole = {
        "full rank": arms.patch(None),
        "mpic": arms.mpic(10_000),
        "cacheblend": arms.cacheblend(1.0),
        "all exact": arms.first(10_000),
        "all layers": arms.deep_layers(1.0),
    }
    for name, arm in whole.items():
        linked = [arm(page) for page in one.pages]
        (read,) = study.reader.over(
            [one.prompt], [[page.kv for page in linked]], [[page.again for page in linked]], keep=None
        )
        torch.testing.assert_close(read.answers, one.exact.answers, rtol=0, atol=1e-3, msg=name)
        for ours, theirs in zip(read.pages, one.exact.pages, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_patches_that_are_cut_from_a_wider_one_are_the_patches_of_that_rank(study: Study, item):
    (one,) = study.gather([item])
    for page in one.pages:
        for rank in (4, 16, 60):  # the last is more than a page's own rank
            cut, formed = study.arms.own(page, rank), study.arms.formed(page.delta, rank)
            torch.testing.assert_close(cut.dense(), formed.dense(), rtol=1e-3, atol=1e-3)


def test_recomputed_tokens_are_computed_over_the_others(study: Study, item):
    """An arm that computes the first tokens again leaves the others' KV as it was given."""
    (one,) = study.gather([item])
    given = [page.canonical for page in one.pages]
    again = [torch.tensor([0, 3, 4])] * 3
    (read,) = study.reader.over([one.prompt], [given], [again], keep=None)
    for page, canonical in zip(read.pages, given, strict=True):
        kept = torch.ones(canonical.shape[1], dtype=torch.bool)
        kept[[0, 3, 4]] = False
        torch.testing.assert_close(page[:, kept], canonical[:, kept], rtol=1e-5, atol=1e-5)
        assert (page[1:, ~kept] - canonical[1:, ~kept]).abs().max() > 1e-2


@pytest.mark.parametrize("apart", [1, 3])
def test_a_partial_prefill_starts_from_what_the_page_alone_has_in_the_shallow_layers(study: Study, item, apart: int):
    """KV of a layer follows from what enters it: the first that is computed in context is still the page's own."""
    (one,) = study.gather([item])
    layers = study.arms.layout.layers
    linked = [study.arms.reprefill(1 - apart / layers)(page) for page in one.pages]
    assert {page.apart for page in linked} == {apart}
    (read,) = study.reader.over(
        [one.prompt], [[page.kv for page in linked]], [[page.again for page in linked]], keep=None, apart=apart
    )
    for kv, page in zip(read.pages, one.pages, strict=True):
        torch.testing.assert_close(kv[: apart + 1], page.canonical[: apart + 1], rtol=1e-4, atol=1e-4)
    last, page = read.pages[-1], one.pages[-1]
    for layer in range(apart + 1, layers):
        assert (last[layer] - page.canonical[layer]).norm() > 0.05 * page.canonical[layer].norm()
        assert (last[layer] - page.exact[layer]).norm() > 0.05 * page.exact[layer].norm()


def test_layers_that_are_all_apart_are_blind_reuse_and_none_apart_a_full_prefill(study: Study, item):
    (one,) = study.gather([item])
    kv = [page.canonical for page in one.pages]
    (blind,) = study.reader.over([one.prompt], [kv])
    every = [torch.arange(page.shape[1]) for page in kv]
    for apart, expected in ((study.arms.layout.layers, blind), (0, one.exact)):
        (read,) = study.reader.over([one.prompt], [kv], [every], apart=apart)
        torch.testing.assert_close(read.answers, expected.answers, rtol=0, atol=1e-3)


def test_kv_behind_other_pages_is_an_exact_prefills(study: Study, item):
    """Though it is computed page by page, over what other orders have computed before."""
    (one,) = study.gather([item])
    canonical = one.pages[2].canonical
    orders = [(0, 1, 2), (1, 0, 2), (0, 2), (1, 2), (2,)]
    prompts = [item.prompt(study.reader, order) for order in orders]
    deltas = [read.pages[0] - canonical for read in study.reader.exact(prompts, keep=[-1])]
    orbit = (deltas[0] + deltas[1]) / 2
    for ours, theirs in zip(
        (one.pages[2].orbit, *one.pages[2].pairs, one.pages[2].base), (orbit, *deltas[2:]), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_what_prefix_caching_computes_is_counted_beside_an_exact_answer(study: Study, item):
    (one,) = study.gather([item])
    scores: dict[str, Scores] = defaultdict(Scores)
    study.score(scores, one, {"blind": lambda page: Repaired(page.canonical)})
    assert scores["prefix"].kl == scores["exact"].kl == [0.0]
    assert 0.9 < scores["prefix"].computed[0] < 1.0  # of five other orders one begins with the same page
    assert (scores["exact"].computed, scores["blind"].computed) == ([1.0], [0.0])


def test_the_model_binds_across_pages_and_blind_reuse_loses_it(study: Study):
    arms = {"blind": lambda page: Repaired(page.canonical), "patch": study.arms.patch(16)}
    accuracy: dict[tuple[Split, str], float] = {}
    eta = {}
    for split in (Split.single, Split.multi):
        shape = Shape(study.arms.layout)
        groups = list(study.gathered(split, ITEMS, SMALL))
        scores = study.scored(groups, arms)
        for one in chain.from_iterable(groups):
            shape.add(one.pages[-1])
        for arm in scores:
            accuracy[split, arm] = sum(scores[arm].right) / ITEMS
        eta[split] = figures(scores["patch"], scores["blind"], scores["exact"]).get("eta")
        assert shape.depth[0][0] == pytest.approx(0.0, abs=1e-5)  # the first layer sees no neighbours
        assert shape.depth[0][-1] > 0.05
    assert accuracy[Split.single, "exact"] >= 0.95
    assert accuracy[Split.multi, "exact"] >= 0.90
    assert accuracy[Split.multi, "blind"] <= accuracy[Split.multi, "exact"] - 0.10
    assert accuracy[Split.single, "blind"] >= accuracy[Split.single, "exact"] - 0.05
    assert accuracy[Split.multi, "patch"] >= accuracy[Split.multi, "exact"] - 0.05
    assert eta[Split.multi].value >= 0.9


def test_orbit_patches_serve_another_order(study: Study):
    scores, apart = reorder.reorder(study, 3, 4)
    assert set(scores) == {"exact", "blind", "own", "transfer", "orbit"}
    assert len(scores["orbit"].kl) == 24  # six orders of every item
    assert 0 < apart < 2
    assert sum(scores["orbit"].kl) < sum(scores["blind"].kl)


def test_the_envelope_reuses_what_the_rule_reuses(study: Study):
    scores = envelope.envelope(study, 3)
    assert set(scores) == {one.name for one in envelope.SITUATIONS}
    assert scores["same"]["stale"].kl == pytest.approx(scores["same"]["rebuilt"].kl, abs=1e-6)
    assert scores["another system prompt"]["stale"].kl != scores["a system prompt"]["stale"].kl  # other patches
    assert [name for name, _ in envelope.false_reuse(scores)] == ["own", "orbit"]


def test_the_envelope_says_of_every_situation_what_the_linkers_keys_say(study: Study):
    reader = study.reader
    other, item = items(reader, study.kind, Split.multi, 2, envelope.FORM)
    *ours, page = item.pages

    def keys(worker: Worker, prompt: Prompt, text: dict[str, Any]) -> ChunkKeys:
        prefix = tuple(reader.ids(text.get("system", "")))
        return worker.linker.keys(replace(growth.request(prompt), prefix=prefix))[-1]

    with growth.worker(study) as worker:
        for one in envelope.SITUATIONS:
            before = one.pages(ours, other.pages[:-1])
            later = reader.prompt([*before, page], item.question, item.answer, **one.text)
            stored = keys(worker, item.prompt(reader, **one.taught), one.taught)
            wanted = keys(worker, later, one.text)
            assert stored.canonical == wanted.canonical
            served = {"stale": stored.own_patch == wanted.own_patch, "orbit": stored.set_patch == wanted.set_patch}
            assert {arm for arm in served if served[arm]} == set(one.served), one.name


def test_a_pair_behind_one_page_is_that_pages_own_patch(study: Study):
    """Behind a single antecedent the sum has one term: composing changes nothing but the rank."""
    scores = composition.compositions(study, Split.multi, 1, 4)
    assert scores["sum"].kl == pytest.approx(scores["own"].kl, abs=0.02)


def test_spread_patches_keep_more_energy_in_the_bytes_of_a_uniform_one(study: Study, item):
    (one,) = study.gather([item])
    delta, layout = one.pages[-1].delta, study.arms.layout

    def kept(patch: Patch) -> float:
        return 1 - float((delta - patch.dense()).square().sum() / delta.square().sum())

    uniform, spread = (PatchForm(4, spread=spread).form(delta, layout, PatchKind.own) for spread in (False, True))
    assert spread.nbytes <= uniform.nbytes
    assert kept(spread) > kept(uniform)


def test_every_probe_counts_what_it_tried(study: Study):
    scores = storage.storage(study, Split.multi, 8, 3, SMALL)
    assert {len(one.kl) for arm, one in scores.items()} == {3}
    assert all(math.isfinite(value) for one in scores.values() for value in one.kl)


def test_patches_on_the_last_page_alone(study: Study, item):
    """The protocol of the paper: every other token is exact."""
    probe = Probe(study.reader)
    canonical = probe.canonical([item.pages[-1]])
    cases = probe.behind([item.prompt(study.reader)], canonical)
    scores: dict[str, Scores] = {name: Scores() for name in ("exact", "blind", "full")}
    probe.score(scores, cases, {"blind": [None], "full": [study.arms.formed(cases[0].delta, None)]})
    assert scores["full"].kl[0] == pytest.approx(0.0, abs=1e-4)
    assert scores["blind"].kl[0] > scores["full"].kl[0]


def test_weighted_pairs_serve_a_set_where_their_plain_sum_fails(study: Study):
    """And no answer is lost that blind reuse keeps."""
    scores = composition.compositions(study, Split.multi, 4, 8)
    for arm in ("weighted", "placed", "measured"):
        assert sum(scores[arm].kl) < 0.2 * sum(scores["sum"].kl), arm
    assert sum(scores["measured"].right) >= sum(scores["exact"].right) - 1
    assert len({len(one.kl) for one in scores.values()}) == 1


def test_the_online_check_tells_sound_patches_from_broken_ones(study: Study):
    checks = online.online(study, 2)
    assert set(checks) == {one.name for one in online.SITUATIONS}
    assert {len(kls) for kls in checks.values()} == {2 * len(online.SPLITS)}
    means = {name: sum(kls) / len(kls) for name, kls in checks.items()}
    bounds = FidelitySettings().bounds
    bound = bounds[OperatingPoint.PATCHED]
    assert means["same"] < bound < min(means["wrong page"], means["turned basis"])
    assert means["sums"] < min(bounds[OperatingPoint.COMPOSED], means["plain sums"])


def test_the_last_item_too_has_anothers_pages_to_be_replaced_by(study: Study, monkeypatch: pytest.MonkeyPatch):
    situations = [one for one in online.SITUATIONS if one.name in ("same", "all replaced")]
    monkeypatch.setattr(online, "SITUATIONS", situations)
    checks = online.online(study, 1)
    assert {len(kls) for kls in checks.values()} == {len(online.SPLITS)}
    assert sum(checks["all replaced"]) > sum(checks["same"])


def test_all_modes_are_asked_as_pages_grow_and_reuse_answers_as_exact_does(study: Study):
    found = growth.growth(study, 2, 4)
    assert set(found) == set(growth.MODES)
    right = {mode: sum(answers) for mode, (answers, _) in found.items()}
    assert right["exact"] >= 3
    assert right["auto"] == right["exact"] >= right["full-reuse"]
    assert all(len(took) == 4 and min(took) > 0 for _, took in found.values())


def test_survivors_are_kept_until_they_leave_and_mended_by_removal(study: Study):
    cases = Pictures(study.reader, study.kind)
    for slides in (1, 4):
        told = list[int]()
        scores = windows.survivors(cases, study.arms, study.reader, Split.multi, slides, 6, told.append)
        assert sum(told) == 6
        assert {len(one.kl) for one in scores.values()} == {6}
        kl = {arm: sum(one.kl) for arm, one in scores.items()}
        assert kl["removal"] < kl["kept"] < kl["blind"]
        assert kl["refreshed"] < kl["kept"]


def test_survivors_of_windows_of_one_item_equal_links_by_hand(study: Study):
    """The newest page of each window is computed over those that stay as they were."""
    (case,) = Pictures(study.reader, study.kind).draw(Split.multi, 5, 3, 1)
    (kept,), (refreshed,) = windows._slid(study.reader, [case], 2, 1)
    reader, pages = study.reader, case.segments
    (whole,) = reader.exact([case.ask(pages[:3]).pages_only])
    later = case.ask(pages[1:4]).pages_only
    (by_hand,) = reader.over([later], [[*whole.pages[1:], None]], keep=None)
    (swapped,) = reader.over([later], [[None, whole.pages[2], None]], keep=None)
    for ours, theirs in zip([*kept, *refreshed], [*by_hand.pages[1:], *swapped.pages[1:]], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_stale_patch_loses_as_the_window_turns_over_and_a_fresh_one_does_not(study: Study):
    told, cases = list[int](), Pictures(study.reader, study.kind)
    scores = windows.recalled(cases, study.arms, study.reader, Split.multi, 6, told.append)
    assert sum(told) == 6
    kl = {arm: sum(one.kl) for arm, one in scores.items()}
    assert kl["rebuilt"] < 0.01 * kl["blind"]
    assert kl["fresh"] == kl["stale_0"] < kl["stale_60"]
    assert kl["fresh"] < 0.2 * kl["stale_100"]


def test_sections_of_the_tables_are_measured_by_themselves(study: Study):
    asked = tables(study, 4, Kept(None), Console(), only=(Section.storage, Section.orders, Section.shape))
    found = dict(asked)
    shape = ["deficit norm by layer", "deficit spread", "energy by rank", "energy by tokens"]
    assert list(found) == [*shape, "η by order", "accuracy by order", "equal bytes"]
    assert found["deficit spread"].keys() == set(map(str, Split))
    assert {f"K = {predecessors}" for predecessors in reorder.FORMS} == found["η by order"].keys()
