"""The languages of the book: the one list that everything else goes through.

The first is the one whose notebooks are executed; the others get its outputs. A language needs
pages in ``book/CODE``, notebooks in ``notebooks/CODE``, and an entry here.
"""

from typing import NamedTuple


class Language(NamedTuple):
    """A language, and what differs in it besides the pages.

    Args:
        code: ISO 639-1, as in the names of folders and addresses.
        english: its English name, for messages of the build.
        name: its own name, as a reader who does not read the other language looks for it.
        title: the book's title in it.
        subtitle: what the book is, for a cover.
        contents: the title of a table of contents.
        captions: the part titles of ``_toc.yml``, where they are not as there.
        fold: the labels of folded cells (closed, open), by what is folded; words that tell apart
            what would have the same label.
        not_found: what the page says that stands for an address without a page.
        recorded: the title of what another machine recorded; a format of its stamp.
        predict: the words around a question whose answer the reader guesses first.
        config: values of Sphinx.
    """

    code: str
    english: str
    name: str
    title: str
    subtitle: str
    contents: str
    captions: dict[str, str]
    fold: dict[str, str | list[str]]
    not_found: str
    recorded: str
    predict: dict[str, str | list[str]]
    config: dict[str, object]


LANGUAGES = (
    Language(
        code="en",
        english="English",
        name="English",
        title="Naranhi",
        subtitle="A book on distributed training that runs",
        contents="Contents",
        captions={},
        fold={
            "content": ["Show the answer", "Hide the answer"],
            "answer": ["Show the answer to exercise {}", "Hide the answer to exercise {}"],
            "given": ["Show the set-up of exercise {}", "Hide the set-up of exercise {}"],
            "set-up": ["Show the set-up", "Hide the set-up"],
            "check": ["Show the check", "Hide the check"],
            "drawing": ["Show the code of {}", "Hide the code of {}"],
            "exercise": "exercise {}",
            "part": "{} of {}",
            "output": ["Show the output", "Hide the output"],
            "outputs": ["Show the output", "Hide the output"],
        },
        not_found="There is no page at this address. The book begins here:",
        recorded="On {device} ({date}, torch {torch}, {commit})",
        predict={
            "guess": "Your guess",
            "slider": "Your guess, on a scale",
            "show": "Show",
            "skip": "Show without a guess",
            "range": "between {} and {}",
            "columns": ["Chapter", "Questions", "Guessed", "Close"],
            "clear": "Delete my guesses",
        },
        config={},
    ),
    Language(
        code="ko",
        english="Korean",
        name="한국어",
        title="나란히",
        subtitle="직접 실행하며 배우는 분산 학습",
        contents="차례",
        captions={
            "Start here": "시작하며",
            "Communication": "통신",
            "Pipelines": "파이프라인",
            "Data, tensors, sequences, experts": "데이터, 텐서, 시퀀스, 전문가",
            "In practice": "실전",
            "Reference": "찾아보기",
        },
        fold={
            "content": ["답 펼치기", "답 접기"],
            "answer": ["{}번 답 펼치기", "{}번 답 접기"],
            "given": ["{}번 준비 코드 펼치기", "{}번 준비 코드 접기"],
            "set-up": ["준비 코드 펼치기", "준비 코드 접기"],
            "check": ["검사 코드 펼치기", "검사 코드 접기"],
            "drawing": ["{} 코드 펼치기", "{} 코드 접기"],
            "exercise": "{}번",
            "part": "{}/{}",
            "output": ["출력 펼치기", "출력 접기"],
            "outputs": ["출력 펼치기", "출력 접기"],
        },
        not_found="이 주소에는 페이지가 없습니다. 책의 첫 페이지로 가 보세요.",
        recorded="{device}에서 실행한 결과 ({date}, torch {torch}, {commit})",
        predict={
            "guess": "내 예상",
            "slider": "눈금에서 고르는 예상",
            "show": "답 보기",
            "skip": "예상하지 않고 보기",
            "range": "{}에서 {} 사이",
            "columns": ["장", "질문", "예상한 것", "가깝게 맞힌 것"],
            "clear": "내 예상 지우기",
        },
        config={
            "language": "ko",
            "html_title": "나란히",
            "numfig_format": {"figure": "그림 %s", "table": "표 %s", "code-block": "코드 %s"},
            "togglebutton_hint": "눌러서 펼치기",
            "togglebutton_hint_hide": "눌러서 접기",
            "html_theme_options": {
                "search_bar_text": "책 안에서 찾기",
                "toc_title": "이 페이지의 차례",
            },
        },
    ),
)
EXECUTED = LANGUAGES[0].code
BY_CODE = {language.code: language for language in LANGUAGES}
