"""The demo of texts: a real language model and three short notes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from infra.models import fetch
from serving.cli.demo import Answer, Demo, ask, compare, file_part, open_client, show, wait_until_formed

NOTES = {
    "library.txt": "Library. The library is on Mill Street, beside the bakery. It opens at nine in the morning and "
    "closes at six in the evening. It has forty thousand books and a reading room that looks over the river. The "
    "librarian is Martha Keller.\n",
    "ferry.txt": "Ferry. The ferry leaves from pier four every two hours, from early in the morning until late in the "
    "evening. The journey to the island takes forty minutes. The captain of the ferry is Peter Lund.\n",
    "museum.txt": "Museum. The museum is in the old brewery, and it has a room about bees, where one can look into a "
    "hive through a wall of glass. The museum is closed on Mondays. The director of the museum is Clara Voss.\n",
}


@dataclass(frozen=True)
class Question:
    """A question about the notes, and the words that a right answer has."""

    text: str
    answer: str


FIRST = Question("Question: On which day is the museum closed?", "Monday")
SECOND = Question("Question: Who is the director of the museum?", "Clara Voss")


class Texts(Demo):
    """SmolLM2-135M-Instruct on three text files."""

    title = "SmolLM2-135M-Instruct"
    how_to_go_on = """
your own text, while a server runs (`make demo MODEL=smollm2 KEEP=1`, or `make serve MODEL=smollm2`):
  curl {url}/v1/files -F purpose=user_data -F file=@notes.txt
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{"model": "{model}", "messages": [
    {{"role": "user", "content": [{{"type": "file", "file": {{"file_id": "file-..."}}}},
                                {{"type": "text", "text": "Question: ...?"}}]}}]}}'"""

    def model(self) -> dict[str, Any]:
        return {"path": fetch("smollm2"), "dtype": "float32", "max_model_len": 4096}

    def converse(self, console: Console, url: str, model: str) -> bool:
        client = open_client(url)
        files = [
            client.files.create(file=(name, note.encode()), purpose="user_data").id for name, note in NOTES.items()
        ]
        console.print(f"uploaded three texts: {', '.join(NOTES)}\n")
        one, two, three = map(file_part, files)
        ask(client, model, ["Hello!"], mode="off")  # the engines' first forwards are slower
        first = ask(client, model, [one, two, three, FIRST.text])
        right = _show(console, "first request: library, ferry, museum", first, FIRST)
        wait_until_formed()
        second = ask(client, model, [two, one, three, SECOND.text])
        right &= _show(console, "second request: ferry, library, museum", second, SECOND)
        return compare(console, first, second) and right


def _show(console: Console, title: str, answer: Answer, question: Question) -> bool:
    return show(console, title, question.text, answer, question.answer, right=question.answer in answer.text)
