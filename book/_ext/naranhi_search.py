"""Full-text search for Korean and English on one page, in place of Sphinx's English one.

Sphinx has no Korean search.  Its English one indexes 버블을 as one word, so a reader who looks
for 버블 finds nothing.  Here a run of Hangul is indexed by all its pieces of one to three
syllables, and a query is looked up by its pieces of three (or as it is, when shorter): 대역폭 in
대역폭이 is one look-up, 파이프라인 is three, 파이프, 이프라 and 프라인.  Words in other scripts are
stemmed as in English, and an identifier is indexed by its parts too: ``all_reduce`` in
``ring_all_reduce``.
"""

import re

from sphinx.search.en import SearchEnglish

HANGUL = "가-힣"
PIECE = 3
# An identifier of more parts is a hash or some such, which nobody looks up by its parts.
PARTS = 6


class SearchKoreanEnglish(SearchEnglish):
    """The splitter of the index (``split``) and that of the query (``js_splitter_code``)."""

    lang = "ko"
    language_name = "Korean and English"
    js_splitter_code = rf"""
var splitQuery = (query) =>
  (query.match(/[{HANGUL}]+|(?:(?![{HANGUL}])[\p{{L}}\p{{N}}_])+/gu) || []).flatMap((word) =>
    /^[{HANGUL}]/.test(word) && word.length > {PIECE}
      ? Array.from({{length: word.length - {PIECE - 1}}}, (_, i) => word.slice(i, i + {PIECE}))
      : [word]);
"""

    def split(self, input: str) -> list[str]:
        """The index entries, not yet stemmed, of a text."""
        words = []
        for hangul, other in re.findall(rf"([{HANGUL}]+)|([^\W{HANGUL}]+)", input):
            if hangul:
                pieces = [
                    hangul[start : start + size]
                    for size in range(1, PIECE + 1)
                    for start in range(len(hangul) - size + 1)
                ]
            else:
                parts = re.findall(r"[^\W\d_]+|\d+", other)
                pieces = [other]
                if 1 < len(parts) <= PARTS:
                    pieces += [
                        "_".join(parts[start:stop])
                        for start in range(len(parts))
                        for stop in range(start + 1, len(parts) + 1)
                    ]
            words += pieces
        return words


def setup(app) -> dict:
    app.add_search_language(SearchKoreanEnglish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
