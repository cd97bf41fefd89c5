"""Words of order: by these a request may depend on the order of its pages.

| what a text has                                        | example                                 | the order |
|--------------------------------------------------------|-----------------------------------------|-----------|
| a word of order, comparison, change or listing         | "next", "what changed", "for each page" | is kept   |
| a number, letter or bullet that may point at a page    | "#2", "(b)", "1."                       | is kept   |
| neither, in a known language                           | "Who signed the contract?"              | is free   |
| words of a language or script without a list           | "Mikä muuttui?"                         | is kept   |

A list of words is a row of `_LANGUAGES`: common words and letters, by which a text is known to be of that language, and
words of order. `*` ends a word's beginning. A language that is missing costs nothing but freedom.
"""

# ruff: noqa: RUF001  (letters of many scripts, some of which look like Latin ones)
from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_KNOWN_SHARE = 0.2  # of a text's words that must be common ones of one language
_FEW = 3  # words; fewer may hold no common one in any language
_WORD = re.compile(r"[^\W\d_]+")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True)
class _Language:
    """A language in Latin letters: its common words, letters beyond a to z, and words of order."""

    common: frozenset[str]
    letters: frozenset[str]
    words: frozenset[str]
    beginnings: tuple[str, ...]

    @classmethod
    def of(cls, common: str, letters: str, order: str) -> _Language:
        """From texts of words."""
        begun = tuple(word[:-1] for word in order.split() if word.endswith("*"))
        whole = frozenset(word for word in order.split() if not word.endswith("*"))
        own = frozenset("abcdefghijklmnopqrstuvwxyz" + letters)
        return cls(_words(common), own, whole, begun)

    def order_word(self, words: Iterable[str]) -> str | None:
        """First of these words that is one of order."""
        return next((word for word in words if word in self.words or word.startswith(self.beginnings)), None)


_LANGUAGES = {
    "en": _Language.of(
        common="a about all also an and any are as at be been but by can caption could describe did do does explain for"
        " from go had has have he hello her hi his how i if image images in into is it its kindly look may me mention"
        " mentioned more my name no not of on only or our out page pages picture pictures please read say says see she"
        " should show shown shows sign signed so some summarise summarize summary tell text than thank thanks that the"
        " their them there these they this those to translate up use was we well were what when where which while who"
        " whom whose why will with word words would yes you your document documents total",
        letters="éèêïñç",
        order="before after afterward* beforehand then next previous* preceding prior former latter first* second"
        " secondly third* fourth fifth sixth seventh eighth ninth tenth last lastly final* initial* earlier earliest"
        " later latest chang* between compar* contrast* versus vs differ* respective* each every individual* separate*"
        " per list lists listing enumerat* json array arrays bullet* numbered numbering rank* sort sorted sorting"
        " sequen* success* consecutive* chronolog* timeline step steps stage stages progress* evolv* evolution happen*"
        " follows followed continu* story become* became added removed replaced disappear* appeared moved updated"
        " revis* version versions other others again anymore already originally opposite revers* middle index"
        " position* ordering reorder* correspond* trend*",
    ),
    "de": _Language.of(
        common="aber alle auch auf aus bei bild bilder bildern bitte da das dem den der des die diese diesem diesen"
        " dieser dieses du ein eine einem einen einer er es für gibt hat ich ihr im in ist kann man mir mit nicht oder"
        " sein seite seiten sich sie sind steht und uns unterschrieben von was welche welcher welches wem wen wer wie"
        " wie wieviel wir wird wo zeigen zeigt zu zum zur",
        letters="äöüß",
        order="erst* zweit* dritt* viert* fünft* sechst* letzt* nächst* vorig* vorher* nachher danach davor vor nach"
        " zuerst zuletzt dann früher* später* folgt folgend* reihenfolge ander* änder* geändert* verändert* vergleich*"
        " unterschied* jeweil* jede* einzeln* liste* aufzähl* nummer* links rechts linke* rechte* mittler* oben unten"
        " zwischen neu neuer* wechsel* geschieht passiert json pro",
    ),
    "fr": _Language.of(
        common="a au aux avec ce ces cette combien comment dans de des dit document du elle en est et il ils image"
        " images je la le les leur montre ne nous on ou où page pages par pas pour quand que quel quelle quelles quels"
        " qui quoi résume résumez sa se ses signé son sont sur un une vous y",
        letters="àâæçéèêëîïôœùûüÿ",
        order="premi* second* deuxi* troisi* quatri* cinqui* derni* suivant* précéd* avant après ensuite puis d'abord"
        " abord ordre autre* chang* modifi* compar* différen* chaque chacun* liste* numéro* gauche droite milieu entre"
        " respectiv* nouveau* nouvel* évolu* passe passé json haut bas fin début",
    ),
    "es": _Language.of(
        common="a al aparece como con cuál cuáles cuándo cuánto cuántos de del dice donde dónde el ella en es esta"
        " estas este esto estos firmó hay imagen imágenes la las lo los muestra muestran no o para página páginas por"
        " que qué quien quién resume se sobre son su sus un una y",
        letters="áéíñóúü",
        order="primer* segund* tercer* cuart* quint* últim* ultim* siguiente* próxim* proxim* anterior* antes después"
        " despues luego orden otr* cambi* modific* compar* diferen* cada lista* número* numero* izquierd* derech* medio"
        " entre respectiv* nuev* ocurr* sucede* pasa pasó json arriba abajo final*",
    ),
    "it": _Language.of(
        common="al alla che chi come con cosa cui da dal dalla dei del della delle di dove e ed firmato gli ha i il"
        " immagine immagini in la le lo mostra mostrano nel nella nelle non o pagina pagine per qual quale quali quando"
        " quanto questa queste questi questo riassumi si sono su sul sulla un una uno è",
        letters="àèéìíîòóùú",
        order="prim* second* terz* quart* quint* ultim* seguent* successiv* prossim* precedent* dopo poi ordine altr*"
        " cambi* modific* confront* paragon* differen* ogni ciascun* lista* elenc* numero* sinistr* destr* mezzo tra"
        " fra rispettiv* nuov* succed* json sopra sotto fine",
    ),
    "pt": _Language.of(
        common="a ao as assinou com como da das de diz do dos e em essa esse esta estas este estes foi há imagem"
        " imagens mostra mostram na nas no não nos o onde os ou para página páginas pela pelo por qual quais quando"
        " quanto que quem resuma se seu são sua um uma é",
        letters="áâãàçéêíóôõúü",
        order="primeir* segund* terceir* quart* quint* últim* ultim* próxim* proxim* seguinte* anterior* antes depois"
        " ordem outr* mud* alter* modific* compar* diferen* cada list* número* numero* esquerd* direit* meio entre"
        " respectiv* respetiv* nov* acontec* json acima abaixo final*",
    ),
    "nl": _Language.of(
        common="aan afbeelding afbeeldingen als bij daar dat de deze die dit door een en er foto heeft het hoe hoeveel"
        " ik in is je kan met naar niet of ondertekend onze op over pagina's staan staat te toont uit van voor waar wat"
        " we welk welke wie wordt ze zien zijn",
        letters="ëïéèöüá",
        order="eerst* tweed* derd* vierd* vijfd* laatst* volgend* vorig* voorafgaand* na nadien daarna daarvoor vóór"
        " ervoor erna eerder* later* dan volgorde ander* verander* gewijzigd* vergelijk* verschil* elk elke ieder* per"
        " lijst* nummer* links rechts linker* rechter* midden tussen respectievelijk* nieuw* gebeurt json boven onder",
    ),
    "pl": _Language.of(
        common="ale być co czy dla do gdzie i ile jak jaka jaki jakie jest kiedy kto która które który lub ma mi na"
        " nie o obraz obrazach obrazie od oraz podpisał przez się strona stronach stronie są ta te tego tej ten to"
        " tych w we widać z za ze",
        letters="ąćęłńóśźż",
        order="pierwsz* drug* trzec* czwart* piąt* ostatn* następn* nastepn* kolejn* poprzedn* przed po potem później*"
        " pozniej* najpierw wcześniej* wczesniej* kolejno* inn* zmieni* zmian* porówn* porown* różn* rozn* każd* kazd*"
        " list* wypisz* numer* lew* praw* środk* srodk* między miedzy odpowiednio now* dzieje json",
    ),
}
# Common words of languages without a list that the ones above share none of.
_UNLISTED = _words(
    "och är att på inte vad vilken vilket bilden bilder og ikke hva hvad hvilken hvilket bildet billedet det mitä missä"
    " mikä mitkä kuka onko kuvassa kuva sivulla nedir hangi bir resimde sayfa imaginea pagini și sau apa yang gambar"
    " halaman siapa què amb imatge quina který která které obrázku stránce hogy kép képen egy što koja koji slika slici"
) - frozenset[str]().union(*(language.common for language in _LANGUAGES.values()))

_SCRIPTS = {  # letters of a script, letters of other languages in it, common words (None: it is one language's)
    "ru": (
        re.compile(r"[\u0400-\u04ff]"),
        re.compile(r"[^а-яё\W\d_a-z]"),
        re.compile(r"\b(?:в|и|на|что|кто|как|это|эт\w+|по|о|об|из|с|у|к|где|како\w*|какие|сколько|не|для|есть)\b"),
    ),
    "ar": (
        re.compile(r"[\u0600-\u06ff]"),
        re.compile(r"[\u0679-\u06d3]"),
        re.compile(r"\b(?:ما|ماذا|من|في|على|هل|هذه|هذا|هذان|كم|أين|متى|كيف|إلى|عن|هو|هي|الصور\w*|الصفح\w*)\b"),
    ),
    "hi": (
        re.compile(r"[\u0900-\u097f]"),
        re.compile(r"ळ|आहे|काय"),
        re.compile(r"है|हैं|क्या|में|कौन|किस|का |की |के "),
    ),
    "zh": (re.compile(r"[\u3400-\u9fff]"), None, None),
    "ja": (re.compile(r"[\u3040-\u30ff]"), None, None),
    "ko": (re.compile(r"[\uac00-\ud7af\u1100-\u11ff\u3130-\u318f]"), None, None),
}
_ORDER_IN_SCRIPTS = re.compile(
    r"\b(?:перв|втор|трет|четв[её]рт|пят|последн|последова|следующ|следует|предыдущ|прежн|сначала|потом|затем|раньше"
    r"|ранее|позже|после|перед|до\b|порядк|порядок|очеред|кажд|спис[ок]|перечисл|измени|измене|поменя|меня|сравни|разни"
    r"|отлич|различ|лев|прав|номер|друг|между|нов|соответ|происход)"
    r"|أول|اول|الأولى|ثان|ثالث|رابع|خامس|أخير|اخير|آخر|اخر|تالي|سابق|قبل|بعد|ترتيب|كل |لكل|قائم|تغي|قارن|مقارن|فرق"
    r"|اختلا|يمين|يسار|رقم|بين|جديد|يحدث|حدة"
    r"|पहल|दूसर|तीसर|चौथ|पाँचव|पांचव|आखिर|आख़िर|अंतिम|अगल|पिछल|बाद|क्रम|प्रत्येक|हर|सूची|बदल|तुलना|अंतर|फर्क|फ़र्क"
    r"|बाएं|दाएं|बायी|दायी|नंबर|संख्या|अलग|बीच|नया|नई"
    r"|[前后後先次首末左右另每各逐列序順顺变變変化比差异異別别区區接继繼续續第再新间間旧舊逆]|不同|更改|改动|清单|清單|数组|步骤"
    r"|最初|最後|番目|それぞれ|ごと|毎|一覧|リスト|違い|枚目|目の|もう一|[一二三四五六七八九十\d][つ张張页頁幅个個号號枚本]"
    r"|[图圖页頁][一二三四五六七八九十]"
    r"|첫|처음|마지막|다음|이전|전에|후에|순서|먼저|나중|각각|각 |마다|목록|리스트|번째|번 |변경|변화|달라|바뀌|바뀐"
    r"|비교|차이|왼쪽|오른쪽|둘째|셋째|사이|새로"
)

_HARMLESS = re.compile(  # taken out before words of order are looked for
    r"\bin order to\b|\bin any order\b|\b(?:purchase|court|money) orders?\b|\border (?:form|number|date)s?\b"
    r"|\b(?:after|before|since|between|until|from) (?:\w+ )?\d{4}(?: (?:and|to) (?:\w+ )?\d{4})?\b"
    r"|\b(?:first|last|next|previous|past) (?:\w+ )?(?:year|month|week|day|quarter|decade|century|centurie|name)s?\b"
    r"|\b(?:says?|said|mentions?|states?) first\b|\bother than\b"
    r"|\bper (?:cent|year|month|week|day|hour|annum|capita|person|unit|se)\b"
    r"|\b(?:price|packing|mailing|parts|shopping|waiting) lists?\b",
    re.IGNORECASE,
)
_POINTERS = re.compile(
    r"[#№] ?\d"
    r"|(?<!\w)\((?:[A-Za-z]|[ivx]{2,4}|\d{1,2})\)"  # (b), but not page(s)
    r"|(?:^|\s)(?:\d{1,2}|[A-Za-z])[.):](?=\s|$)"  # 1. or b)
    r"|(?<![\w'’.-])[B-H](?![\w'’.&-])|(?<![\w'’.-])A (?:or|and|vs|to)\b"
    r"|\b(?:[Nn]o|[Nn]r|[Nn]um|[Nn][º°])\.? ?\d"
    r"|(?<![\d.,])\d{1,2}(?:st|nd|rd|th|ers?|[èe]re|[èe]me|e|de|ste|te[nrs]?|[ºª°])\b"
    r"|\b(?:[Oo]ne by one|[Ss]tep by step|[Ss]ide by side|[Ii]n turn|[Oo]ver time)\b"
    r"|\b[Oo]ne (?:entry|line|row|sentence|answer|item|object|caption|word|paragraph|value|number)\b"
    r"|\b(?:[Ww]hat|[Ww]hich|[Tt]heir) order\b|\b[Oo]rder(?:ed)? (?:them|these|those|by)\b"
    r"|->|→"
)
_SMALL_NUMBER = re.compile(r"(?<![\d.,:/-])\d{1,2}(?![\d.,:/%-]\d|\d|%)")


def dependence(texts: Sequence[str]) -> str | None:
    """Reason to keep the order of pages that these are the texts about; None: there is none."""
    normal = [_normal(text) for text in texts]
    if (found := next(filter(None, map(_told, normal)), None)) is not None:
        return f"the text may tell of an order: {found!r}"
    if not _is_known(" ".join(normal), few=0) or not all(_is_known(text, _FEW) for text in normal):
        return "the text is in a language of which no words of order are known"
    return None


def _normal(text: str) -> str:
    return unicodedata.normalize("NFKC", _enclosed(text))


def _enclosed(text: str) -> str:
    """Text whose numbers in circles stay in brackets, which NFKC takes off."""
    return re.sub("[①-⑳]", lambda sign: f" #{ord(sign[0]) - ord('①') + 1} ", text)


def _told(text: str) -> str | None:
    """First words of order in a text, of the languages that it may be in."""
    text = _HARMLESS.sub(" ", " ".join(text.split()))
    if (pointer := _POINTERS.search(text)) or (pointer := _ORDER_IN_SCRIPTS.search(text.lower())):
        return pointer[0].strip()
    words = Counter(_WORD.findall(text.lower()))
    hits = _hits(words)
    for name, language in _LANGUAGES.items():
        if (name == "en" or hits[name]) and (found := language.order_word(words)):
            return found
    is_english = 0 < hits["en"] == max(hits.values())
    return None if is_english or not (number := _SMALL_NUMBER.search(text)) else number[0]


def _hits(words: Counter[str]) -> dict[str, int]:
    """By language, how many of a text's words are common in it."""
    return {name: sum(words[word] for word in language.common & words.keys()) for name, language in _LANGUAGES.items()}


def _is_known(text: str, few: int) -> bool:
    """True for a text in a language with a list. Of less than `few` words letters alone are looked at."""
    text = text.lower()
    rest = text
    for letters, foreign, common in _SCRIPTS.values():
        if letters.search(text):
            if (foreign and foreign.search(text)) or (common and not common.search(text)):
                return False
            rest = letters.sub(" ", rest)
    words = Counter(_WORD.findall(rest))
    total, others = words.total(), len(text) - len(rest.replace(" ", ""))
    if not words or (rest != text and total < others):
        return all(letter.isascii() for word in words for letter in word)
    if not _UNLISTED.isdisjoint(words):
        return False
    hits, letters_used = _hits(words), frozenset[str]().union(*words)
    fits = [hits[name] for name, language in _LANGUAGES.items() if letters_used <= language.letters]
    return bool(fits) and (total < few or max(fits) >= _KNOWN_SHARE * total)
