"""Scenes, pictures and prompts of the reference models: what they are trained on and asked about."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from infra.checkpoints.moonvit import phases
from infra.reference import WEIGHTS
from infra.reference.families import FAMILIES
from infra.reference.making import Refining, draw
from infra.reference.pictures import cell_pixels, page_picture
from infra.reference.prompts import IGNORED, Layout, Words, lay_out
from infra.reference.scenes import NOWHERE, STYLES, Form, Scenes, Split, draw_items, draw_questions, draw_scenes
from infra.reference.training import MOVING, Codes, Progress, Settings, Stage, train
from infra.reference.vocabulary import COLOURS, PATTERNS, THINGS, answer, question, words


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def told(scenes: Scenes, index: int) -> list[dict[int, int]]:
    """The colour of every thing after each page, by reading the pages in order as the module's docstring says."""
    known: dict[int, int] = {}
    after, counted = [], Counter[int]()
    for page in range(scenes.form.pages):
        things, colours, sources = (
            part[index, page].tolist() for part in (scenes.things, scenes.colours, scenes.sources)
        )
        now = {}
        for thing, colour, source in zip(things, colours, sources, strict=True):
            tally = source not in known and source != NOWHERE and THINGS[source] in PATTERNS
            seen = counted.most_common(1)[0][0] if tally else known.get(source)
            now[thing] = colour if source == NOWHERE else seen
        counted.update(colours)
        known |= now
        after.append(dict(known))
    return after


@pytest.mark.parametrize("split", Split)
def test_a_pencilled_thing_has_the_colour_that_earlier_pages_give(split: Split):
    form = Form(6, 6) if split is Split.retrieval else Form(3, 8)
    scenes, questions = draw_items(split, 20, form, generator())
    for index in range(20):
        state = told(scenes, index)
        for page in range(form.pages):
            for thing, colour in zip(
                scenes.things[index, page].tolist(), scenes.colours[index, page].tolist(), strict=True
            ):
                assert state[page][thing] == colour
        wanted = [state[-1][thing] for thing in questions.things[index, 0].tolist()]
        assert wanted == questions.colours[index, 0].tolist()


def sources_of_asked(scenes: Scenes, questions) -> list[list[int]]:
    found = []
    for index in range(len(scenes.things)):
        pages = zip(questions.things[index, 0].tolist(), questions.pages[index, 0].tolist(), strict=True)
        found.append([int(scenes.sources[index, p][scenes.things[index, p] == t]) for t, p in pages])
    return found


@pytest.mark.parametrize("split", [Split.single, Split.retrieval, Split.control])
def test_what_one_page_answers_refers_to_nothing(split: Split):
    scenes, questions = draw_items(split, 30, Form(3, 8), generator())
    assert all(source == NOWHERE for sources in sources_of_asked(scenes, questions) for source in sources)
    if split is Split.control:
        assert (questions.pages[:, 0, 0] != questions.pages[:, 0, 1]).all()


@pytest.mark.parametrize("form", [Form(3, 12), Form(3, 8), Form(6, 6), Form(10, 4)])
def test_one_page_alone_does_not_say_which_colour_is_the_most_frequent_on_all(form: Form):
    scenes, questions = draw_items(Split.tally, 30, form, generator())
    for index, (source,) in enumerate(sources_of_asked(scenes, questions)):
        assert THINGS[source] in PATTERNS
        assert source not in scenes.things[index].flatten().tolist()
        pages = [Counter(page.tolist()) for page in scenes.colours[index, :-1]]
        assert all(counted.most_common()[0][1] == counted.most_common()[1][1] for counted in pages)
        (most, times), (_, second) = sum(pages, Counter()).most_common(2)
        assert most == int(questions.colours[index, 0, 0])
        assert times > second


def test_where_it_may_be_clear_some_sets_have_one_colour_on_most_things_and_some_have_not():
    style = replace(STYLES[Split.tally], clear=0.5)
    scenes = draw_scenes(60, Form(3, 8), style, generator())
    shares = []
    for index in range(60):
        ((most, times),) = Counter(scenes.colours[index, :-1].flatten().tolist()).most_common(1)
        pencilled = scenes.sources[index, -1] != NOWHERE
        assert set(scenes.colours[index, -1][pencilled].tolist()) <= {most}
        shares.append(times / 16)
    assert min(shares) <= 0.6
    assert max(shares) >= 0.8


@pytest.mark.parametrize("split", [Split.multi, Split.legend, Split.frames, Split.chain])
def test_what_needs_two_pages_refers_to_an_earlier_one(split: Split):
    scenes, questions = draw_items(split, 30, Form(3, 8), generator())
    for index, (source,) in enumerate(sources_of_asked(scenes, questions)):
        asked = int(questions.things[index, 0, 0])
        assert int(questions.pages[index, 0, 0]) == 2
        assert (source == asked) == (split is Split.frames)
        if split is Split.legend:
            assert THINGS[source] in PATTERNS
        if split is Split.chain:
            before = scenes.sources[index, 1][scenes.things[index, 1] == source]
            assert int(before) != NOWHERE
            assert int(before) in scenes.things[index, 0].tolist()


def test_a_thing_that_comes_again_is_not_asked_about():
    scenes = draw_scenes(50, Form(3, 12), STYLES[Split.frames], generator())
    questions = draw_questions(scenes, 8, False, 0.3, generator())
    assert not questions.asked.all()
    for index, number in product(range(50), range(8)):
        thing, page = int(questions.things[index, number, 0]), int(questions.pages[index, number, 0])
        again = any(thing in scenes.things[index, later].tolist() for later in range(page + 1, 3))
        assert bool(questions.asked[index, number]) is not again


def test_the_same_seed_draws_the_same_pages():
    one, two = (draw_items(Split.multi, 5, Form(3, 8), generator(9)) for _ in range(2))
    assert torch.equal(one[0].things, two[0].things)
    assert torch.equal(one[1].things, two[1].things)


@pytest.mark.parametrize(
    ("split", "pages"), [(Split.multi, 2), (Split.frames, 2), (Split.control, 2), (Split.chain, 3), (Split.tally, 3)]
)
def test_what_earlier_pages_tell_needs_them(split: Split, pages: int):
    with pytest.raises(ValueError, match=f"{split} needs {pages} pages"):
        draw_items(split, 1, Form(pages - 1, 8), generator())


def test_a_style_names_the_nearest_form_in_which_it_can_be_drawn():
    assert STYLES[Split.legend].fitting(Form(3, 12, 4)) == Form(3, 8, 4)
    assert STYLES[Split.tally].fitting(Form(2, 12)) == Form(3, 12)
    assert STYLES[Split.multi].fitting(Form(2, 12)) == Form(2, 12)


def test_every_cell_has_its_own_picture():
    coloured = [(thing, colour, NOWHERE) for thing in range(len(THINGS)) for colour in range(len(COLOURS))]
    pencilled = [(thing, 0, source) for thing in range(len(THINGS)) for source in range(len(THINGS))]
    seen = {cell_pixels(*cell, 28).tobytes() for cell in (*coloured, *pencilled)}
    assert len(seen) == len(coloured) + len(pencilled)


def test_a_page_shows_its_cells_row_by_row():
    scenes, _ = draw_items(Split.multi, 1, Form(3, 8, 3), generator())
    picture = np.asarray(page_picture(scenes, 0, 2, 28))
    assert picture.shape == (scenes.form.rows * 28, scenes.form.columns * 28, 3)
    things, colours, sources = (part[0, 2].tolist() for part in scenes.cells())
    row, column = 1, 2
    at = row * scenes.form.columns + column
    shown = picture[row * 28 : row * 28 + 28, column * 28 : column * 28 + 28]
    assert np.array_equal(shown, cell_pixels(things[at], colours[at], sources[at], 28))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    kind = FAMILIES[request.param]
    tokens = kind.recipe.tokenizer()
    return kind, tokens, Words(tokens, kind.image, kind.cell_token)


def test_words_and_all_else_are_encoded_and_decoded(family):
    _, tokens, _ = family
    for word in words():
        assert len(tokens(word)["input_ids"]) == 1, word
    for text in (question(["K"]), question(["star", "dots"]), answer(["red", "cyan"]), "Straße, 你好 🙂 redden ReD"):
        assert tokens.decode(tokens(text)["input_ids"]) == text
    assert len(tokens(question(["moon"]))["input_ids"]) == 6


def test_a_prompt_is_what_the_chat_template_writes(family):
    kind, tokens, vocabulary = family
    scenes, questions = draw_items(Split.control, 1, Form(2, 4), generator())
    prompts = lay_out(scenes, questions, vocabulary, Layout((0, 0), 1), torch.tensor([False]), generator())
    names = [THINGS[thing] for thing in questions.things[0, 0].tolist()]
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": question(names)}]
    text = tokens.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    text = text.replace(kind.cell_token, kind.cell_token * 4)
    colours = [tuple(COLOURS)[colour] for colour in questions.colours[0, 0].tolist()]
    assert prompts.tokens[0].tolist() == tokens(text + answer(colours))["input_ids"]
    labels = prompts.labels[0, 0]
    assert labels[-1] == vocabulary.end
    assert labels[-3:-1].tolist() == prompts.tokens[0, -2:].tolist()


@pytest.mark.parametrize("clip", [0, 1, 2, 4, 5])
def test_positions_of_clips_are_those_of_the_model_that_is_served(clip: int):
    """Five seconds in clips of so many, the last of which may be shorter; pictures where they are none."""
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Served

    kind, form, together = FAMILIES["qwen2_5_vl"], Form(5, 6), clip or 1
    tokens = kind.recipe.tokenizer()
    scenes = draw_scenes(1, form, STYLES[Split.multi], generator())
    questions = draw_questions(scenes, 1, False, 1.0, generator())
    layout = Layout((3, 0, 2, 0, 1), 3, clip=clip, stride=kind.stride)
    vocabulary = Words(tokens, kind.image, kind.cell_token)
    prompts = lay_out(scenes, questions, vocabulary, layout, torch.tensor([False]), generator())
    config = kind.recipe.model(tokens).config
    features = []
    for first in range(0, form.pages, together):
        seconds = min(together, form.pages - first)
        grid = torch.tensor([seconds, 2 * form.rows, 2 * form.columns])
        at = SimpleNamespace(offset=int(prompts.cells[first * form.cells]))
        data = {"video_grid_thw" if clip else "image_grid_thw": SimpleNamespace(data=grid)}
        features.append(SimpleNamespace(mm_position=at, modality="video" if clip else "image", data=data))
    model = SimpleNamespace(config=config)
    model.iter_mm_grid_thw = partial(Served.iter_mm_grid_thw, model)
    wanted, _ = Served.get_mrope_input_positions(model, prompts.tokens[0].tolist(), features)
    assert torch.equal(prompts.positions, wanted)


def test_a_model_learns_from_clips():
    torch.manual_seed(1)
    kind = FAMILIES["qwen2_5_vl"]
    tokens = kind.recipe.tokenizer()
    model = kind.recipe.model(tokens)
    draw(model.named_parameters())
    language, codes = kind.language(model), Codes(kind.recipe.hidden)
    stage = Stage(steps=12, sets=4, forms=(Form(4, 4),), questions=4, short=True, styles=(MOVING,), clips=(2, 4))
    parameters = [*language.text.parameters(), *model.lm_head.parameters(), *codes.parameters()]
    words_of = Words(tokens, kind.image, kind.cell_token)
    lines: list[dict[str, Any]] = []
    for steps in (1, 12):
        state = Progress()
        taught = replace(stage, steps=steps)
        settings = Settings(warm_up=2)
        lines += train(
            language, codes, words_of, parameters, (taught,), settings, state, lambda *_: None, stride=kind.stride
        )
    assert lines[0]["clip"] in (2, 4)
    assert lines[1]["loss"] < 0.7 * lines[0]["loss"]


def test_only_families_whose_clips_are_laid_out_are_trained_on_them(tmp_path: Path):
    with pytest.raises(ValueError, match="clips of llava are not laid out for training; those of qwen2_5_vl are"):
        Refining.begin("llava", WEIGHTS / "llava", tmp_path, about="clips", again=True)


def test_questions_see_the_pages_and_themselves_only(family):
    _, _, vocabulary = family
    scenes = draw_scenes(1, Form(3, 4), STYLES[Split.multi], generator())
    questions = draw_questions(scenes, 3, False, 0.5, generator())
    for hidden in (False, True):
        prompts = lay_out(scenes, questions, vocabulary, Layout((2, 0, 1), 3), torch.tensor([hidden]), generator())
        sees, first = prompts.sees[0], prompts.first
        length = prompts.labels.shape[2]
        assert torch.equal(sees, sees.tril())
        assert sees[:first, :first].equal(torch.ones(first, first, dtype=torch.bool).tril())
        for number in range(3):
            rows = sees[first + number * length : first + (number + 1) * length]
            others = rows[:, first:].clone()
            others[:, number * length : (number + 1) * length] = False
            assert not others.any()
            cells = rows[0, prompts.cells].unflatten(0, (3, 4)).all(-1)
            asked = int(questions.pages[0, number, 0])
            assert cells.tolist() == [not hidden or page == asked for page in range(3)]
        assert (prompts.positions[:, first] == prompts.positions[:, first + length]).all()


def test_questions_without_an_answer_have_no_labels(family):
    _, _, vocabulary = family
    scenes = draw_scenes(20, Form(3, 12), STYLES[Split.frames], generator())
    questions = draw_questions(scenes, 8, False, 0.3, generator())
    _, labels = vocabulary.question(questions, short=False)
    assert not questions.asked.all()
    assert ((labels != IGNORED).any(-1) == questions.asked).all()


def test_phases_are_of_the_column_then_of_the_row():
    angles = phases((2, 3), 8).unflatten(0, (2, 3))
    assert angles.shape == (2, 3, 4)
    assert torch.equal(angles[1, 0, 0::2], torch.zeros(2))
    assert torch.equal(angles[0, 2, 1::2], torch.zeros(2))
    assert torch.allclose(angles[1, 2], torch.tensor([2.0, 1.0, 2.0 / 100, 1.0 / 100]))


@pytest.mark.parametrize("name", FAMILIES)
def test_stored_weights_are_loaded_as_they_are(name, tmp_path):
    kind = FAMILIES[name]
    tokens = kind.recipe.tokenizer()
    model = kind.recipe.model(tokens)
    for parameter in model.parameters():  # some come as whatever memory held
        torch.nn.init.normal_(parameter, generator=generator())
    kind.recipe.save(model, tokens, tmp_path)
    loaded = kind.recipe.load(tokens, tmp_path).state_dict()
    stored = {at: tensor.to(torch.bfloat16).float() for at, tensor in model.state_dict().items()}
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[at].float(), stored[at]) for at in stored if "position_ids" not in at)
