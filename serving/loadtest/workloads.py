"""Workloads of load tests: seeded generators of chat requests over drawn pages.

A workload is made for one run and asked for its requests in order, because some of them depend on those before. The
same settings and seed give the same requests, pixel by pixel, on every machine and for every server.

| name          | shape                                                                | what recurs                |
|---------------|----------------------------------------------------------------------|----------------------------|
| `mrag`        | k of N pages, Zipf-distributed, then a question (multimodal RAG)     | pages, in any order        |
| `agent`       | sessions: the last screenshots, actions between them, looks back     | a window that slides       |
| `turns`       | chats turn by turn, images in some turns, answers sent back          | all that was said before   |
| `image-first` | one image, and a question that is new                                | what a prompt begins with  |
| `chat`        | text and images from one gallery interleaved (mpic.md, Figure 1)     | images behind other words  |
| `novel`       | k of N pages, a set that never came before (LMCache issue 4663)      | pages; never their company |
| `one-shot`    | images that nobody has seen before or will again                     | nothing                    |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from infra.reference.pictures import grid_picture
from infra.reference.scenes import NOWHERE
from infra.reference.vocabulary import COLOURS, THINGS

CELL = 28  # pixels of a cell's side: one vision token of the Qwen-VL families
# None names a page by its place, or tells of an order ("after", "every"): pages then keep theirs in services that
# choose it, and in languages that these do not know. So a sentence has common English words in it.
_COMMON = ["about", "at", "for", "from", "in", "into", "is", "of", "on", "the", "to", "with"]
_WORDS = [
    "amber", "answer", "arrow", "berry", "bottle", "bright", "button", "colour", "column", "corner", "engine",
    "fabric", "forest", "fresh", "garden", "group", "harbour", "known", "large", "letter", "light", "little", "margin",
    "matter", "metal", "napkin", "object", "orange", "paint", "paper", "pencil", "place", "plain", "point",
    "question", "reader", "river", "shown", "side", "small", "state", "stone", "table", "title", "under", "value",
    "where", "which", "while", "whole",
]  # fmt: skip


class WorkloadError(ValueError):
    """A workload's name or parameter that is wrong; the message names it."""


@dataclass(frozen=True)
class Picture:
    """A page by its number; the same seed and number give the same pixels.

    Columns and rows are of cells.
    """

    seed: int
    number: int
    columns: int
    rows: int

    def draw(self) -> Image.Image:
        """The page as RGB, `CELL` pixels to a cell's side."""
        random = np.random.default_rng([self.seed, 0x9A6E, self.number])
        cells = self.columns * self.rows
        things = torch.from_numpy(random.integers(len(THINGS), size=cells))
        colours = torch.from_numpy(random.integers(len(COLOURS), size=cells))
        return grid_picture(things, colours, torch.full_like(things, NOWHERE), self.columns, CELL)


@dataclass(frozen=True)
class Reply:
    """The server's answer to an earlier request of the workload, sent back.

    `request`: its number, from 0 on. `instead`: what is sent back if it was not answered.
    """

    request: int
    instead: str


Part = str | Picture | Reply  # a reply is a message by itself
Message = tuple[str, tuple[Part, ...]]  # role and parts
Messages = tuple[Message, ...]


@dataclass(frozen=True)
class Ask:
    """One request: its messages, the most tokens that its answer may have, and its number.

    `conversation`: name of what it goes on with; "": of nothing.
    """

    messages: Messages
    max_tokens: int
    number: int
    conversation: str = ""


class Workload(BaseModel, ABC):
    """Base of all workloads. Fields are the parameters that `--set NAME=VALUE` takes."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: ClassVar[str]
    about: ClassVar[str]
    sends_back: ClassVar[bool] = False  # whether answers are part of later requests (`Reply`)

    seed: int = Field(0, ge=0, description="Of everything that is drawn: pages, words, choices.")
    columns: int = Field(16, ge=2, description="Cells of a page across; a cell is 28 pixels, one Qwen-VL token.")
    rows: int = Field(16, ge=2, description="Cells of a page down.")
    max_tokens: int = Field(16, ge=1, description="Longest answer.")
    system: str = Field("", description="System message of every request; empty: none.")

    _number: int = PrivateAttr(0)

    def ask(self, images: int | None = None, max_tokens: int | None = None) -> Ask:
        """The next request; `images` and `max_tokens` replace what the parameters say, for this one."""
        number, self._number = self._number, self._number + 1
        random = np.random.default_rng([self.seed, 0x57E9, number])
        messages = self._messages(number, random, images)
        leading = ((("system", (self.system,)),) if self.system else ()) + messages
        return Ask(leading, max_tokens or self.max_tokens, number, self._conversation(number))

    @abstractmethod
    def _messages(self, number: int, random: np.random.Generator, images: int | None) -> Messages:
        """Role and parts of every message of request `number`.

        `images`: how many, where the parameters do not say.
        """

    def _conversation(self, number: int) -> str:
        """Name of the conversation that request `number` goes on with."""
        return ""

    def _page(self, number: int) -> Picture:
        return Picture(self.seed, number, self.columns, self.rows)

    def describe(self) -> dict[str, Any]:
        """Name and parameters, for reports."""
        return {"name": self.name, **self.model_dump()}


def words(random: np.random.Generator, count: int) -> str:
    """A sentence of so many words, for text that no other request has."""
    drawn = random.integers(len(_COMMON) * len(_WORDS), size=count)
    known = (_WORDS if place % 4 else _COMMON for place in range(count))
    return " ".join(some[i % len(some)] for some, i in zip(known, drawn, strict=True)) + "."


class _Pool(Workload):
    """Workloads that take k of N pages."""

    pages: int = Field(20, ge=1, description="Pages that there are.")
    retrieved: int = Field(3, ge=1, description="Pages of a request.")
    question_words: int = Field(12, ge=1, description="Words of the question behind the pages; no two are the same.")

    def _asked(self, chosen: np.ndarray, random: np.random.Generator) -> Messages:
        pages = (self._page(int(page)) for page in chosen)
        return (("user", (*pages, words(random, self.question_words))),)

    def _count(self, images: int | None) -> int:
        return min(images or self.retrieved, self.pages)


class Mrag(_Pool):
    """Multimodal RAG: Zipf over N pages, k retrieved, the order free."""

    name = "mrag"
    about = "k of N pages, popular ones more often, in the order of a retriever's scores, then a question"

    zipf: float = Field(
        1.0, ge=0, le=50, description="Exponent, up to 50: page i is drawn with weight 1 / i^zipf; 0: all alike."
    )

    def _messages(self, number: int, random: np.random.Generator, images: int | None) -> Messages:
        weights = np.arange(1, self.pages + 1) ** -self.zipf
        chosen = random.choice(self.pages, self._count(images), replace=False, p=weights / weights.sum())
        return self._asked(random.permutation(chosen), random)


class Novel(_Pool):
    """Sustained novel recombination: pages all seen before, never together in this way."""

    name = "novel"
    about = "k of N pages, uniformly, each time a set and an order that never came before (LMCache issue 4663)"

    pages: int = Field(40, ge=2, description="Pages that there are.")
    retrieved: int = Field(4, ge=1, description="Pages of a request.")

    _seen: set[tuple[int, ...]] = PrivateAttr(default_factory=set)

    def _messages(self, number: int, random: np.random.Generator, images: int | None) -> Messages:
        count = self._count(images)
        for _ in range(1000):
            chosen = random.choice(self.pages, count, replace=False)
            if (key := tuple(sorted(chosen.tolist()))) not in self._seen:
                self._seen.add(key)
                return self._asked(chosen, random)
        raise WorkloadError(f"novel: hardly a set of {count} of {self.pages} pages is left; take more pages")


class Agent(Workload):
    """Sliding-window agent: screenshots with its actions between them, the oldest leaving."""

    name = "agent"
    about = "sessions in turn; each step adds a screenshot behind the last action, and the oldest leaves the window"

    sessions: int = Field(4, ge=1, description="Sessions that take steps in turn.")
    steps: int = Field(40, ge=1, description="Steps until a session ends and a new one takes its place.")
    window: int = Field(3, ge=1, description="Last screenshots of a step.")
    lookback: float = Field(0.1, ge=0, le=1, description="Share of steps that ask for an older screenshot once more.")
    shortest_action: int = Field(20, ge=1, description="Words of the shortest action, each about a token.")
    longest_action: int = Field(200, ge=1, description="Words of the longest action.")
    keep_actions: bool = Field(False, description="Keep the actions of screenshots that have left the window.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.longest_action < self.shortest_action:
            raise ValueError(f"longest_action is {self.longest_action}, shortest_action {self.shortest_action}")
        return self

    def _messages(self, number: int, random: np.random.Generator, images: int | None) -> Messages:
        (session, step), window = self._place(number), images or self.window
        start = max(0, step + 1 - window)
        task = f"task: {words(self._of(session), 12)}"
        messages: list[Message] = [("user", (task,)), ("assistant", ("ready",))]  # the same at every step
        for i in range(0 if self.keep_actions else start, step + 1):
            messages.append(("user", (self._screen(session, i), f"step {i}") if i >= start else (f"step {i}, left",)))
            older = self._looks_back(session, i, window) if i >= start else None
            if older is not None:
                messages.append(("assistant", (f"show step {older} once more",)))
                messages.append(("user", (self._screen(session, older), f"step {older}")))
            if i < step:
                messages.append(("assistant", (self._action(session, i),)))
        return tuple(messages)

    def _place(self, number: int) -> tuple[int, int]:
        """Session and step of a request."""
        turn, place = divmod(number, self.sessions)
        life, step = divmod(turn, self.steps)
        return life * self.sessions + place, step

    def _conversation(self, number: int) -> str:
        """See the base."""
        return f"{self.name}-{self.seed}-{self._place(number)[0]}"

    def _of(self, session: int, step: int = 0, what: int = 0) -> np.random.Generator:
        return np.random.default_rng([self.seed, 0xA9E7, session, step, what])

    def _screen(self, session: int, step: int) -> Picture:
        return self._page(session * self.steps + step)

    def _action(self, session: int, step: int) -> str:
        random = self._of(session, step, 1)
        return words(random, int(random.integers(self.shortest_action, self.longest_action + 1)))

    def _looks_back(self, session: int, step: int, window: int) -> int | None:
        """Step whose screenshot, out of the window by then, a step asks for; None: it asks for none."""
        random, gone = self._of(session, step, 2), step + 1 - window
        return int(random.integers(gone)) if gone > 0 and random.random() < self.lookback else None


class Turns(Workload):
    """Chats turn by turn: every request holds what was said before, answers included."""

    name = "turns"
    about = "chats in turn, images in some of their turns; the server's own answers are sent back"
    sends_back = True

    max_tokens: int = Field(128, ge=1, description="Longest answer, which later turns send back.")
    chats: int = Field(8, ge=1, description="Chats that take turns; a chat's next request waits for its last answer.")
    turns: int = Field(8, ge=1, description="Turns until a chat ends and a new one takes its place.")
    image_turns: int = Field(2, ge=0, description="Turns of a chat that bring an image, spread from the first on.")
    text_words: int = Field(24, ge=1, description="Words of each of the user's turns.")

    def _messages(self, number: int, random: np.random.Generator, images: int | None) -> Messages:
        """See the base; a trace's number of images does not count, later turns would contradict earlier ones."""
        place, round_ = number % self.chats, number // self.chats
        life, turn = divmod(round_, self.turns)
        chat, count = self._chat(number), min(self.image_turns, self.turns)
        pictured = {i * self.turns // count: i for i in range(count)}
        messages: list[Message] = []
        for i in range(turn + 1):
            own = np.random.default_rng([self.seed, 0x7012, chat, i])
            image = (self._page(chat * count + pictured[i]),) if i in pictured else ()
            messages.append(("user", (*image, words(own, self.text_words))))
            if i < turn:
                asked = (life * self.turns + i) * self.chats + place
                messages.append(("assistant", (Reply(asked, words(own, self.max_tokens)),)))
        return tuple(messages)

    def _chat(self, number: int) -> int:
        return number // (self.chats * self.turns) * self.chats + number % self.chats

    def _conversation(self, number: int) -> str:
        """See the base."""
        return f"{self.name}-{self.seed}-{self._chat(number)}"


class ImageFirst(Workload):
    """One image, then a question that is new: the home ground of prefix caches."""

    name = "image-first"
    about = "the same images in front of every request, and a question that nobody asked before"

    images: int = Field(1, ge=1, description="Images that every request begins with.")
    question_words: int = Field(12, ge=1, description="Words of the question.")

    def _messages(self, number: int, random: np.random.Generator, images: int | None) -> Messages:
        pages = (self._page(page) for page in range(images or self.images))
        return (("user", (*pages, words(random, self.question_words))),)


class Chat(Workload):
    """Multi-image chat: text and images, turn after turn, from a gallery shared by all."""

    name = "chat"
    about = "conversations over a gallery, text and images interleaved, no two with the same words (mpic.md, Figure 1)"

    gallery: int = Field(16, ge=1, description="Images that there are.")
    images: int = Field(3, ge=1, description="Most images of a conversation, from 1 on.")
    turns: int = Field(2, ge=1, description="Most turns of the user; earlier answers are part of the request.")
    text_words: int = Field(12, ge=1, description="Words around every image.")

    def _messages(self, number: int, random: np.random.Generator, images: int | None) -> Messages:
        most = min(self.images, self.gallery)
        count = min(images, self.gallery) if images else int(random.integers(1, most + 1))
        chosen = random.choice(self.gallery, count, replace=False).tolist()
        turns = int(random.integers(1, min(self.turns, count) + 1))
        messages: list[Message] = []
        for turn, shown in enumerate(np.array_split(np.array(chosen), turns)):
            if turn:
                messages.append(("assistant", (words(random, self.text_words),)))
            parts: list[Part] = []
            for image in shown.tolist():
                parts += [words(random, self.text_words), self._page(image)]
            messages.append(("user", (*parts, words(random, self.text_words))))
        return tuple(messages)


class OneShot(Workload):
    """Images that are seen once: nothing to reuse."""

    name = "one-shot"
    about = "images that nobody has seen before or will again, and a question"

    images: int = Field(1, ge=1, description="Images of a request.")
    question_words: int = Field(12, ge=1, description="Words of the question.")

    _drawn: int = PrivateAttr(0)

    def _messages(self, number: int, random: np.random.Generator, images: int | None) -> Messages:
        count = images or self.images
        first, self._drawn = self._drawn, self._drawn + count
        pages = (self._page(first + i) for i in range(count))
        return (("user", (*pages, words(random, self.question_words))),)


WORKLOADS: dict[str, type[Workload]] = {
    kind.name: kind for kind in (Mrag, Agent, Turns, ImageFirst, Chat, Novel, OneShot)
}


def workload(name: str, **parameters: Any) -> Workload:
    """A workload by name, its parameters as numbers or as text.

    Raises:
        WorkloadError: no such workload, or a parameter that it does not have or cannot take.
    """
    if name not in WORKLOADS:
        raise WorkloadError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")
    try:
        return WORKLOADS[name](**parameters)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise WorkloadError(f"{name}: {'; '.join(problems)}; see `orbitserve loadtest workloads`") from error
