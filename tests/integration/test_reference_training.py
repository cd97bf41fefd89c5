"""Reference models that lie there are trained further: over what their tower writes, which stays as it is."""

import json
import shutil
from dataclasses import replace
from itertools import islice

import pytest
import torch
from safetensors.torch import load_file

from infra.reference import WEIGHTS, making, training, vision
from infra.reference.families import FAMILIES
from infra.reference.making import CARD, Refining, average, evaluate, make, refine, written_codes
from infra.reference.pictures import page_picture
from infra.reference.scenes import Form, Split, draw_items
from infra.reference.training import COUNTING, REFINING, Stage
from prefill_workers.model_card import ModelCard, measured

pytestmark = pytest.mark.slow
FAMILY = "qwen3_vl"  # its tower writes codes of several levels


@pytest.fixture
def out(tmp_path, monkeypatch):
    shutil.copytree(WEIGHTS / FAMILY, tmp_path / FAMILY)
    curve = tmp_path / FAMILY / making.CURVE
    curve.write_text(curve.read_text().replace('"refined"', '"before"'))
    (tmp_path / FAMILY / making.MEASURED).write_text('{"compose_up_to": 3}')
    short = (replace(REFINING[0], steps=2, sets=2, forms=(Form(3, 6),)),)
    monkeypatch.setattr(making, "REFINING", short)
    monkeypatch.setattr(making, "COUNTING", (replace(COUNTING[0], steps=1, sets=2),))
    return tmp_path


def test_refining_leaves_tower_and_embeddings_alone_and_says_what_it_did(out):
    before, config = load_file(out / FAMILY / "model.safetensors"), (out / FAMILY / "config.json").read_text()
    lines = list(refine(FAMILY, out / "work", out, 4))
    after = load_file(out / FAMILY / "model.safetensors")
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if "visual" in name or "embed_tokens" in name} <= same
    assert not any(name.endswith(("q_proj.weight", "down_proj.weight")) for name in same)
    assert [line["split"] for line in lines if "split" in line] == list(Split)
    assert (out / FAMILY / "config.json").read_text() == config
    assert measured(out / FAMILY) == ModelCard(compose_up_to=0)  # of these weights nothing was measured
    text = (out / FAMILY / CARD).read_text()
    command = f"refine {FAMILY} --threads {torch.get_num_threads()}"
    assert f"| 1 | `{command}` | 2 | 0.001 | 0 on " in text
    assert text.count("| tally |") == text.count("| single |") == 1


def test_what_was_refined_is_refined_again_only_when_asked_to_and_on_other_pages(out):
    first = list(refine(FAMILY, out / "work", out, 4))
    with pytest.raises(ValueError, match="refined before"):
        next(refine(FAMILY, out / "work", out, 4))
    second = list(refine(FAMILY, out / "work", out, 4, again=True))
    assert first[0]["loss"] != second[0]["loss"]
    curve = json.loads((out / FAMILY / making.CURVE).read_text())
    assert [line["refined"] for line in curve if "refined" in line] == [1, 2]
    assert f"refine {FAMILY} --again --threads" in (out / FAMILY / CARD).read_text()


def test_a_mean_of_rounds_has_the_mean_of_their_weights_and_says_which_rounds(out):
    before, ends = (out / FAMILY / CARD).read_text().count("| `refine"), []
    for again in (False, True):
        list(refine(FAMILY, out / "work", out, 4, again=again))
        ends.append(load_file(out / FAMILY / "model.safetensors"))
    scores = {line["split"]: line["right"] for line in average(FAMILY, [1, 2], out / "work", out, 4)}
    mean = load_file(out / FAMILY / "model.safetensors")
    assert any(not torch.equal(ends[0][name], ends[1][name]) for name in mean)
    for name, weight in mean.items():
        first, second = (end[name].float() for end in ends)
        rounded = 2 * 2**-8 * (first.abs() + second.abs()) / 2  # bf16's half unit, of both ends and of their mean
        assert ((weight.float() - (first + second) / 2).abs() <= rounded).all()
    assert measured(out / FAMILY) == ModelCard(compose_up_to=0)
    text = (out / FAMILY / CARD).read_text()
    assert f"| `average {FAMILY} --rounds 1 2` |" in text
    assert text.count("| `refine") == before + 2
    assert text.count("| round |") == 1
    assert f"| tally | {scores['tally']:.3f} |" in text


def test_a_mean_of_rounds_is_not_taken_while_a_later_one_is_under_way(out):
    for again in (False, True):
        list(refine(FAMILY, out / "work", out, 4, again=again))
    rounds = Refining.begin(FAMILY, out / FAMILY, out / "work", again=True)
    list(rounds.train())
    before = load_file(out / FAMILY / "model.safetensors")
    with pytest.raises(ValueError, match=f"{FAMILY}-refined-3.pt was begun from other weights"):
        next(average(FAMILY, [1, 2], out / "work", out, 4))
    after = load_file(out / FAMILY / "model.safetensors")
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def test_a_round_goes_on_with_the_questions_that_it_was_begun_with(out):
    list(Refining.begin(FAMILY, out / FAMILY, out / "work", about="counting").train())
    with pytest.raises(ValueError, match="was begun with --counting"):
        next(refine(FAMILY, out / "work", out, 4))


def test_a_mean_of_rounds_that_were_not_trained_here_names_what_is_missing(out):
    with pytest.raises(ValueError, match=f"{FAMILY}-refined-7.pt"):
        next(average(FAMILY, [7], out / "work", out, 4))


def test_a_model_is_evaluated_as_it_lies_there_and_its_card_says_so(out):
    folder = out / FAMILY
    before, kept = (folder / CARD).read_text(), measured(folder)
    weights = (folder / "model.safetensors").read_bytes()
    scores = {line["split"]: line["right"] for line in evaluate(FAMILY, out / "work", out, 4)}
    assert scores["single"] == scores["retrieval"] == 1.0
    assert (folder / "model.safetensors").read_bytes() == weights
    assert measured(folder) == kept
    text = (folder / CARD).read_text()
    training = text.partition("## Held-out")[0]
    assert training == before.partition("## Held-out")[0]
    assert "\n4 questions a split" in text
    assert list(scores) == list(Split)
    assert all(f"| {split} | {share:.3f} |" in text for split, share in scores.items())


def test_it_is_refined_on_counted_questions_where_that_is_asked_for(out):
    lines = list(refine(FAMILY, out / "work", out, 4, about="counting"))
    assert [line["step"] for line in lines if "step" in line] == [1]
    text = (out / FAMILY / CARD).read_text()
    assert f"refine {FAMILY} --counting --threads {torch.get_num_threads()}` | 1 | " in text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_trained_with_the_attention_that_it_is_made_of(family):
    tokens = FAMILIES[family].recipe.tokenizer()
    language = FAMILIES[family].language(FAMILIES[family].recipe.load(tokens, WEIGHTS / family))
    sees = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, -1, -1)
    embedded = 0.5 * torch.randn(2, 12, 256, generator=torch.Generator().manual_seed(1))
    asked = (embedded, torch.arange(12).expand(language.axes, 2, -1), sees, torch.arange(0), [])
    with torch.no_grad():
        trained = language(*asked)
        language.text.set_attn_implementation("eager")
        torch.testing.assert_close(trained, language(*asked), atol=1e-4, rtol=1e-4)


@pytest.fixture
def every_step(monkeypatch):
    """Every step is told of, and kept when the next one is asked for."""
    for module, name in ((training, "_EVERY"), (training, "_KEPT_EVERY"), (vision, "_EVERY")):
        monkeypatch.setattr(module, name, 1)


def test_a_making_that_is_cut_off_again_and_again_makes_the_same_model(tmp_path, monkeypatch, every_step):
    monkeypatch.setattr(making, "STAGES", (Stage(steps=4, sets=2, forms=(Form(3, 6),), short=True),))
    monkeypatch.setattr(making, "TOWER_STEPS", 4)
    monkeypatch.setattr(vision, "_CELLS", 48)

    def made(name, lines=None):
        return [line.get("step") for line in islice(make(FAMILY, tmp_path / name, tmp_path / name, 2), lines)]

    assert made("whole") == [1, 2, 3, 4, 1, 2, 3, 4, *[None] * len(Split)]
    parts = [made("cut", 3), made("cut", 4), made("cut", 3), made("cut")]
    assert parts == [[1, 2, 3], [3, 4, 1, 2], [2, 3, 4], [4, *[None] * len(Split)]]
    weights, again = (load_file(tmp_path / name / FAMILY / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(weight, again[name]) for name, weight in weights.items())
    curves = [json.loads((tmp_path / name / FAMILY / making.CURVE).read_text()) for name in ("whole", "cut")]
    whole, cut = ([line | {"seconds": 0} for line in curve] for curve in curves)
    assert cut == whole


def test_refining_that_was_cut_off_goes_on_from_where_it_stood(out, every_step):
    whole = Refining.begin(FAMILY, out / FAMILY, out / "whole")
    assert [line["step"] for line in whole.train()] == [1, 2]
    cut = Refining.begin(FAMILY, out / FAMILY, out / "work").train()
    assert [line["step"] for line in islice(cut, 2)] == [1, 2]
    again = Refining.begin(FAMILY, out / FAMILY, out / "work")
    assert [line["step"] for line in again.train()] == [2]
    weights = again.model.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in whole.model.state_dict().items())
    assert list(Refining.begin(FAMILY, out / FAMILY, out / "work").train()) == []


def test_a_round_that_was_cut_off_while_it_was_evaluated_is_that_round_again(out):
    next(line for line in refine(FAMILY, out / "work", out, 4, again=True) if "split" in line)
    assert [line["split"] for line in refine(FAMILY, out / "work", out, 4, again=True)] == list(Split)
    curve = json.loads((out / FAMILY / making.CURVE).read_text())
    assert [line["refined"] for line in curve if "refined" in line] == [1]


def test_written_codes_are_what_the_tower_sees_in_a_page(out):
    model = Refining.begin(FAMILY, out / FAMILY, out / "work")
    codes = written_codes(model.tower(), model.kind)
    scenes, _ = draw_items(Split.multi, 1, Form(3, 12, 12), torch.Generator().manual_seed(5))
    with torch.no_grad():
        seen = model.tower()([page_picture(scenes, 0, 2, model.kind.cell)])
    cells = [part[0, 2] for part in scenes.cells()]
    size = seen[0].norm()
    for level, wanted in zip(codes(None, model.words, *cells), seen, strict=True):
        assert (level - wanted).norm() < 0.1 * size  # where in a page a cell stands changes little
    assert (codes(None, model.words, *cells)[0].roll(1, 0) - seen[0]).norm() > 0.5 * size
