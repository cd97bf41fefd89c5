"""Words by which a request may depend on its pages' order: found in the languages with a list, feared in all others."""

# ruff: noqa: RUF001  (letters of many scripts, some of which look like Latin ones)
from __future__ import annotations

import time

import numpy as np
import pytest

from serving.api.order_words import dependence
from serving.loadtest.workloads import words


@pytest.mark.parametrize(
    "text",
    [
        "What changed between them?",
        "before and after: what is new?",
        "What was first?",
        "Which came first?",
        "What happens next?",
        "Look at #2",
        "Look at ②",
        "Answer for each image separately",
        "Give a JSON list with one entry per page",
        "(b) what colour?",
        "1. What is it?",
        "a) What is it?",
        "Is B newer?",
        "What colours, respectively?",
        "Compare the two.",
        "What order are they in?",
        "Was zeigt das zweite Bild?",
        "Was zeigt Bild 2?",
        "Was hat sich geändert?",
        "Beschreibe jede Seite einzeln",
        "Quelle est la deuxième image ?",
        "Qu'est-ce qui a changé ?",
        "Que montre l'image 2 ?",
        "¿Qué pasa después?",
        "Haz una lista de las páginas",
        "Cosa succede dopo?",
        "O que mudou?",
        "Wat is er veranderd?",
        "Co się zmieniło?",
        "Что изменилось?",
        "Что на картинке 2?",
        "Что было до этого?",
        "第二张图是什么？",
        "先看哪一页？",
        "図2には何がありますか？",
        "次に何が起こりますか？",
        "다음에 무슨 일이 일어나나요?",
        "두 번째 이미지는 무엇입니까?",
        "ماذا حدث بعد ذلك؟",
        "दूसरी तस्वीर में क्या है?",
    ],
)
def test_words_that_may_tell_an_order_are_found(text: str):
    assert "may tell of an order" in (dependence(["Hello.", text]) or "")


@pytest.mark.parametrize(
    "text",
    [
        "Mikä muuttui?",
        "Vad är på bilden?",
        "Hva er på bildet?",
        "Co je na obrázku?",
        "Resimde ne var?",
        "Mi van a képen?",
        "Apa isi gambar?",
        "Τι δείχνει η εικόνα;",
        "מה בתמונה?",
        "ในภาพมีอะไร",
        "Що на картинці?",
        "این تصویر چیست؟",
        "Zelgor plim draxet",
    ],
)
@pytest.mark.parametrize("before", [(), ("You are a helpful assistant. Answer the questions of the user.",)])
def test_a_language_without_a_list_may_tell_anything(text: str, before: tuple[str, ...]):
    assert dependence([*before, text]) is not None


@pytest.mark.parametrize(
    "text",
    [
        "What colour?",
        "Summarise the evidence",
        "Who signed the contract?",
        "What do these images show?",
        "Look at the following pages.",
        "In order to answer, read the documents.",
        "Which page mentions the contract? Does any image a user sent show it?",
        "What does the contract say first?",
        "Which documents after 2019 mention it?",
        "What does the contract of the last two years say at the top, on the left?",
        "How many items are in the order? Who signed the purchase order?",
        "What does the table say about revenue in 2021?",
        "Read the pages to the end, in any order.",
        "Which is newer?",
        "Well?",
        "?",
        "",
        "Was zeigt das Bild?",
        "Wer hat den Vertrag unterschrieben?",
        "Qui a signé le contrat ?",
        "¿Quién firmó el contrato?",
        "Chi ha firmato il contratto?",
        "Quem assinou o contrato?",
        "Wie heeft het contract ondertekend?",
        "Kto podpisał umowę?",
        "Кто подписал договор?",
        "图中是什么颜色？",
        "谁签了合同？",
        "誰が契約書に署名しましたか？",
        "누가 계약서에 서명했습니까?",
        "من وقع على العقد؟",
        "अनुबंध पर किसने हस्ताक्षर किए हैं?",
    ],
)
def test_plain_questions_leave_it_free(text: str):
    assert dependence([text]) is None


def test_the_load_tests_questions_leave_it_free():
    random = np.random.default_rng(0)
    assert not any(dependence([words(random, count)]) for count in (4, 12) for _ in range(200))


@pytest.mark.parametrize(
    "text",
    ["in the order ", "x", "keep", "first ", " ", "1 ", "( ", "A ", "after a ", "è", "图", "один ", "#"],
)
def test_long_text_costs_no_time(text: str):
    began = time.process_time()
    dependence([(text * (1 << 16))[: 1 << 16]])
    assert time.process_time() - began < 4
